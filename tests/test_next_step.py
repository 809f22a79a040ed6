"""The last line of a command is a command: it can be parsed, its paths are there, and it works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from ladder.cli import main, make_parser, parse_words
from ladder.folders import newest
from ladder.next_step import free, say_next
from ladder.progress import Progress, amount
from tests.chats import TEMPLATE, make_chats, write_chats
from tests.corpus import make_corpus

Captured = pytest.CaptureFixture[str]
SMALL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=2", "steps=2",
         "seq_len=16", "batch_size=2", "warmup_steps=1", "eval_windows=2"]  # fmt: skip


def step(words: list[str], capsys: Captured, *more: str) -> list[str]:
    """Run a command; the words of the one that its last line, and no other line, names."""
    assert main([*words, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("next: ")] == lines[-1:]
    ladder, *found = shlex.split(lines[-1].removeprefix("next: "))
    assert ladder == "ladder"
    parse_words(make_parser(), found)
    return found


def test_a_first_session_follows_the_last_lines(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From text to a model that speaks, by the lines that commands print."""
    make_corpus(tmp_path)
    folder = tmp_path / "my runs"  # to be quoted
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = step(
        ["tokenizer", "train", str(tmp_path / "texts"), "--vocab-size", "300",
         "--heldout-fraction", "0.2", "--out", str(folder / "tokenizer")],
        capsys,
    )  # fmt: skip
    assert words[:3] == ["data", "prepare", str(tmp_path / "texts")]
    assert words[words.index("--heldout-fraction") + 1] == "0.2"
    words = step(words, capsys)
    assert words == ["train", "tiny", f"data={folder / 'data'}", f"out={folder / 'tiny'}"]
    words = step(words, capsys, "plan=standard", *SMALL, "--device", "cpu")
    assert words == ["generate", str(folder / "tiny"), "--prompt", "The"]
    assert main([*words, "--max-new-tokens", "2"]) == 0
    assert "next: " not in capsys.readouterr().out  # text for programs
    command = ["convert", "sensitivity", words[1], "--data", str(folder / "data"), "--layers", "1"]
    words = step(command, capsys, "--windows", "2", "--seq-len", "16")
    assert words[:3] == ["convert", str(folder / "tiny"), "--plan"]
    words = step(words, capsys)
    assert words == ["generate", str(folder / "tiny-hybrid"), "--prompt", "The"]
    assert main([*words, "--max-new-tokens", "2"]) == 0


def test_what_cannot_be_trained_leads_nowhere(tmp_path: Path, capsys: Captured) -> None:
    """One document: its text has few pairs to merge, and none is held out."""
    text, tokenizer, data = tmp_path / "a.txt", tmp_path / "tokenizer", tmp_path / "data"
    text.write_text("a line of text")
    words = ["tokenizer", "train", str(text), "--vocab-size", "1024", "--out", str(tokenizer)]
    assert main(words) == 0
    assert "fewer than --vocab-size=1024: the text has no more pairs" in capsys.readouterr().out
    assert (
        main(["data", "prepare", str(text), "--tokenizer", str(tokenizer), "--out", str(data)]) == 0
    )
    remedy = "prepare two documents or more (files, or lines of a .jsonl file), with"
    out = capsys.readouterr().out
    assert f"no text is held out, and `ladder train` needs some: {remedy}" in out
    assert "next: " not in out
    command = ["train", "tiny", f"data={data}", f"out={tmp_path / 'run'}", "seq_len=4"]
    assert main([*command, "--device", "cpu"]) == 2
    assert f"split 'heldout' is empty; {remedy}" in capsys.readouterr().err
    (tmp_path / "b.txt").write_text("another text of the same words in another order")
    words[2:3] = [str(tmp_path / "b.txt"), str(text)]
    words[-3:] = ["258", "--out", str(tmp_path / "258")]
    assert main(words) == 0
    assert "fewer" not in capsys.readouterr().out


