"""Tokenizers and chat templates that lose text, or work without end: one line that says so."""

from __future__ import annotations

import json
import mmap
import pickle
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main
from ladder.data import sandbox
from ladder.data.prepare import prepare
from ladder.data.template import ChatTemplate
from ladder.data.tokenizer import GROWTH, growth, load_tokenizer, token_byte_lengths
from ladder.models import UserError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def changed(tokenizer: Path, out: Path, **parts: Any) -> Path:
    """A copy of a tokenizer with other parts."""
    definition = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    out.mkdir()
    (out / "tokenizer.json").write_text(json.dumps({**definition, **parts}))
    return out


def test_ids_that_do_not_fit(tokenizer: Path, tmp_path: Path) -> None:
    """An array of 2**31 lengths would take 8 GB."""
    added = {"id": 2**31, "content": "<x>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {**definition["model"]["vocab"], "<x>": 2**31}
    model = {**definition["model"], "vocab": vocab}
    tokens = [*definition["added_tokens"], added]
    bad = changed(tokenizer, tmp_path / "bad", model=model, added_tokens=tokens)
    with pytest.raises(UserError, match="a token of id 2147483648; ids must be below 16777216"):
        token_byte_lengths(load_tokenizer(bad))


def backtracking(tokenizer: Path, out: Path) -> Path:
    """A tokenizer whose pattern takes a time exponential in the number of x."""
    definition = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    both = {"type": "Sequence", "pretokenizers": [split, definition["pre_tokenizer"]]}
    return changed(tokenizer, out, pre_tokenizer=both)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pattern_that_backtracks(
    tokenizer: Path, tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library panics, which is no Exception; in a worker, too, it is one line."""
    bad = backtracking(tokenizer, tmp_path / "bad")
    (tmp_path / "a.txt").write_text("x" * 60)
    (tmp_path / "b.txt").write_text("x" * 60)
    command = ["data", "prepare", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--workers"]
    command += [str(workers), "--tokenizer", str(bad), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "error: the tokenizer fails to tokenise the text (Onig: Regex search error" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_normaliser_that_grows_text(tokenizer: Path, tmp_path: Path) -> None:
    """2 MiB of text are tokenised at once: a thousandfold, they would take all memory."""
    (tmp_path / "a.txt").write_text("even text " * 1000)
    for times, fits in ((1000, False), (2, True)):
        grow = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * times}
        bad = changed(tokenizer, tmp_path / f"{times}", normalizer=grow)
        if fits:
            prepare([tmp_path / "a.txt"], bad, tmp_path / "fits")
            continue
        with pytest.raises(UserError, match=r"normaliser makes .* more than 32 times as many"):
            prepare([tmp_path / "a.txt"], bad, tmp_path / "out")


def test_what_cannot_grow_is_not_tried() -> None:
    """Llama 2's normalisers, say. Catches two that are tame, and together are not."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, replace]}
    long = {**replace, "content": "e" * (GROWTH - 1)}
    assert growth(llama) == 2
    assert growth(long) == GROWTH
    assert growth({"type": "Sequence", "normalizers": [long, llama]}) > GROWTH
    assert growth({"type": "Precompiled", "precompiled_charsmap": ""}) > GROWTH
    assert growth({"type": "Lowercase"}) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_a_tokenizer_that_drops_all_text(tokenizer: Path, tmp_path: Path, chat: bool) -> None:
    """A post-processor without the text in it; end tokens alone were stored."""
    drop = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    bad = changed(tokenizer, tmp_path / "bad", post_processor=drop)
    assert load_tokenizer(bad).encode("text", add_special_tokens=False).ids == []
    path = tmp_path / "a.jsonl"
    record = {"messages": TALK, "text": "some text"}
    path.write_text(f"{json.dumps(record)}\n" * 3)
    (tmp_path / "chat.jinja").write_text(PLAIN)
    more: dict[str, Any] = {}
    if chat:
        more = {"chat_field": "messages", "chat_template": tmp_path / "chat.jinja"}
    with pytest.raises(UserError, match="makes 0 tokens of 3 documents: it drops their text"):
        prepare([path], bad, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


# ---- templates

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
LONG = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "works for",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}":
        "works for",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}": "writes more than 67,108,864 char",
    "{{ 'x' * 10**10 }}": "takes more than 1 GiB",
    "{{ 'x'|center(10000000000) }}": "takes more than 1 GiB",
    "{{ '%9999999999d' % 1 }}": "takes more than 1 GiB",
    "{{ 10**(10**10) }}": "a number of more than 65,536 bits",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}":
        "a number of more than 65,536 bits",
    "{{ 1.5|round(10**9, 'ceil') }}": "rounds to more than 100 decimals",
    "{{ lipsum(n=10**9) }}": "'lipsum' is undefined",
    "{{ '\\ud800' }}": "UnicodeEncodeError",
    "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}": "not valid Jinja .RecursionError",
    "{% for a in x %}" * 30 + "{% endfor %}" * 30: "not valid Jinja .SyntaxError",
    "{{ " + "9" * 5000 + " }}": "not valid Jinja .ValueError",
}  # fmt: skip


@pytest.mark.parametrize("source", LONG, ids=lambda source: source[:30])
def test_a_template_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if LONG[source] == "works for":
        monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    began, before = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match=f"the chat template of here .*{LONG[source]}"):
        ChatTemplate(source, {"eos_token": "</s>"}, "here").render(TALK)
    assert time.monotonic() - began < 60
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_limits_change_nothing_else() -> None:
    """Loop variables, filters with the context, and copies work as in Jinja."""
    source = (
        "{% for m in messages if m.content recursive %}{{ loop.index }}/{{ loop.length }}"
        "{{ loop.previtem.role if loop.previtem }}{{ loop.last }}"
        "{% if not loop.last %}{% continue %}{% endif %}"
        "{% else %}nobody{% endfor %}{{ messages|map(attribute='role')|join(',') }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 3 * 'a' }}{{ 2 ** 3 }}"
        "{{ messages[0]|tojson }}{{ 2.71|round(1) }}{% for c in 'ab' %}{{ c }}{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
    )
    template = ChatTemplate(source, {}, "here")
    wanted = (
        '1/2False2/2userTrueuser,assistant1aaa8{"role": "user", "content": "Hi"}2.7abrolecontent'
    )
    assert template.render(TALK) == wanted
    assert pickle.loads(pickle.dumps(template)).render(TALK) == wanted


def test_what_the_process_takes_is_not_the_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer's threads, say, between two conversations; what a template takes is no less."""
    monkeypatch.setattr(sandbox, "FRESH", 1000.0)
    template = ChatTemplate("{{ messages[0].content * 100 }}", {}, "here")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with mmap.mmap(-1, 2 * sandbox.MEMORY):
        assert len(template.render([{"role": "user", "content": "a" * 600_000}])) == 6 * 10**7
        with pytest.raises(UserError, match="more than 1 GiB"):
            template.render([{"role": "user", "content": "a" * 2 * 10**7}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_threads_leave_the_limit_as_it_was() -> None:
    """A limit that one sets while another's holds would be the process's for ever."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    entered = threading.Event()

    def enter() -> None:
        with sandbox.Sandbox().within_limits():
            entered.set()

    other = threading.Thread(target=enter)
    with sandbox.Sandbox().within_limits():
        other.start()
        assert not entered.wait(0.1)
    other.join()
    assert entered.is_set()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
