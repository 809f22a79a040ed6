"""Inference where a process computes several of a plan's T ranks, without the fused kernels.

Such a model runs the loop of `ladder.models` in a CUDA graph, with torch's own kernels: a product
of each matrix for all held ranks at once, and between products one kernel for each operation. Their
number (`KERNELS`) and what they move (`MOVED`) follow from the code of attention, SwiGLU, norms and
landings. One value is fitted: what such a kernel takes beside its bytes.
"""

from __future__ import annotations

from ladder.costs import BF16, CAPACITY_STEP
from ladder.kernels.limits import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.parallel.dispatch import Dispatch
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.graph import Operation
from ladder.perf.machine import Estimate, Machine

# Microseconds of a kernel of torch's in a CUDA graph, beyond its bytes. Fitted: the decode step of
# llama-3-8b, desync-4x, T 4, TP 1, batch 1 takes 8.734 ms; 2026-11-22-virtual-ranks-h200x2.jsonl.
KERNEL_US = 5.85
# Kernels of an operation, and how often its rows are read or written: of queries and keys for
# rotary embeddings (5 kernels each), of gate and up for SwiGLU, of the residual for landings.
KERNELS = {"qkv": 3, "output": 1, "gate-up": 2, "down": 1, "head": 1, "attention": 13, "swiglu": 2}
ROTARY, SWIGLU, NORM, ADD = 10, 5, 3, 3


class VirtualCost(PromptCost):
    """Microseconds of each operation of a pass over `batch` sequences of `tokens` new tokens, after
    `context` (decode steps: 1 after so many; prompts: 0).

    held: ranks of a process. table: the algorithms of all-reduces by size; None: NCCL.
    """

    def __init__(
        self, config: ModelConfig, machine: Machine, tp: int, held: int, batch: int, tokens: int,
        context: int, table: Dispatch | None,
    ) -> None:  # fmt: skip
        super().__init__(config, machine, tp * held, batch, tokens)
        self.held, self.context, self.table = held, context, table
        self.shapes["head"] = (-(-config.vocab_size // tp), config.hidden_size)
        self.processes = tp
        self.each = KERNEL_US if context else self.gap

    def key(self, each: Operation) -> tuple[object, ...]:
        landed = tuple((landing.summed, landing.own != 0) for landing in each.landings)
        return each.kind, each.part, each.output is not None, landed

    def estimate(self, operation: Operation) -> Estimate:
        kind, rows = operation.kind, self.rows
        if kind == "head":
            return Estimate(self._torch_product("head", self.batch, 1), "extrapolated")
        if kind == "product":
            us = self._torch_product(operation.part, rows, self.held)
            if operation.part == "down":
                us += self._kernels("swiglu", SWIGLU * self.inner * rows * self.held)
            return Estimate(us, "extrapolated")
        if kind == "attention":
            us = self.held * self._attends()
            return Estimate(
                us + self._kernels(kind, ROTARY * self.packed * rows * self.held), "extrapolated"
            )
        if kind == "landing":
            count = sum((each.summed + (each.own != 0)) for each in operation.landings)
            moved = (NORM + ADD * count) * rows * self.held * self.config.hidden_size
            return Estimate((1 + count) * self.each + BF16 * moved / self.memory, "extrapolated")
        if kind in ("all-reduce", "sum"):
            return self._summed(operation)
        return self.moved(self.tensor(rows))

    def _kernels(self, name: str, moved: float) -> float:
        return KERNELS[name] * self.each + BF16 * moved / self.memory

    def _torch_product(self, part: str, rows: int, held: int) -> float:
        """One of each matrix, of all held ranks."""
        outputs, inputs = self.shapes[part]
        read = BF16 * held * (outputs * inputs + rows * (outputs + inputs)) / self.memory
        if rows > MAX_ROWS:
            read = max(read, held * self.arithmetic(rows, outputs, inputs) / self.share)
        return read + KERNELS[part] * self.each

    def _attends(self) -> float:
        """Of one rank: of new tokens to those before, by bytes; of whole prompts by arithmetic."""
        if not self.context:
            return self.attention(self.prompt)
        heads = max(1, self.config.num_kv_heads // self.tp)
        keys = self.batch * CAPACITY_STEP * (self.context // CAPACITY_STEP + 1)  # masked beyond
        return 2 * BF16 * keys * heads * self.config.head_dim / self.memory

    def _summed(self, operation: Operation) -> Estimate:
        """The sum of the held ranks' partials, and over processes."""
        nbytes = self.tensor(self.rows)
        own = 0.0
        if operation.output is not None:
            own = 2 * self.each + (self.held + 2) * nbytes / self.memory
        if self.processes == 1:
            return Estimate(own, "extrapolated")
        name = "nccl"
        if self.table is not None:
            name = self.table.pick(int(nbytes))
        us = self.machine.curve("all-reduce", algorithm=name).at(nbytes).us
        return Estimate(own + us + 2 * self.gap, "extrapolated")
