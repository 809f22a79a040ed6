"""`ladder demo`, tiny but whole: its report on five plans, and whose files it replaces."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.demo import command as demo
from ladder.files import beside
from ladder.lock import hold
from ladder.models.errors import UserError
from tests.commands import Start

COLLECTIVES = {  # of 4 layers: per token, and how many of them block
    "standard": (8, 8),
    "parallel": (4, 4),
    "ladder": (8, 1),
    "desync-4x": (2, 2),
    "hybrid": (8, 4),
}
TINY = {
    "model": "tiny",
    "steps": 6,  # the report's curves average 5
    "seq_len": 32,
    "batch_size": 2,
    "warmup_steps": 1,
    "eval_windows": 2,
    "log_interval": 1,
}


def tiny_demo(folder: Path, out: Path, plans: Sequence[str]) -> int:
    """The demo with a few steps on a few documents, in place of the standard library."""
    texts = [folder / "texts"]

    def tiny_prepare(paths: None, tokenizer: Path, out: Path) -> dict[str, Any]:
        assert paths is None
        return prepare(texts, tokenizer, out, heldout_fraction=0.2)

    known = demo.load_mapping(demo.find("train", "demo"))
    assert set(TINY) <= set(known)
    with mock.patch.multiple(
        demo,
        load_mapping=lambda path: {**known, **TINY},
        open_corpus=lambda: open_corpus(texts, heldout_fraction=0.2),
        prepare=tiny_prepare,
        VOCAB_SIZE=300,
        NEW_TOKENS=8,
        PLANS={plan: demo.PLANS[plan] for plan in plans},
    ):
        return demo.main(out)


def check_report(out: Path, plans: Sequence[str]) -> None:
    results = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert list(results) == list(plans)
    for plan, result in results.items():
        assert set(result) == {
            "bits_per_byte",
            "collectives_per_token",
            "blocking_collectives_per_token",
            "tokens_per_second",
            "parameters",
            "tp2_max_logit_difference",
        }
        counts = (result["collectives_per_token"], result["blocking_collectives_per_token"])
        assert counts == COLLECTIVES[plan], plan
        assert 1.0 < result["bits_per_byte"] < 9.0, plan  # random bytes take 8
        assert 1.0 < result["tokens_per_second"] < math.inf, plan
        assert 0.0 <= result["tp2_max_logit_difference"] < 1e-4, plan
    # One shape but for norms of 96: parallel has one a layer, desync-4x (T = 4) one a rank before
    # each sublayer where residuals differ, which are 3 of each 4.
    more = {
        plan: result["parameters"] - results["standard"]["parameters"]
        for plan, result in results.items()
    }
    expected = {"parallel": -4 * 96, "desync-4x": 6 * 3 * 96}
    assert more == {plan: expected.get(plan, 0) for plan in plans}
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    samples = json.loads((out / "samples.json").read_text(encoding="utf-8"))
    for plan in plans:
        assert f"<td>{plan}</td>" in page  # its row
        assert f"<pre>{plan}\n" in page  # its picture
        assert samples[plan].startswith(demo.PROMPT)
        assert not (out / plan / "logits.pt").exists()


@pytest.mark.parametrize(
    ("few", "whole"),
    [
        (["standard", "ladder"], ["standard", "ladder"]),
        pytest.param(["standard", "ladder"], list(COLLECTIVES), marks=pytest.mark.slow),
    ],
    ids=["two", "every"],
)
def test_the_demo_reports_its_plans_and_replaces_its_own_output(
    few: list[str], whole: list[str], corpus: Path, tmp_path: Path, start: Start
) -> None:
    """First with few plans; then with all of `whole`, over what the first left."""
    out = tmp_path / "new" / "demo"
    assert list(demo.PLANS) == list(COLLECTIVES)
    command = start(tiny_demo, corpus.parent, out, few)
    assert command.wait() == 0, command.err
    check_report(out, few)
    before = {path.name for path in out.iterdir()}
    for lost in ("report.json", "ladder/metrics.jsonl"):  # as if it had been interrupted
        (out / lost).unlink()
    for stale in ("report.html", "tokenizer/tokenizer.json"):
        (out / stale).write_text("stale", encoding="utf-8")

    command = start(tiny_demo, corpus.parent, out, whole)
    assert command.wait() == 0, command.err
    check_report(out, whole)
    printed = command.out
    assert str(out / "report.html") in printed
    for plan in whole:
        assert any(line.split()[:1] == [plan] for line in printed.splitlines())
    assert {path.name for path in out.iterdir()} == before | set(whole)


def test_a_training_that_was_told_to_stop_ends_the_demo(corpus: Path, tmp_path: Path) -> None:
    with (
        mock.patch.object(demo, "train", return_value=None),
        pytest.raises(UserError, match=r"SIGTERM.*run it again"),
    ):
        tiny_demo(corpus.parent, tmp_path / "demo", ("standard", "ladder"))


@pytest.mark.parametrize(
    "names",
    [
        ["thesis.txt"],
        ["thesis.txt", "report.json"],
        ["report.json"],
        ["thesis.txt", "tokenizer/tokenizer.json"],
        ["tokenizer/thesis.txt"],
        ["thesis.txt", "report.json", "tokenizer/tokenizer.json", "ladder/recipe.json"],
        ["thesis.txt", "report.json", ".ladder-demo"],  # put there after a demo
        ["thesis/chapter.txt", "tokenizer/tokenizer.json", ".ladder-demo"],
    ],
    ids=" ".join,
)
def test_a_folder_with_files_of_the_users_is_refused_and_kept(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the demo went on")

    monkeypatch.setattr(demo, "open_corpus", never)
    out = tmp_path / "mine"
    for name in names:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the user's {name}", encoding="utf-8")
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError, match="mine"):
        demo.main(out)
    assert sorted(out.rglob("*")) == before
    for name in names:
        assert (out / name).read_text(encoding="utf-8") == f"the user's {name}"


def test_a_second_demo_in_the_folder_is_refused(tmp_path: Path) -> None:
    """Catches the running demo's folders removed under it."""
    out = tmp_path / "demo"
    (out / "tokenizer").mkdir(parents=True)
    (out / demo.MARK).write_text("", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    with (
        hold(beside(out), "the first demo"),
        pytest.raises(UserError, match=rf"--out={out} is in use by another process: .*; wait for"),
    ):
        demo.main(out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_in_place_of_the_folder_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.write_text("the user's", encoding="utf-8")
    with pytest.raises(UserError, match="mine"):
        demo.main(out)
    assert out.read_text(encoding="utf-8") == "the user's"
