"""`ladder predict MODEL`: that its page and its trace agree with the table."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.bench.trace import kernels_of, overlap, read_trace
from ladder.cli import main
from ladder.perf.machine_files import load, write
from tests.perf.asking import Out, asked

STEP = "llama-3-8b --train --plans standard --layouts tp4+sp --batch 8 --micro-batch 2"


def traced(capsys: Out, words: str, file: Path) -> tuple[dict[str, Any], float, str]:
    """The recommendation, the milliseconds of its kernels, and what the trace says of them."""
    best = asked(capsys, *shlex.split(words), "--trace", str(file))["recommended"]
    events = read_trace(file)
    (mark,) = (each for each in events if each.get("cat") == "user_annotation")
    span = overlap(kernels_of(events, mark["name"])).span
    assert mark["dur"] == pytest.approx(span + 4e3)  # a pause at either end, and nothing else
    return best, span / 1e3, events[0]["args"]["name"].partition("; ")[2]


@pytest.mark.parametrize("layout", ["tp4+sp", "tp2+sp+fsdp", "ddp"])
def test_a_trace_has_all_micro_batches(layout: str, tmp_path: Path, capsys: Out) -> None:
    file, words = tmp_path / "trace.json", STEP.replace("tp4+sp", layout)
    words = words.replace("llama-3-8b", "llama-3.2-1b")
    best, span, said = traced(capsys, words, file)
    assert (said, span) == ("", pytest.approx(best["us"] / 1e3))
    kernels = [each for each in read_trace(file) if each.get("cat") == "kernel"]
    # 4 x 16 layers, forward and backward; and one optimiser.
    assert sum("sdpa" in each["name"] for each in kernels) == 2 * 4 * 16
    assert sum(each["args"]["is"] == "optimiser" for each in kernels) == 1
    (*_, last) = sorted(kernels, key=lambda each: each["ts"])
    assert last["args"]["is"] == "optimiser"


@pytest.mark.parametrize("phase", ["--decode", "--prefill", "--train --batch 4 --micro-batch 2"])
def test_a_trace_says_what_waiting_it_lacks(phase: str, tmp_path: Path, capsys: Out) -> None:
    words = f"llama-3-8b --plans ladder {phase}"
    best, span, said = traced(capsys, words, tmp_path / "trace.json")
    assert (said, span) == ("", pytest.approx(best["us"] / 1e3))
    best, span, said = traced(capsys, f"{words} --jitter 5", tmp_path / "trace.json")
    waiting = best["waiting_us"] / 1e3
    assert waiting > 0
    assert span + waiting == pytest.approx(best["us"] / 1e3)
    assert said == (
        f"{span:.3f} of {best['us'] / 1e3:.3f} ms: without {waiting:.3f} ms of waiting for slower "
        f"ranks"
    )


@pytest.mark.parametrize(
    "words",
    [
        "llama-3-8b --batch 1",
        "llama-3.2-1b --train --layouts tp2+sp+fsdp --batch 2 --micro-batch 1 --plans ladder",
        "llama-3-8b --prefill --tp 4 --plans ladder --batch 4",
    ],
)
def test_no_slices_of_a_track_overlap(words: str, tmp_path: Path, capsys: Out) -> None:
    """Chrome's format has one within the other, or one after the other."""
    file = tmp_path / "trace.json"
    asked(capsys, *shlex.split(words), "--trace", str(file))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    names = set()
    for each in read_trace(file):
        if each["ph"] == "X":
            place = each["ts"], each["ts"] + each["dur"]
            tracks.setdefault((each["pid"], each["tid"]), []).append(place)
        elif each["name"] == "thread_name":
            names.add(each["args"]["name"])
    assert len(names) == len(tracks) - 1  # but for the pass's mark
    assert len([name for name in names if name.startswith("links, ")]) > 1
    for places in tracks.values():
        for (_, before), (start, _) in itertools.pairwise(sorted(places)):
            assert start >= before - 1e-6


