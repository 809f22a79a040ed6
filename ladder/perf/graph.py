"""The operations of a pass and what each waits for, from a plan's own schedule.

No preset's name occurs here. As in the model's loop, `Plan.landings` says what lands where,
`Plan.early` what may begin early, and `Plan.blocking` what blocks. This module builds forward
passes and training steps; `lower_prefill` and `lower_decode` build the fused engine's kernels.

An operation is launched on a stream. It runs after the operations launched there before it, and
after those in its `needs`. An operation that `rides` consists of extra thread blocks in another
operation's launch. An operation on LINKS is data on its way between GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ladder.models.errors import UserError, unknown
from ladder.models.plan import Landing, Plan
from ladder.models.ranks import Ranks
from ladder.parallel.refusals import sharded_refusal
from ladder.perf.machine import COLLECTIVES

FUSED = "fused"  # the algorithm of an exchange inside of a product
ROUNDED = "8 bits"  # the algorithm of an all-reduce by NCCL whose messages are rounded
MAIN, SIDE, COMM, DATA = "main", "side", "communication", "data parallel"
COPIES = "copies of shards"  # HSDP's all-reduces of gradients between the copies of a shard
SECOND = "second"  # a decode step's second stream, for sublayers that run beside those on MAIN
LINKS = "links"  # data that products have pushed, until all ranks have it
COMPUTES = ("product", "attention")
REDUCES = ("all-reduce", "reduce-scatter", "push", "send", "barrier")
STYLES = ("all-reduce", "sharded", "alone")


@dataclass(frozen=True)
class Operation:
    """One operation of a rank.

    kind: embed, product, attention, rotary, swiglu, landing, sum, norm, copy, send, peers, copies,
    barrier, all-reduce, reduce-scatter, all-gather, head, choice, loss, optimiser. pushes: whether
    a product pushes its result to the peers. part: which product (qkv, output, gate-up, down,
    head). sublayer: its number; for a landing that of the read. output: the output that a reduce
    sums. landings: what a landing lands, in order. algorithm: of a collective, as in the machine's
    curves. tensors: how many tensors of the residual's size the operation reads and writes. few:
    whether it has one row per sequence instead of one per token.
    """

    index: int
    kind: str
    stream: str
    needs: tuple[int, ...]
    part: str = ""
    sublayer: int | None = None
    output: int | None = None
    rides: int | None = None
    pushes: bool = False
    landings: tuple[Landing, ...] = ()
    backward: bool = False
    algorithm: str = ""
    tensors: float = 0.0
    few: bool = False

    @cached_property
    def resource(self) -> str:
        """What it takes: link (copy engines, or the links alone), nccl (some multiprocessors), push
        (our all-reduces, some multiprocessors), direct (a landing over links), wait (one block that
        waits), or all (all multiprocessors)."""
        if self.kind == "copies" or self.stream == LINKS:
            return "link"
        if self.kind == "peers":
            return "direct"
        if self.kind == "barrier":
            return "wait"
        if self.kind not in COLLECTIVES:
            return "all"
        return "push" if self.algorithm in ("push", "two-shot") else "nccl"

    @property
    def launched(self) -> bool:
        """Whether it is a launch of its own."""
        return self.rides is None and self.stream != LINKS

    @property
    def reduces(self) -> bool:
        """Whether it sums a sublayer's output over the ranks, or the sums of a group."""
        return self.output is not None and (self.pushes or self.kind in REDUCES)


@dataclass
class Graph:
    """Operations in the order in which a rank launches them. orders: what `simulate` keeps."""

    plan: Plan
    operations: list[Operation] = field(default_factory=list)
    orders: dict[tuple[int, int], object] = field(default_factory=dict, repr=False, compare=False)

    def add(self, kind: str, needs: Iterable[int | None], **fields: object) -> int:
        """Append an operation, and return its index. A None in `needs` is ignored."""
        found = tuple(sorted({each for each in needs if each is not None}))
        index = len(self.operations)
        assert not found or found[-1] < index, "it needs what has not been launched"
        stream = fields.pop("stream", MAIN)
        self.operations.append(Operation(index, kind, stream, found, **fields))  # type: ignore[arg-type]
        return index

    def of(self, kind: str, backward: bool = False) -> list[Operation]:
        return [each for each in self.operations if (each.kind, each.backward) == (kind, backward)]

    @property
    def launches(self) -> Counter[str]:
        """How many kernels or collectives of each kind are launched."""
        return Counter(each.kind for each in self.operations if each.launched)

    @property
    def reduces(self) -> list[Operation]:
        """The operations that sum the sublayers' outputs, in the forward pass."""
        return [each for each in self.operations if each.reduces and not each.backward]

    def waits(self, output: int) -> Operation:
        """The landing that waits for the sum of `output`."""
        (found,) = [
            each
            for each in self.operations
            if not each.backward
            and any(landing.summed and landing.output == output for landing in each.landings)
        ]
        return found

    def before(self) -> list[set[int]]:
        """For each operation, the direct predecessors that must have ended: those in `needs`, and
        the operation before it on its stream, or, if it rides, the predecessors of its launch."""
        newest: dict[str, int] = {}
        found: list[set[int]] = []
        for each in self.operations:
            known = set(each.needs)
            if each.rides is not None:
                known |= found[each.rides]
            elif each.stream in newest:
                known.add(newest[each.stream])
            if each.rides is None:
                newest[each.stream] = each.index
            found.append(known)
        return found


