"""The kernels of a fused decode step (`ladder.parallel.decode`), one operation for each launch.

This is the schedule of `DecodePass` and of its `Chains`, without tensors and events; tests compare
the launches of both, and what each waits for. What a product pushes is under way on LINKS, where
nothing is launched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ladder.kernels.limits import MAX_OWNS, MAX_SUMS
from ladder.models.errors import unknown
from ladder.models.plan import Landing, Plan
from ladder.parallel.chains import Chains
from ladder.perf.graph import COMM, LAST, LINKS, MAIN, SECOND, Graph, Loop

WAYS = ("push", "nccl", "alone")
STREAMS = (MAIN, SECOND)
FIRST = {"attention": "qkv", "mlp": "gate-up"}
Event = frozenset[int]  # the operations that have ended


@functools.lru_cache(maxsize=64)  # the same at all TP degrees and batches
def decode(plan: Plan, way: str = "push", branches: bool = True) -> Graph:
    """One decode step. way: `push` (products write to the peers' slots), `nccl` (all-reduces on a
    stream of their own), or `alone` (one process). branches: whether attention and MLP of one
    sublayer run beside each other (`chains.MOST_BRANCHED`)."""
    return _Decode(plan, way, branches).run()


@dataclass
class Job:
    """A landing. source: the operation that made its residual, or the job before it."""

    source: int | Job
    needs: list[int] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    operation: int | None = None


class Step(Loop):
    """What today's and former decode steps share. read: the operation that made the newest read."""

    def __init__(self, plan: Plan, way: str) -> None:
        if way not in WAYS:
            raise unknown("way of a decode step", way, WAYS)
        super().__init__(plan, reduces=way != "alone")
        self.way = way
        self.read: int | None = None
        self.last: Job | None = None  # the last job of the newest read
        self.new_base: Job | None = None

    def add(self, kind: str, needs: Iterable[int | None], **fields: object) -> int:
        return self.graph.add(kind, needs, **fields)

    def jobs(self, landings: Sequence[Landing]) -> list[Job]:
        """The landings as kernels, split as `DecodePass._jobs` splits them."""
        jobs: list[Job] = []
        current = Job(self.residual)
        sums = owns = 0
        for i, landing in enumerate(landings):
            pushed = landing.summed and self.way == "push"
            more = int(landing.summed and not pushed) + int(landing.own != 0)
            if sums + pushed > MAX_SUMS or owns + more > MAX_OWNS:
                jobs.append(current)
                current, sums, owns = Job(current), 0, 0
            if landing.on_base:
                assert self.base is not None
                current.source = jobs[-1] if jobs else self.base
            if landing.summed:
                current.needs.append(self.starts[landing.output])
                sums += pushed
                owns += not pushed
            if landing.own:
                current.needs.append(self.owns[landing.output])
                owns += 1
            current.landings.append(landing)
            if landing.on_base and i + 1 < len(landings):
                jobs.append(current)
                self.new_base = current
                current, sums, owns = Job(current), 0, 0
        if current.landings or not jobs:
            jobs.append(current)
        self.last = jobs[-1]
        return jobs

    def land(self, job: Job, n: int, rides: int | None = None) -> None:
        source = job.source.operation if isinstance(job.source, Job) else job.source
        job.operation = self.add(
            "landing", [source, *job.needs], sublayer=n, landings=tuple(job.landings), rides=rides
        )

    def finished(self) -> None:
        """Note that the newest read has landed."""
        assert self.last is not None
        self.read = self.last.operation
        if self.new_base is not None:
            self.base, self.new_base = self.new_base.operation, None

    def group_sum(self) -> int | None:
        """The sum of the open group's partials, in as few kernels as it takes."""
        if not self.group:
            return None
        total, rest = self.group[0], self.group[1:]
        for i in range(0, len(rest), MAX_OWNS):
            total = self.add("sum", [total, *rest[i : i + MAX_OWNS]])
        self.group = []
        return total

    def final(self) -> int:
        """The head's input."""
        if not self.plan.final_mean:
            return self.residual
        normed = self.add("norm", [self.residual])
        return self.add("all-reduce", [normed], part="final mean")

    def choose(self, head: int) -> Graph:
        """The last kernels: the choice of tokens by the head's logits."""
        if self.way == "nccl":
            self.add("choice", [head], part="gather")
        else:
            best = self.add("choice", [head], part="best")
            self.add("choice", [best], part="choose")
        return self.graph


