"""What the parts of an operator take on a machine: products in tiles, copies, sums, exchanges."""

from __future__ import annotations

import math
from typing import NamedTuple

from ladder.bench.ops.points import TURNS
from ladder.comm.capture import Mode
from ladder.costs import BF16, MULTIPROCESSORS
from ladder.ops.steps import Schedule, Work, jobs
from ladder.ops.waves import CUBLAS, count, least_taken, split, taken
from ladder.perf.grid import FILL, SQUARE, matrix_rate
from ladder.perf.machine import Machine
from ladder.perf.operators.run import Copies, Moves, Rates, Tiles
from ladder.perf.power import power_share
from ladder.perf.slowdowns import Slowdowns

# The rate of our Triton product over that of cuBLAS. At m 8192 in 2026-11-22-ops-h200x2.jsonl, less
# what its schedule exposes, it is 0.98 for `waiting` and `tracked`; in sketches on four H200 it was
# 0.95 to 0.99.
TRITON = 0.98


class Host(NamedTuple):
    """Microseconds that a host takes for a call, for each job, and for each kernel of ours."""

    call: float
    job: float = 0.0
    kernel: float = 0.0
    launches: bool = True  # most of it is the driver's, so that a slower host takes longer


# What the host takes for an overlapped call without a graph: (first day, host).
# - In the products of half-8b's o in 2026-11-23-ops-h200x2.jsonl, whose calls waited for it: 12, 16
#   and 26 jobs took 371, 419 and 499 us.
# - Of 2026-11-25-ops-h200x2.jsonl: gathers of 11 and 15 jobs took 173 and 187 us, a scatter of 12
#   with its sum 272, `tracked` of 11 with its product and sum 345; and `pushed` 110 to 129.
# - Calls that come again are launched as graphs (`ladder.ops.replay`): of
#   2026-11-28-ops-llama-h200x4.jsonl the eight shortest that wait for the host, gathers, scatters,
#   landings and all-reduces, took 169 to 195. It is Python's: on a host that needs 11 us to launch
#   a kernel gathers took 151 to 178 (2026-11-26-ops-again-h100x2.jsonl).
HOSTS: tuple[tuple[str, Host], ...] = (
    ("", Host(270.0, 8.9)), ("2026-11-25", Host(140.0, 3.0, 90.0)),
    ("2026-11-26", Host(185.0, launches=False)),
)  # fmt: skip
TODAY = HOSTS[-1][1]
PUSHED_HOST_US = 115.0
HOST_LAUNCH_US = 6.06  # the time in which that host launches a kernel
OURS = ("sum", "push")  # the actions that launch a kernel of ours
LARGE = 2.0**28  # bytes of a copy whose rate is the link's
# How long turns of one operator, without other kernels between them, stay above the power limit:
# chosen by records of operators. Prompts stay there longer (`boost_ms` of a machine's file).
BOOST_MS = 10.0


class OperatorCost:
    """Microseconds of an operator's parts in 16 bits, on a machine with as many GPUs as the group.

    host: the host's time for a call, from HOSTS.
    """

    def __init__(self, machine: Machine, host: Host = TODAY) -> None:
        self.machine, self.caller = machine, host
        self.gap = machine.value("prompt_gap_us")
        self.memory = 1e6 * machine.value("copy_tb_s")  # bytes a microsecond
        self.square = 2.0 * SQUARE**3 / (1e6 * machine.value("matrix_tflop_s"))
        self.slowdowns = Slowdowns(machine)

    def elements(self, rows: int, outputs: int, inputs: int) -> float:
        """Microseconds of one element of a large tile of cuBLAS."""
        most = least_taken(rows, outputs)
        rate = matrix_rate(self.machine, rows, outputs, inputs)
        if rate is not None:
            us = 2.0 * rows * outputs * inputs / rate
        else:
            filled = inputs * (1 + FILL / inputs) / (SQUARE * (1 + FILL / SQUARE))
            us = self.square / least_taken(SQUARE, SQUARE) * most * filled
        read = BF16 * (outputs * inputs + rows * (outputs + inputs)) / self.memory
        return max(us, read) / most

    def product(self, rows: int, outputs: int, inputs: int) -> Tiles:
        """The tiles of a product by cuBLAS."""
        if rows == 0:
            return Tiles(0, 0.0)
        tile = min(CUBLAS, key=lambda each: taken(rows, outputs, each))
        parts, tiles = split(rows, outputs, tile), count(rows, outputs, tile)
        elements = tile[0] * tile[1] / CUBLAS[tile] / parts
        return Tiles(tiles * parts, elements * self.elements(rows, outputs, inputs))

    def tile(self, rows: int, outputs: int, inputs: int, elements: int) -> float:
        """Microseconds of a tile with `elements` elements of our Triton product."""
        return elements * self.elements(rows, outputs, inputs) / TRITON

    def alone(self, rows: int, outputs: int, inputs: int) -> float:
        """Microseconds of a product by cuBLAS with the whole GPU, below its power limit."""
        found = self.product(rows, outputs, inputs)
        return math.ceil(found.tiles / MULTIPROCESSORS) * found.us

    def moves(self, nbytes: float) -> Moves:
        return Moves(nbytes / self.memory)

    def copies(self, nbytes: float) -> Copies:
        if nbytes == 0:
            return Copies(0.0)
        us = self.machine.curve("peer copy").at(nbytes).us
        return Copies(us / (self.slowdowns.value("copies_to_all") if self.machine.gpus > 2 else 1))

    def exchange(self, kind: str, nbytes: float) -> float:
        """Microseconds of a collective by NCCL, with its launch. An all-to-all takes as long as an
        all-gather of its bytes."""
        return self.machine.nccl(kind, nbytes).us + self.gap

    def pushes(self, nbytes: float, ranks: int) -> float:
        """Microseconds of one of the two shots of an all-reduce (`ladder.comm.two_shot`), by all
        SMs: as long as a push of a rank's part, which sends as many bytes."""
        return self.machine.curve("all-reduce", algorithm="push").at(nbytes / ranks).us

    def share(self, busy_us: float, us: float, calls: int) -> float:
        """The share of its speed that a product keeps in the turns that `ladder bench ops` times.
        Each turn has `calls` calls; the turn before them is not timed."""

        def kept(turns: int) -> float:
            long = turns * calls
            return long * power_share(self.machine, BOOST_MS, long * busy_us, long * us)

        return (kept(1 + TURNS) - kept(1)) / (TURNS * calls)

    def host(self, schedule: Schedule, tiles: bool = False) -> float:
        """Microseconds of the host to enqueue a call. tiles: the product is a kernel of ours."""
        caller = self.caller
        ours = tiles + sum(isinstance(each, Work) and each.action in OURS for each in schedule)
        us = caller.call + caller.job * len(jobs(schedule)) + caller.kernel * ours
        return self.hosted(us) if caller.launches else us

    def hosted(self, us: float) -> float:
        """The machine's host time for work that took `us` on the host that was measured."""
        known = self.machine.values.get("host_launch_us")
        return us * known.value / HOST_LAUNCH_US if known else us

    def rates(self, share: float, mode: Mode) -> Rates:
        copied = 2 * LARGE / self.machine.curve("peer copy").at(LARGE).us
        return Rates(
            MULTIPROCESSORS, self.gap, share,
            self.slowdowns.value("product_beside_copies"),
            self.slowdowns.value("copies_beside_product"),
            1 - copied / self.memory, interleaved=mode == "captured",
        )  # fmt: skip
