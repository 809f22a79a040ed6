"""What the operations of a training step cost on a machine: of one micro-batch, and the optimiser.

The operations are those of `ladder.perf.graph.training`. Each stands for the kernels that torch
makes of it when sublayers, landings and losses are compiled. A product has two in the backward
pass: for the gradients of the input and of the weight. What kernels between products read and write
is counted in tensors (LANDED and below) of 2 bytes an element; weights and gradients are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ladder.costs import BF16, FP32
from ladder.models.config import ModelConfig
from ladder.perf.cost import most_of
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.graph import COPIES, DATA, FUSED, LAST, Operation
from ladder.perf.lower_prefill import FIRST
from ladder.perf.machine import COLLECTIVES, Estimate, Machine
from ladder.perf.memory import local_parameters
from ladder.perf.nodes import LIKELY, Doubt, for_degree, group, links_of
from ladder.perf.power import power_share

BACKWARD_ATTENTION = 2.5 / 0.85  # its arithmetic over its rate, both relative to the forward pass
LANDED = 3  # tensors of a landing: the residual, and both results; and one for each addend
BACKWARD_LANDING = 6  # two gradients, the residual, the result; two again for the weight's
INPUT_GRADIENTS = {"qkv": 4, "gate-up": 3}  # an input's gradients by its products, and their sum
SWIGLU = {False: 3, True: 5}  # tensors of the inner size, by whether it is backward
ROTARY = 2  # of queries and keys: read and written
LOGITS = 2 + 2  # passes over the logits, forward and backward
ADAMW = 28 + 12  # bytes of a parameter: AdamW reads four numbers and writes three; clipping three
CAST = FP32 + BF16  # bytes of a weight that is cast for the products, and of its gradient
ADDED = 2 * FP32  # bytes of a gradient that is added to an earlier micro-batch's


@dataclass(frozen=True)
class TrainingShape:
    """A layout on GPUs, and a micro-batch of `sequences`. replicas: data-parallel ranks. shards:
    the parts into which these split parameters, gradients and optimiser state. held: the ranks of
    the plan's T that a process computes. nodes: with the same number of GPUs each."""

    tp: int
    replicas: int
    shards: int
    held: int
    sequence_parallel: bool
    sequences: int
    seq_len: int
    recompute: bool
    nodes: int = 1

    @property
    def rows(self) -> int:
        return self.sequences * self.seq_len


def groups(tp: int, replicas: int, nodes: int) -> list[int]:
    """The sizes of the groups whose collectives must be in machine files. On several nodes, the
    collectives of data parallelism are computed from links instead."""
    sizes = {tp, replicas} if nodes == 1 else {tp}
    return sorted(sizes - {1})