def test_sums_over_a_single_rank_are_no_kernels(tmp_path: Path, capsys: Out) -> None:
    file = tmp_path / "trace.json"
    words = "llama-3.2-1b --train --layouts fsdp --plans standard --trace"
    asked(capsys, *shlex.split(words), str(file))
    assert all(each["dur"] > 0 for each in read_trace(file) if each["ph"] == "X")


def test_a_trace_names_what_runs_of_sums_in_8_bits(tmp_path: Path, capsys: Out) -> None:
    """A gather; the embedding's and the last layer's two, of one row, are not rounded."""
    file = tmp_path / "trace.json"
    words = "llama-3-8b --prefill --tp 4 --reducers async-int8 --plans standard"
    asked(capsys, *shlex.split(words), "--trace", str(file))
    kernels = [each for each in read_trace(file) if each.get("cat") == "kernel"]
    rounded = [each for each in kernels if "in 8 bits" in each["args"]["is"]]
    assert len(rounded) == 62
    assert {each["name"] for each in rounded} == {"ncclDevKernel_AllGather_RING_LL"}
    assert sum("AllReduce" in each["name"] for each in kernels) == 3


def test_a_trace_says_what_the_host_takes(tmp_path: Path, capsys: Out) -> None:
    """Many prompts of a small model: kernels of microseconds, launched one by one."""
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 8,
             "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 128}  # fmt: skip
    (tmp_path / "small.yaml").write_text(json.dumps(shape), encoding="utf-8")
    words = f"{tmp_path / 'small.yaml'} --prefill --context 64 --batch 300 --plans standard"
    best, span, said = traced(capsys, f"{words} --machine h100x1", tmp_path / "trace.json")
    late = best["us"] / 1e3 - span
    assert late > 0
    assert said.endswith(f"without {late:.3f} ms of waiting for the host's launches")


def test_a_page_asks_about_batches_that_the_micro_batch_divides(
    tmp_path: Path, capsys: Out
) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    asked(capsys, *shlex.split(STEP), "--page", str(page))
    text = page.read_text(encoding="utf-8")
    assert [f"tp4+sp, batch {n}:" in text for n in (1, 2, 4, 8)] == [False, True, True, True]
    assert "not in the plot" not in text


def test_a_page_leaves_out_batches_that_cannot_be_predicted(tmp_path: Path, capsys: Out) -> None:
    """Those that nobody asked for: without the curve of copies, which only large prompts need."""
    pytest.importorskip("matplotlib")
    page, file, machine = tmp_path / "page.html", tmp_path / "own.json", load("h200x4")
    kept = tuple(each for each in machine.curves if each.name != "peer copy")
    write(replace(machine, curves=kept), file)
    words = ("llama-3-8b", "--prefill", "--plans", "ladder", "--tp", "4", "--machine", str(file))
    assert main(["predict", *words, "--batch", "16"]) == 2
    capsys.readouterr()
    asked(capsys, *words, "--context", "128", "--page", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert "Batch 64 is not in the plot: machine" in text
    assert "at most: sequences of 128 tokens, by memory" in text


def test_batches_are_those_that_the_micro_batch_divides(capsys: Out) -> None:
    """Where the user names none; and a micro-batch is refused by its own name."""
    words = ("llama-3-8b", "--train", "--plans", "standard", "--layouts", "tp4+sp", "--micro-batch")
    for micro, batches in (("2", [2, 4, 8]), ("3", [3])):
        rows = asked(capsys, *words, micro)["rows"]
        assert sorted(row["batch"] for row in rows) == batches
    memory = asked(capsys, *words, "2", "--objective", "memory")["rows"]
    assert [row["batch"] for row in memory] == [2]
    for micro in ("-2", "2000000"):
        assert main(["predict", *words, micro]) == 2
        said = f"--micro-batch={micro} must be 0, for the whole batch, to 1,048,576"
        assert said in capsys.readouterr().err
    assert main(["predict", "llama-3-8b", "--micro-batch", "2"]) == 2
    assert "--micro-batch is of training" in capsys.readouterr().err
