"""`ladder predict MODEL`: what it says where nothing fits is what works."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.perf.machine_files import load, write
from tests.perf.asking import Out

LONG = "llama-3-8b --train --plans standard --context 8192"


def last(capsys: Out, words: str) -> str:
    assert main(["predict", *shlex.split(words)]) == 0
    return capsys.readouterr().out.splitlines()[-1]


def followed(words: str, remedy: str) -> str:
    """The command as a remedy has it."""
    for each in remedy.split(" and "):
        verb, option = each.split(" --", 1)
        for name in re.findall(r"--(\S+)", each):  # given anew, or left out
            words = re.sub(rf" --{name} \S+", "", words)
        words += f" --{option}" if verb == "take" else ""
    return words


@pytest.mark.parametrize(
    ("words", "remedies"),
    [
        ("codellama-34b --train", ["take --nodes 2"]),
        (f"{LONG} --layouts fsdp --batch 4", ["take --activation-checkpointing full",
                                              "take --micro-batch 2"]),
        (f"{LONG} --layouts fsdp --batch 64", ["take --micro-batch 2"]),
        (f"{LONG} --layouts fsdp --batch 12", ["take --micro-batch 2"]),  # 3 does not fit
        (f"{LONG} --layouts fsdp --batch 9", ["take --micro-batch 1"]),
        (f"{LONG} --layouts ddp --batch 1", ["leave out --layouts"]),
        (f"{LONG} --layouts fsdp --batch 8 --machine h100x4",
         ["take --micro-batch 2 --activation-checkpointing full"]),
        ("llama-3-8b --train --plans standard --context 6144 --layouts fsdp --batch 8 "
         "--machine h100x4", ["take --batch 1"]),  # of one pass, which keeps no gradients
        ("codellama-34b --train --plans standard --layouts tp4+sp",
         ["leave out --layouts and take --nodes 2"]),
        ("llama-3-70b --train --batch 16", ["take --nodes 4 --activation-checkpointing full"]),
        ("llama-3-70b --tp 1", ["leave out --tp", "take --weights fp8"]),
        ("llama-3.1-405b --machine h100x8 --tp 4", ["leave out --tp and take --weights fp8"]),
        ("llama-3-70b --machine h200x2 --tp 1 --batch 64 --context 8192",
         ["leave out --tp and take --batch 26", "take --weights fp8 --batch 14"]),
        ("llama-3.1-405b --machine h100x8 --tp 4 --batch 64 --context 8192",
         ["leave out --tp and take --weights fp8 --batch 14"]),
        ("llama-3-8b --machine h200x1 --prefill --batch 64 --context 8192 --plans standard",
         ["take --cache fp8", "take --batch 59", "take --context 7168"]),
    ],
)  # fmt: skip
def test_remedies_work(words: str, remedies: list[str], capsys: Out) -> None:
    """Each of those that are named, with the rest of the command as it was."""
    said, _, found = last(capsys, words).partition(": ")
    assert said.startswith("nothing fits ")
    *tried, end = found.split(", or ")
    assert end == "give --machine more GPUs"
    assert tried == remedies
    for each in tried:
        asked = followed(words, each)
        assert last(capsys, asked).startswith(("next: ", "no command times batch ")), asked
        if number := re.search(r"--(batch|context) (\d+)$", each):  # and with no larger one
            more = int(number[2]) + (1 if number[1] == "batch" else 1024)
            larger = re.sub(r"\d+$", str(more), asked)
            assert last(capsys, larger).startswith("nothing fits "), larger


def test_what_no_option_helps_needs_more_gpus_of_a_node(capsys: Out) -> None:
    """A rank of TP 4 holds a fourth of 405B in bfloat16, however many nodes there are."""
    found = last(capsys, "llama-3.1-405b --train --nodes 16 --plans standard")
    assert found.endswith("alone take 286.5: give --machine more GPUs")


@pytest.mark.parametrize(
    "words", ["llama-3.1-405b --tp 4", "llama-3-8b --train", "llama-3-70b --tp 2 --batch 64"]
)
def test_a_bound_has_no_remedy_but_a_model(words: str, capsys: Out) -> None:
    assert last(capsys, f"{words} --plans none") == (
        "nothing is recommended: a plan without communication is a bound and no model; name "
        "another one in --plans"
    )


def test_what_cannot_be_predicted_is_no_remedy(tmp_path: Path, capsys: Out) -> None:
    """A file without `step_stretch` has no decode steps, whatever fits."""
    one = load("h200x1")
    for name, tried in (("all", ["take --weights fp8"]), ("fewer", [])):
        values = {key: value for key, value in one.values.items() if key != "step_stretch"}
        machine = replace(one, name=name, values=values if name == "fewer" else one.values)
        write(machine, tmp_path / name)
        found = last(capsys, f"llama-3-70b --machine {tmp_path / name}").partition("134.4: ")[2]
        assert found == ", or ".join([*tried, "give --machine more GPUs"])


def test_nodes_that_are_not_predicted_are_no_remedy(capsys: Out) -> None:
    words = "codellama-34b --train --plans standard --machine h200x4-no-p2p"
    assert last(capsys, words).endswith(": give --machine more GPUs")
    assert main(["predict", *shlex.split(words), "--nodes", "2"]) == 2
    assert "several nodes of such are not predicted" in capsys.readouterr().err
