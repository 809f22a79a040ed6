"""The commands that run what is recommended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ladder.comm.switch import P2P_SWITCH
from ladder.perf.machine import Machine
from ladder.perf.nodes import without_peers
from ladder.perf.planner.candidates import work
from ladder.perf.planner.inference import untimed
from ladder.perf.planner.question import Question, Row


def running(question: Question, row: Row) -> list[str]:
    """The words of the command that runs a row; [] if there is none: see `lacking`."""
    words = work(question).command(question, row.candidate)
    return [*_launcher(question), *words] if words else []


def commands(question: Question, rows: Sequence[Row]) -> list[str]:
    """The commands that run some rows. Those of inference that differ in the batch alone are one,
    since `ladder bench inference` takes several batches, which `ladder bench train` does not."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for row in rows:
        if words := running(question, row):
            joins = question.phase != "train" and "--batch" in words
            at = words.index("--batch") + 1 if joins else len(words)
            rest = tuple(words[:at]), tuple(words[at + 1 :])
            found.setdefault(rest, []).extend(words[at : at + 1])
    return [shlex.join([*head, *batches, *tail]) for (head, tail), batches in found.items()]


def lacking(question: Question, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of the rows that no command runs."""
    return [untimed(question, row.candidate) for row in rows if not running(question, row)]


def as_its_links(machine: Machine) -> list[str]:
    """The words before a command for GPUs that cannot access each other's memory, if this machine's
    cannot."""
    return ["env", f"{P2P_SWITCH}=1"] if without_peers(machine) else []


def _launcher(question: Question) -> list[str]:
    """The first words of a command. A training step on several nodes is launched on each node."""
    if question.phase != "train" or question.nodes == 1:
        apart = question.phase == "train"  # `ladder bench inference` has an option
        return [*(as_its_links(question.machine) if apart else []), "ladder"]
    nodes = ["--nnodes", str(question.nodes), "--nproc-per-node", str(question.machine.gpus)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return ["torchrun", *nodes, *meeting, "-m", "ladder"]
