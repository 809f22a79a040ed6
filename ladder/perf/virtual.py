"""Inference where a process computes several of a plan's T ranks.

Such a model runs the loop of `ladder.models` in a CUDA graph, with the fused engine's modules
(`ladder.infer.fused`): a product of each matrix and rank, attention of all ranks in one kernel, and
a kernel that lands and norms the residuals of all. torch's kernels sum the partials of the ranks in
a process, and add a group's earlier partials, the residual or a sublayer's other part to them.
Nothing is fitted to such models.
"""

from __future__ import annotations

from dataclasses import replace

from ladder.costs import BF16
from ladder.kernels.limits import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.parallel.dispatch import Dispatch
from ladder.perf.cost import DecodeCost
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.graph import LAST, Operation
from ladder.perf.machine import Estimate, Machine

NORM = 3  # how often a landing reads or writes the residual's rows, in addition to its addends


class VirtualCost(PromptCost):
    """Microseconds of each operation of a pass over `batch` sequences of `tokens` new tokens after
    `context` earlier ones (decode steps: 1 new token; prompts: context 0).

    held: the ranks of T in a process. table: the algorithms of all-reduces by size; None: NCCL.
    """

    def __init__(
        self, config: ModelConfig, machine: Machine, tp: int, held: int, batch: int, tokens: int,
        context: int, table: Dispatch | None,
    ) -> None:  # fmt: skip
        super().__init__(config, machine, tp * held, batch, tokens)
        self.held, self.table, self.processes = held, table, tp
        self.shapes["head"] = (-(-config.vocab_size // tp), config.hidden_size)
        self.each = machine.value("launch_us") if context else self.gap
        self.step: DecodeCost | None = None
        if context and batch <= MAX_ROWS:
            self.step = DecodeCost(config, machine, tp * held, "async", batch, context)
            self.step.heads *= held
            self.step.weights["head"] *= held
        self.context = context

    def key(self, each: Operation) -> tuple[object, ...]:
        landed = tuple(replace(landing, output=0) for landing in each.landings)
        return each.kind, each.part, each.output is not None, landed, self._added(each)

    def estimate(self, operation: Operation) -> Estimate:
        kind, rows = operation.kind, self.rows
        if kind == "head":
            head = replace(operation, kind="product", part="head")
            return Estimate(self._product(head, self.batch), "extrapolated")
        if kind == "product":
            us = self.held * self._product(operation, rows)
            if operation.part == "down" and self.step is None:
                us += self.moved(3 * BF16 * self.inner * rows * self.held).us  # SwiGLU
            us += self._added(operation) * self._kernel(3 * self.held).us
            return Estimate(us, "extrapolated")
        if kind == "attention":
            return Estimate(self._attends(operation), "extrapolated")
        if kind == "landing":
            tensors = NORM * self.held
            for each in operation.landings:
                tensors += each.summed + self.held * (each.own != 0)
            us = self._kernel(tensors).us
            if any(each.replaces for each in operation.landings):  # one copy for each rank
                us += self._kernel(1 + self.held).us
            if any(each.on_base for each in operation.landings[:-1]):  # own parts land after it
                us += self._kernel(1 + 2 * self.held).us
            return Estimate(us, "extrapolated")
        if kind in ("all-reduce", "sum"):
            return self._summed(operation)
        return self.moved(self.tensor(rows))

    def _added(self, operation: Operation) -> int:
        """The kernels that add to the partial behind a sublayer's last product."""
        n, plan = operation.sublayer, self.config.plan
        if n is None or operation.kind != "product":
            return 0
        record = plan.sublayers[n]
        if operation.part != LAST[record.kind.split("+")[-1]]:
            return 0
        joins = plan.group_begins[n] not in (None, n)
        return ("+" in record.kind) + joins + (record.reduce == "residual")

    def _kernel(self, tensors: float) -> Estimate:
        """A kernel that reads and writes so many tensors of one rank's rows."""
        us = self.each + tensors * self.tensor(self.rows) / self.memory
        return Estimate(us, "extrapolated")

    def _product(self, operation: Operation, rows: int) -> float:
        """Microseconds of a product of one rank."""
        if self.step is not None:
            return self.step.alone(operation).us + self.step.gap
        return self.product(operation.part, rows)

    def _attends(self, operation: Operation) -> float:
        """Microseconds of attention of all held ranks. For whole prompts it includes the kernel
        that rotates and stores keys and values."""
        if self.step is not None:
            return self.step.alone(operation).us + self.step.gap
        if self.context:  # more sequences than fused products have rows: by bytes
            heads = self.held * self.batch * max(1, self.config.num_kv_heads // self.tp)
            return self.moved(2 * BF16 * heads * self.context * self.config.head_dim).us
        turned = self.moved(2 * BF16 * self.packed * self.rows * self.held).us
        return self.held * self.attention(self.prompt) + turned + self.gap

    def _summed(self, operation: Operation) -> Estimate:
        """The sum of the held ranks' partials, and the all-reduce over processes."""
        own = 0.0
        if operation.output is not None:
            own = self._kernel(self.held + 1).us
        if self.processes == 1:
            return Estimate(own, "extrapolated")
        nbytes = self.tensor(self.rows)
        name = "nccl"
        if self.table is not None:
            name = self.table.pick(int(nbytes))
        us = self.machine.curve("all-reduce", algorithm=name).at(nbytes).us
        return Estimate(own + us + 2 * self.gap, "extrapolated")