class TrainingCost(PromptCost):
    """Microseconds of each operation. adds: whether gradients are added to earlier micro-batches'.
    no_comm: whether the sublayers' reduces are left out, as by `ladder bench train`. doubt: about
    links between nodes. machines: by number of GPUs, the machines with the collectives of groups of
    that size; shipped machines stand in for missing ones."""

    def __init__(
        self, config: ModelConfig, machine: Machine, shape: TrainingShape, adds: bool,
        no_comm: bool, doubt: Doubt = LIKELY, machines: Mapping[int, Machine] | None = None,
    ) -> None:  # fmt: skip
        degree = shape.tp * shape.held
        super().__init__(config, machine, degree, shape.sequences, shape.seq_len)
        self.shape, self.adds, self.no_comm = shape, adds, no_comm
        self.mode = "eager"
        self.vocabulary = -(-config.vocab_size // shape.tp)  # split over processes, not over T
        self.shapes["head"] = self.vocabulary, config.hidden_size
        known, sizes = machines or {}, groups(shape.tp, shape.replicas, shape.nodes)
        self.collectives = {n: known.get(n) or for_degree(machine, n) for n in sizes}
        self.links = links_of(machine) if shape.nodes > 1 else ()
        self.doubt = doubt
        rows = shape.rows / (shape.tp if shape.sequence_parallel else 1)
        self.whole = self.tensor(shape.rows) * shape.held  # bytes of all rows of a residual
        self.mine = self.tensor(rows) * shape.held
        self.parameters = local_parameters(config, shape.tp)

    def key(self, each: Operation) -> tuple[object, ...]:
        if each.kind == "landing":
            about: object = self._landing_tensors(each)
        else:
            about = each.output is not None and self._reduced(each.output)
        kind = ""
        if each.algorithm == FUSED and each.sublayer is not None:
            kind = self.config.plan.sublayers[each.sublayer].kind
        return each.kind, each.part, each.stream, each.backward, each.algorithm, kind, about

    def _reduced(self, output: int) -> tuple[str, int]:
        """How an output is reduced, and with how many partials before its own."""
        begins = self.config.plan.group_begins[output]
        return self.config.plan.sublayers[output].reduce, 0 if begins is None else output - begins

    def estimate(self, operation: Operation) -> Estimate:
        kind, back = operation.kind, operation.backward
        if kind in COLLECTIVES:
            return self._collective(operation)
        if kind == "sum":
            return Estimate(self._local(operation), "extrapolated")
        if kind == "product":
            return Estimate(self._again(operation, self._sublayer_products), "extrapolated")
        if kind == "attention":
            return Estimate(self._again(operation, self._attention), "extrapolated")
        if kind == "head":
            return Estimate(self._products("head", 1, back), "extrapolated")
        if kind == "loss":
            return self.moved(LOGITS * BF16 * self.shape.rows * self.vocabulary)
        if kind == "landing":
            return self.moved(self._landing_tensors(operation) * self.mine)
        if kind == "embed":
            table = FP32 * self.config.vocab_size * self.config.hidden_size / self.shape.tp
            return self.moved(self.whole / self.shape.held + (table if back else 0))
        if kind == "optimiser":
            nbytes = ADAMW + self.machine.value("training_bytes")
            return self.moved(nbytes * self.parameters / self.shape.shards)
        return self.moved(2 * self.mine)

    def _again(self, operation: Operation, cost: Callable[[str, bool], float]) -> float:
        """The cost, and that of the forward pass again where it is recomputed."""
        us = cost(operation.part, operation.backward)
        if operation.backward and self.shape.recompute:
            us += cost(operation.part, False)
        return us

    def _sublayer_products(self, part: str, back: bool) -> float:
        inner = self.shape.held * self.inner * BF16 * self.shape.rows
        us = self._products(part, {"qkv": 3, "gate-up": 2}.get(part, 1), back)
        if back and part in INPUT_GRADIENTS:
            us += INPUT_GRADIENTS[part] * self.whole / self.memory
        if part == "gate-up":
            us += SWIGLU[back] * inner / self.memory + self.gap
        return us

    def _products(self, part: str, launches: int, back: bool) -> float:
        """Products of all held ranks, with the casts of their weights and gradients."""
        held = 1 if part == "head" else self.shape.held
        outputs, inputs = self.shapes[part]
        weights = outputs * inputs * held
        one = self.product(part, self.shape.rows) - self.gap
        if not back:
            return held * one + CAST * weights / self.memory + launches * 2 * self.gap
        added = CAST + (ADDED if self.adds else 0)
        return 2 * held * one + added * weights / self.memory + launches * 3 * self.gap

    def _attention(self, part: str, back: bool) -> float:
        one = self.shape.held * self.attention(self.shape.seq_len)
        turned = ROTARY * BF16 * self.shape.held * self.packed * self.shape.rows / self.memory
        return one * (BACKWARD_ATTENTION if back else 1) + turned + (3 if back else 2) * self.gap

    def _landing_tensors(self, operation: Operation) -> float:
        if operation.backward:
            return BACKWARD_LANDING + sum(1 for each in operation.landings if each.own)
        found = LANDED
        for each in operation.landings:
            found += (each.summed and not each.replaces) + (each.own != 0)
        return found

    def _collective(self, operation: Operation) -> Estimate:
        if operation.stream in (DATA, COPIES):
            return self._over_data(operation)
        local = self._local(operation) if operation.output is not None else 0.0
        if self.no_comm and operation.part != "embedding":
            return Estimate(local + self._repeated(operation.kind), "extrapolated")
        if operation.algorithm == FUSED:
            return self._inside(operation)
        found = self._wire(operation.kind, self.tensor(self.shape.rows), self.shape.tp)
        return Estimate(found.us + local + self.gap, found.basis)

    def _inside(self, operation: Operation) -> Estimate:
        """Exchanges inside of products: one for each of a sublayer's attention and MLP. A gather is
        inside the first product, and its backward, a scatter, inside that product's backward. A
        scatter and its backward, a gather, are inside the last product in the same way."""
        assert operation.sublayer is not None
        gathers = (operation.kind == "all-gather") != operation.backward
        ends = FIRST if gathers else LAST
        kinds = self.config.plan.sublayers[operation.sublayer].kind.split("+")
        parts = [
            self.fused(operation.kind, ends[each], any_order=True, back=operation.backward)
            for each in kinds
        ]
        us = sum(each.us for each in parts) + self._awaited(kinds, operation.backward)
        return Estimate(us, "extrapolated")

    def _awaited(self, kinds: Sequence[str], back: bool) -> float:
        """Microseconds for which an exchange that blocks waits for the slowest rank, as in a decode
        step. A sublayer has two such exchanges; each waits for the spread of half its time."""
        us = 0.0
        for kind in kinds:
            us += sum(self._sublayer_products(ends[kind], back) for ends in (FIRST, LAST))
            us += self._attention(kind, back) if "attention" in kind else 0.0
        return self.machine.value("rank_spread") * most_of(self.shape.tp) * us / 2

    def _local(self, operation: Operation) -> float:
        """Microseconds in which a process itself sums, copies or adds around a reduce."""
        assert operation.output is not None
        tensors = 0.0
        if self.shape.held > 1:  # the sum over the held ranks, and its gradient for each
            tensors += 1 + 1 / self.shape.held
        reduce, others = self._reduced(operation.output)
        if reduce == "residual":
            tensors += 3
        tensors += 3 * others  # partials are added up, and so are their gradients
        if operation.kind == "all-reduce" and operation.backward:
            tensors += 2  # the gradient's copy, which the reduce changes in place
        return tensors * self.whole / self.memory + (self.gap if tensors else 0.0)

    def _repeated(self, kind: str) -> float:
        """Microseconds of what a benchmark without communication does instead: it repeats a rank's
        rows instead of gathering, and takes some of the rows instead of scattering."""
        if kind == "all-reduce":
            return 0.0
        tensors = 1 + 1 / self.shape.tp if kind == "all-gather" else 2 / self.shape.tp
        return tensors * self.whole / self.memory + self.gap

    def _over_data(self, operation: Operation) -> Estimate:
        """The collective of one layer's weights or gradients over data-parallel ranks."""
        shape, plan = self.shape, self.config.plan
        layer = self.parameters / max(1, plan.num_layers)
        if shape.replicas == 1:
            return Estimate(0.0, "measured")
        nbytes = (BF16 if operation.kind == "all-gather" else FP32) * layer
        if shape.nodes > 1:
            return Estimate(1e6 * self._over_nodes(operation.kind, nbytes), "extrapolated")
        return self._wire(operation.kind, nbytes, shape.replicas)

    def _over_nodes(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective over nodes, between ranks with the same place in their TP groups.
        The shards of a copy lie next to each other."""
        shape = self.shape
        here = shape.replicas // shape.nodes  # of a node
        within = min(shape.shards, here)
        shards = group(self.links, within, shape.shards // within, self.doubt)
        copies = group(
            self.links, here // within, shape.replicas * within // (shape.shards * here), self.doubt
        )
        if kind == "all-reduce":
            return copies.all_reduce(nbytes / shape.shards)
        return shards.gather(nbytes)

    def _wire(self, kind: str, nbytes: float, degree: int) -> Estimate:
        return self.collectives[degree].nccl(kind, nbytes)

    def limit(self, busy_us: float, total_us: float) -> None:
        """As for prompts, but without the time above the limit at the beginning."""
        self.unlimit()
        self.share = power_share(self.machine, 1e-3, busy_us, total_us)