def test_chats_lead_to_a_chat(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From conversations to an answer. The loss of a model from random weights is no use here, and
    a prompt that is no message is nothing that the model was tuned on."""
    data, base = make_corpus(tmp_path), tmp_path / "base"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["train", "tiny", f"data={data}", f"out={base}", "plan=standard", *SMALL]
    step(command, capsys, "--device", "cpu")
    chats = write_chats(tmp_path / "chats.jsonl", make_chats(60))
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    words = ["data", "prepare", str(chats), "--chat-field", "messages", "--chat-template",
             str(tmp_path / "chat.jinja"), "--heldout-fraction", "0.1"]  # fmt: skip
    given = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "a")]
    assert main([*words, *given]) == 0  # the tokenizer is no model's
    out = capsys.readouterr().out
    told = f"ladder finetune tiny-sft init=MODEL data={tmp_path / 'a'} out={tmp_path / 'tiny-sft'}"
    assert out.splitlines()[-1].endswith(f", a run's folder for example: {told}")
    assert "next: " not in out
    model = newest(base)
    words = step([*words, "--tokenizer", str(model), "--out", str(tmp_path / "b")], capsys)
    assert words == ["finetune", "tiny-sft", f"init={model}", f"data={tmp_path / 'b'}",
                     f"out={tmp_path / 'tiny-sft'}"]  # fmt: skip
    small = ["steps=2", "seq_len=64", "batch_size=2", "warmup_steps=1", "eval_windows=2"]
    words = step(words, capsys, *small, "--device", "cpu")
    assert words == ["generate", str(tmp_path / "tiny-sft"), "--chat", "--prompt", "Hi"]
    assert main([*words, "--max-new-tokens", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (20, "next: ladder train tiny data={} seq_len=32 out={}"),
        (600, "next: ladder train tiny data={} out={}"),
        (6, "too little text to train on: a split has 13 tokens; prepare more documents"),
    ],
)
def test_windows_fit_the_text(words: int, told: str, tmp_path: Path, capsys: Captured) -> None:
    """A recipe's may be longer than a split, which training refuses."""
    make_corpus(tmp_path)
    text = tmp_path / "posts.jsonl"
    lines = [json.dumps({"text": f"{letter} " * words}) + "\n" for letter in "ab"]
    text.write_text("".join(lines))
    given = ["--tokenizer", str(tmp_path / "tokenizer"), "--heldout-fraction", "0.5"]
    out = tmp_path / "few"
    assert main(["data", "prepare", str(text), *given, "--out", str(out)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == told.format(out, tmp_path / "tiny")
    if last.startswith("next: "):
        command = [*shlex.split(last)[2:], *(each for each in SMALL if "seq_len" not in each)]
        assert main([*command, "--device", "cpu"]) == 0


def test_a_path_that_is_taken_is_not_proposed(tmp_path: Path) -> None:
    assert free(tmp_path / "data") == tmp_path / "data"
    (tmp_path / "data").mkdir()
    assert free(tmp_path / "data") == tmp_path / "data-2"
    (tmp_path / "data-2").touch()
    assert free(tmp_path / "data") == tmp_path / "data-3"
    for name, other in (("t3.html", "t3-2.html"), ("llama-3.1", "llama-3.1-2")):
        (tmp_path / name).touch()
        assert free(tmp_path / name) == tmp_path / other


def test_plans_lead_to_a_measurement(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without data to train on
    assert step(["plans", "--layers", "8"], capsys)[:4] == ["plans", "ladder", "--layers", "8"]
    words = step(["plans", "ladder", "none", "--model", "tiny"], capsys)
    assert words[:2] == ["bench", "train"]
    assert words[-2:] == ["--plans", "ladder"]
    assert step(["plans", "dtp-2", "--model", "tiny", "--tp-degree", "3"], capsys) == ["demo"]
    assert step(["plans", "ladder", "--layers", "6"], capsys) == ["demo"]
    words = step(["plans", "ladder", "dtp-2", "--layers", "32"], capsys)
    ranks = ["--tp-degree", "4"]
    assert words == ["predict", "llama-3-8b", "--plans", "ladder", "dtp-2", *ranks]
    step(words, capsys)
    Path("deep.yaml").write_text("layers: [{layers: 0-23, preset: ladder}]\n")
    words = step(["plans", "deep.yaml"], capsys)
    assert words == ["predict", "quality-300m", "--plans", "deep.yaml"]
    step(words, capsys)
    assert step(["plans", "dtp-2", "--layers", "32", "--tp-degree", "3"], capsys) == ["demo"]
    assert main(["plans", "ladder", "--json"]) == 0
    assert "next: " not in capsys.readouterr().out


def test_a_plan_leads_to_its_training_where_there_is_data(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/data").mkdir(parents=True)
    (tmp_path / "runs/data/index.json").touch()
    Path("mine.yaml").write_text("layers: [{layers: 0-3, preset: desync-2x}]\n")
    words = step(["plans", "mine.yaml", "--tp-degree", "2"], capsys)
    assert words == ["train", "tiny", "plan=mine.yaml", "tp_degree=2", "out=runs/mine"]
    words = step(["plans", "ladder", "--model", "tiny"], capsys)
    assert words == ["train", "tiny", "plan=ladder", "out=runs/ladder"]
    Path("odd.yaml").write_text("tp_degree: 3\nlayers: [{layers: 0-3, preset: desync-2x}]\n")
    Path("apart.yaml").write_text("layers: [{layers: 0-3, preset: none}]\n")
    for words in (["desync-2x", "--tp-degree", "3"], ["desync-2x", "--tp-degree", "16"],
                  ["odd.yaml"], ["apart.yaml"]):  # fmt: skip
        assert step(["plans", *words, "--layers", "4"], capsys) == ["demo"]  # tiny has 8 heads
    words = step(["plans", "ladder", "--model", "tiny", "--tp-degree", "3"], capsys)
    assert words == ["train", "tiny", "plan=ladder", "out=runs/ladder"]  # at any T
    assert step(["plans", "ladder", "none", "--model", "tiny"], capsys)[0] == "bench"
    assert step(["plans", "none", "--model", "tiny"], capsys) == ["demo"]


def test_a_measurement_of_steps_leads_to_its_plans(tmp_path: Path, capsys: Captured) -> None:
    threads = torch.get_num_threads()
    command = ["bench", "train", "--model", "tiny", "--layers", "1", "--plans", "standard",
               "--seq-len", "16", "--batch", "1", "--steps", "1", "--dtype", "float32", "--device",
               "cpu", "--out", str(tmp_path / "bench")]  # fmt: skip
    assert step(command, capsys) == ["plans", "standard", "--model", "tiny"]
    assert torch.get_num_threads() == threads


def test_one_rank_says_it(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("RANK", "1")
    say_next("demo")
    monkeypatch.setenv("RANK", "0")
    say_next("generate", Path("a b"), "--prompt", "it's")
    assert capsys.readouterr().out == "next: ladder generate 'a b' --prompt 'it'\"'\"'s'\n"


def test_a_failure_has_no_next_step(tmp_path: Path, capsys: Captured) -> None:
    assert main(["convert", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    assert "next: " not in captured.out + captured.err


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 bytes"), (999, "999 bytes"), (1234, "1.2 kB"), (99_600, "100 kB"), (999_499, "999 kB"),
     (999_600, "1.0 MB"), (16_060_522_496, "16.1 GB"), (10**16, "10000 TB")],
)  # fmt: skip
def test_amounts_have_digits_that_say_something(nbytes: int, said: str) -> None:
    assert amount(nbytes) == said


def test_more_than_was_asked_for_is_no_share_of_it(capsys: Captured) -> None:
    with Progress("tokenise", 10, "tokens") as progress:
        progress.update(25_257)
    assert capsys.readouterr().err.startswith("tokenise: 25,257 tokens, ")