class Loop:
    """The model's loop, as operations of a graph: what `Pass.read` and `Pass.write` do.

    residual, base: the operations that made the newest residual and the newest base. starts: by
    output, the operation that ends the output's sum. owns: by output, the operation that makes
    this rank's own partial.
    """

    def __init__(self, plan: Plan, reduces: bool = True) -> None:
        self.plan, self.graph = plan, Graph(plan)
        self.residual = self.graph.add("embed", ())
        if reduces:
            self.residual = self.graph.add(
                "all-reduce", [self.residual], part="embedding", algorithm="nccl"
            )
        self.base: int | None = None
        self.starts: dict[int, int] = {}
        self.owns: dict[int, int] = {}
        self.group: list[int] = []  # partials of the open group

    def newest(self, stream: str) -> int | None:
        """The newest operation on a stream."""
        for each in reversed(self.graph.operations):
            if each.stream == stream and each.rides is None:
                return each.index
        return None

    def landed(self, n: int, residual: int) -> None:
        """Note that read n has landed; operation `residual` made its residual."""
        self.residual = residual
        if not self.plan.base_needed[n]:
            self.base = None
        elif self.plan.equal_reads[n]:
            self.base = residual

    def arrivals(self, landings: Sequence[Landing]) -> list[int]:
        """The operations that end the sums and make the own partials that `landings` take."""
        found = []
        for landing in landings:
            if landing.summed:
                found.append(self.starts[landing.output])
            if landing.own:
                found.append(self.owns[landing.output])
        return found


def sublayer_operations(graph: Graph, plan: Plan, n: int, read: int) -> list[int]:
    """Add sublayer n's operations except its last products; return what each of these needs."""
    found = []
    for kind in plan.sublayers[n].kind.split("+"):
        if kind == "attention":
            packed = graph.add("product", [read], part="qkv", sublayer=n)
            found.append(graph.add("attention", [packed], sublayer=n))
        else:
            found.append(graph.add("product", [read], part="gate-up", sublayer=n))
    return found


LAST = {"attention": "output", "mlp": "down"}


def forward(plan: Plan, style: str = "all-reduce", fused: bool = False) -> Graph:
    """The forward pass over whole sequences.

    style: `all-reduce`: every rank has the whole residual, and NCCL has a stream of its own.
    `sharded`: the residual is sharded by tokens, as in training with sequence parallelism
    (reduce-scatter, land, gather; exchanges that do not block are on a side stream). `alone`: one
    process has all ranks and sums their partials. fused: whether under `sharded` blocking
    exchanges are inside of products.
    """
    if style not in STYLES:
        raise unknown("style of a pass", style, STYLES)
    if style == "sharded":
        refusal = sharded_refusal(plan, Ranks(2, 0, 1))
        if refusal:
            raise UserError(f"plan {plan.name!r} cannot be sharded by tokens: {refusal}")
    loop = Loop(plan, reduces=style != "alone")
    graph, early, last = loop.graph, dict[int, int](), len(plan.sublayers)

    def land(n: int) -> int:
        """Add the landing of read n, and under `sharded` its gather. Returns what to wait for."""
        landings = plan.landings[n]
        source = loop.base if landings and landings[0].on_base else loop.residual
        needs = [source, *loop.arrivals(landings)]
        here = style != "sharded" or any(plan.blocking[each.output] for each in landings)
        stream = MAIN if here else SIDE
        found = graph.add("landing", needs, sublayer=n, landings=landings, stream=stream)
        loop.landed(n, found)
        if style == "sharded":
            inside = FUSED if fused and here and n not in (0, last) else ""
            return graph.add("all-gather", [found], sublayer=n, stream=stream, algorithm=inside)
        return found

    for n, record in enumerate(plan.sublayers):
        read = early.pop(n) if n in early else land(n)
        if style == "sharded" and plan.early[n + 1]:
            early[n + 1] = land(n + 1)
        inner = sublayer_operations(graph, plan, n, read)
        parts = [
            graph.add("product", [each], part=LAST[kind], sublayer=n)
            for each, kind in zip(inner, record.kind.split("+"), strict=True)
        ]
        loop.owns[n] = parts[-1]
        if plan.group_begins[n] is not None:
            loop.group += parts
        if record.reduce == "none":
            continue
        needs = [*loop.group, *parts]
        loop.group = []
        if record.reduce == "residual":
            needs.append(loop.residual)
        if style == "alone":
            loop.starts[n] = graph.add("sum", needs, sublayer=n, output=n)
        elif style == "all-reduce":
            loop.starts[n] = graph.add("all-reduce", needs, sublayer=n, output=n, stream=COMM)
        else:
            stream = MAIN if plan.blocking[n] else SIDE
            inside = FUSED if fused and plan.blocking[n] else ""
            loop.starts[n] = graph.add(
                "reduce-scatter", needs, sublayer=n, output=n, stream=stream, algorithm=inside
            )
    read = early.pop(last) if last in early else land(last)
    if plan.final_mean and style != "alone":
        read = graph.add("all-reduce", [read], part="final mean", stream=COMM)
    graph.add("head", [read])
    return graph