@dataclass
class _Stream:
    """A stream. Its event holds the operations that have ended when its next one begins."""

    done: Event = frozenset()

    def record_event(self) -> Event:
        return self.done

    def wait_event(self, event: Event) -> None:
        self.done |= event


class _Decode(Step):
    def __init__(self, plan: Plan, way: str, branches: bool) -> None:
        super().__init__(plan, way)
        self.branches = branches
        self.chains = Chains((_Stream(frozenset({self.residual})), _Stream()))

    def add(self, kind: str, needs: Iterable[int | None], **fields: object) -> int:
        """Launch an operation on the current stream, after all that the stream has waited for."""
        stream = self.stream
        name = {"stream": STREAMS[self.chains.place]}
        found = super().add(kind, [*needs, *stream.done], **name | fields)
        if "stream" not in fields:
            stream.done = frozenset({found})
        return found

    @property
    def stream(self) -> _Stream:
        """The current stream."""
        found = self.chains.streams[self.chains.place]
        assert isinstance(found, _Stream)
        return found

    def run(self) -> Graph:
        for n in range(len(self.plan.sublayers)):
            self.chains.turn(self.plan.beside[n])
            self._read(n)
            self._write(n, self._inner(n))
            self.chains.end()
        self.chains.join()
        self._read(len(self.plan.sublayers))
        return self.choose(self.add("product", [self.final()], part="head"))

    def _read(self, n: int) -> None:
        landings = self.plan.landings[n]
        if landings or self.read is None:
            if self.way == "nccl":
                sums = (self.starts[each.output] for each in landings if each.summed)
                self.stream.wait_event(frozenset(sums))
            for job in self.jobs(landings):
                self.land(job, n)
            self.finished()
        assert self.read is not None
        self.landed(n, self.read)
        self.chains.read()

    def _inner(self, n: int) -> list[tuple[str, int]]:
        """Add the first kernels of a sublayer's parts. Returns each last product and its need."""
        found = []
        for place, kind in enumerate(self.plan.sublayers[n].kind.split("+")):
            if place and self.branches:
                self.chains.branch()
            first = self.add("product", [self.read], part=FIRST[kind], sublayer=n)
            if kind == "attention":
                first = self.add("attention", [first], sublayer=n)
            found.append((LAST[kind], first))
        return found

    def _write(self, n: int, inner: Sequence[tuple[str, int]]) -> None:
        """Add what `DecodePass.reduce` launches."""
        record, keep = self.plan.sublayers[n], self.plan.own_needed[n]
        if record.reduce == "none":
            self.owns[n] = self._products(n, inner, None)
            if self.plan.group_begins[n] is not None:
                self.group.append(self.owns[n])
            return
        if self.group:
            self.chains.wait_for_newest()
        add = self.group_sum()
        if record.reduce == "residual":
            add = self.residual
        if self.way == "push" and not (keep and len(inner) > 1):
            self.owns[n] = own = self._products(n, inner, add, pushes=True)
            self.starts[n] = self.graph.add("send", [own], sublayer=n, output=n, stream=LINKS)
            # The product's kernel ends when the peers have acknowledged what it pushed.
            self.stream.wait_event(frozenset({self.starts[n]}))
            return
        apart = keep and add is not None
        self.owns[n] = own = self._products(n, inner, None if apart else add)
        whole = self.add("sum", [add, own], sublayer=n) if apart else own
        if self.way == "push":
            whole = self.add("send", [whole], sublayer=n, output=n)
        elif self.way == "nccl":
            if keep and not apart:
                self.owns[n] = self.add("copy", [own], sublayer=n)
            whole = self.add("all-reduce", [whole], sublayer=n, output=n, stream=COMM)
        self.starts[n] = whole

    def _products(
        self, n: int, inner: Sequence[tuple[str, int]], add: int | None, pushes: bool = False
    ) -> int:
        """Add a sublayer's last products, each of which adds the result of the one before."""
        for part, need in inner[1:]:
            add = self.add("product", [need, add], part=part, sublayer=n)
        self.chains.merge()
        part, need = inner[0]
        return self.add("product", [need, add], part=part, sublayer=n, pushes=pushes)
