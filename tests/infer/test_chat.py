"""`ladder generate --chat`: a prompt is a user's message, written down by the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ladder.checkpoint import load_model
from ladder.cli import main
from ladder.data.tokenizer import load_tokenizer
from ladder.infer.engine import generate
from tests.chats import TEMPLATE

ASKED = "user: What is {}?\nassistant: "


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """A random Llama whose tokenizer has a chat template."""
    folder = shutil.copytree(llama, tmp_path / "model")
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text()) if config.is_file() else {}
    config.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def expected(folder: Path, things: list[str], count: int = 6) -> list[str]:
    """The model's answer, by the engine alone."""
    tokenizer = load_tokenizer(folder)
    tokenizer.encode_special_tokens = False
    texts = [ASKED.format(thing) for thing in things]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    found = generate(load_model(folder), prompts, max_new_tokens=count)
    return [
        tokenizer.decode(prompt + each.tokens)[len(tokenizer.decode(prompt)) :]
        for prompt, each in zip(prompts, found, strict=True)
    ]


def ask(folder: Path, *options: str) -> int:
    return main(["generate", str(folder), "--max-new-tokens", "6", "--ignore-eos", *options])


def test_a_prompt_is_a_users_message(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the answer is shown; several prompts are shown with theirs."""
    assert ask(model, "--chat", "--prompt", "What is one?") == 0
    assert capsys.readouterr().out == expected(model, ["one"])[0] + "\n"
    assert ask(model, "--chat", "--prompt", "What is one?", "--prompt", "What is two?") == 0
    out = capsys.readouterr().out
    for thing, answer in zip(("one", "two"), expected(model, ["one", "two"]), strict=True):
        assert f"What is {thing}?\n{answer}\n" in out


def test_a_template_of_ones_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file implies --chat, and wins over the tokenizer's."""
    other = tmp_path / "other.jinja"
    other.write_text("{{ 'user: ' + messages[0].content }}{{ '\\nassistant: ' }}")
    answer = expected(model, ["one"])[0]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    assert ask(model, "--chat-template", str(other), "--prompt", "What is one?") == 0
    assert capsys.readouterr().out == answer + "\n"


def test_the_answers_end_token_ends_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template's end token may be another than the one that ends a text."""
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(ASKED.format("one"), add_special_tokens=False).ids
    (whole,) = generate(load_model(model), [prompt], max_new_tokens=6)
    end = tokenizer.id_to_token(whole.tokens[2])
    assert whole.tokens.index(whole.tokens[2]) == 2, "choose another seed of the model"
    settings = {"chat_template": TEMPLATE, "eos_token": end}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    words = ["generate", str(model), "--max-new-tokens", "6", "--chat"]
    assert main([*words, "--prompt", "What is one?", "--prompt", "What is one?"]) == 0
    assert "(2 tokens, ended by stop)" in capsys.readouterr().out


def test_what_cannot_be_asked_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ raise_exception('no users') }}"}))
    assert ask(model, "--chat", "--prompt", "a") == 2
    error = capsys.readouterr().err
    assert "--prompt='a' makes a conversation that the template refuses (no users)" in error
    settings.write_text("{}")
    assert ask(model, "--chat", "--prompt", "a") == 2
    assert "has no chat template" in capsys.readouterr().err