ADJOINT = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
GRADIENTS = ("none", "ddp", "fsdp", "hsdp")


@lru_cache(maxsize=16)  # a table asks for the same few with other links, costs and batches
def training(
    plan: Plan, style: str = "all-reduce", gradients: str = "none", fused: bool = False
) -> Graph:
    """A training step: forward, loss, backward, optimiser. Do not add to it.

    The backward pass issues the forward operations in reverse, each after the operations that
    yield its gradient; the backward of a gather is a scatter. gradients: `ddp` all-reduces each
    layer's gradients as soon as they exist. `fsdp` reduce-scatters them, and gathers each layer's
    weights before both passes. `hsdp` also all-reduces the scattered gradients between copies of
    a shard, on a stream of their own, as torch does.
    """
    if gradients not in GRADIENTS:
        raise unknown("reduction of gradients", gradients, GRADIENTS)
    gathers = gradients in ("fsdp", "hsdp")
    source = forward(plan, style, fused)
    graph, moved = Graph(plan), dict[int, int]()
    layers: dict[int, int] = {}
    for each in source.operations:
        needs: list[int | None] = [moved[n] for n in each.needs]
        if gathers and each.kind in COMPUTES and each.sublayer is not None:
            layer = plan.layers[each.sublayer]
            if layer not in layers:
                layers[layer] = graph.add("all-gather", (), part="weights", stream=DATA)
            needs.append(layers[layer])
        moved[each.index] = _copy(graph, each, needs)
    loss = graph.add("loss", [moved[len(source.operations) - 1]])
    users: dict[int, list[int]] = {each.index: [] for each in source.operations}
    for each in source.operations:
        for need in each.needs:
            users[need].append(each.index)
    back: dict[int, int] = {}
    left = Counter(
        plan.layers[each.sublayer]
        for each in source.operations
        if each.kind in COMPUTES and each.sublayer is not None
    )
    ends: dict[int, list[int]] = {layer: [] for layer in left}
    reduced, gathered = list[int](), dict[int, int]()
    for each in reversed(source.operations):
        needs = [back[n] for n in users[each.index]] or [loss]
        needs.append(moved[each.index])
        computes = each.kind in COMPUTES and each.sublayer is not None
        layer = plan.layers[each.sublayer] if computes and each.sublayer is not None else -1
        if computes and gathers:
            if layer not in gathered:
                gathered[layer] = graph.add(
                    "all-gather", [loss], part="weights", stream=DATA, backward=True
                )
            needs.append(gathered[layer])
        back[each.index] = _copy(graph, each, needs, backward=True)
        if computes:
            ends[layer].append(back[each.index])
            left[layer] -= 1
            if not left[layer] and gradients != "none":
                kind = "reduce-scatter" if gathers else "all-reduce"
                end = graph.add(kind, ends[layer], part="gradients", stream=DATA, backward=True)
                if gradients == "hsdp":
                    end = graph.add(
                        "all-reduce", [end], part="gradients", stream=COPIES, backward=True
                    )
                reduced.append(end)
    graph.add("optimiser", [*reduced, *back.values()])
    return graph


def _copy(
    graph: Graph, each: Operation, needs: Iterable[int | None], backward: bool = False
) -> int:
    kind = ADJOINT.get(each.kind, each.kind) if backward else each.kind
    return graph.add(
        kind, needs, part=each.part, sublayer=each.sublayer, output=each.output,
        stream=each.stream, landings=each.landings, backward=backward, algorithm=each.algorithm,
    )  # fmt: skip
