"""The kernels of a fused decode step (`ladder.parallel.decode`), one operation for each launch.

This is the schedule of `DecodePass` without its tensors; tests count the launches of both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ladder.kernels.limits import MAX_OWNS, MAX_SUMS
from ladder.models.errors import unknown
from ladder.models.plan import Landing, Plan
from ladder.perf.graph import COMM, LAST, Graph, Loop

WAYS = ("push", "nccl", "alone")


@dataclass
class _Job:
    """A landing that is not launched yet. source: the operation that made its residual, or the job
    before it. waits: whether it waits for slots."""

    source: int | _Job
    needs: list[int] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)
    waits: bool = False
    operation: int | None = None


@functools.lru_cache(maxsize=64)  # the same at all TP degrees and batches
def decode(plan: Plan, way: str = "push") -> Graph:
    """One decode step. way: `push` (products and extra programs write to the peers' slots), `nccl`
    (all-reduces on a stream of their own), or `alone` (one process)."""
    if way not in WAYS:
        raise unknown("way of a decode step", way, WAYS)
    return _Decode(plan, way).run()


class _Decode(Loop):
    def __init__(self, plan: Plan, way: str) -> None:
        super().__init__(plan, reduces=way != "alone")
        self.way = way
        self.read: int | None = None  # what made the newest read
        self.carried: _Job | None = None
        self.sending: int | None = None  # the output to send, and
        self.partial = -1  # what made it
        self.rider: int | None = None  # a send that the next product may run
        self.sends: dict[int, int] = {}  # what was sent, and the operation that sent it
        self.last: _Job | None = None  # the last job of the newest read
        self.new_base: _Job | None = None

    def run(self) -> Graph:
        early: tuple[int, list[_Job]] | None = None
        for n in range(len(self.plan.sublayers)):
            self._finish(n, early)
            early = None
            if self.plan.early[n + 1]:
                early = n + 1, self._begin(n + 1)
            self._sublayer(n)
        last = len(self.plan.sublayers)
        self._finish(last, early)
        read: int | None = self.residual
        if self.plan.final_mean:
            read = self.graph.add("norm", [read])
            read = self.graph.add("all-reduce", [read], part="final mean")
            self.rider = None
        head = self._product("head", None, [read])
        if self.way != "nccl":
            head = self.graph.add("choice", [head], part="best")
            self.graph.add("choice", [head], part="choose")
        else:
            self.graph.add("choice", [head], part="gather")
        return self.graph

    # -- landings -----------------------------------------------------------------------------

    def _begin(self, n: int) -> list[_Job]:
        """Start the landing of read n: its jobs, or none if it must wait for a collective."""
        landings = self.plan.landings[n]
        if self.read is not None and not landings:
            return []
        if self.way == "nccl" and any(each.summed for each in landings):
            return []
        jobs = self._jobs(landings)
        self.carried = jobs[0]
        return jobs

    def _finish(self, n: int, early: tuple[int, list[_Job]] | None) -> None:
        """Land read n: launch what no product has run."""
        jobs = early[1] if early is not None else self._begin(n)
        landings = self.plan.landings[n]
        if landings or self.read is None:
            for job in jobs or self._jobs(landings):
                if job.operation is None:
                    if job.waits:
                        self._flush()
                    self._land(job, n)
            assert self.last is not None
            self.read = self.last.operation
            self.carried = None
            if self.new_base is not None:
                self.base, self.new_base = self.new_base.operation, None
        assert self.read is not None
        self.rider = self.sending
        self.landed(n, self.read)

    def _jobs(self, landings: Sequence[Landing]) -> list[_Job]:
        """`DecodePass._jobs`."""
        jobs: list[_Job] = []
        current = _Job(self.residual)
        sums = owns = 0
        for i, landing in enumerate(landings):
            pushed = landing.summed and self.way == "push"
            more = int(landing.summed and not pushed) + int(landing.own != 0)
            if sums + pushed > MAX_SUMS or owns + more > MAX_OWNS:
                jobs.append(current)
                current, sums, owns = _Job(current), 0, 0
            if landing.on_base:
                assert self.base is not None
                current.source = jobs[-1] if jobs else self.base
            if landing.summed:
                current.needs.append(self.starts[landing.output])
                sums += pushed
                owns += not pushed
                current.waits |= pushed
            if landing.own:
                current.needs.append(self.owns[landing.output])
                owns += 1
            current.landings.append(landing)
            if landing.on_base and i + 1 < len(landings):
                jobs.append(current)
                self.new_base = current
                current, sums, owns = _Job(current), 0, 0
        if current.landings or not jobs:
            jobs.append(current)
        self.last = jobs[-1]
        return jobs

    def _land(self, job: _Job, n: int, rides: int | None = None) -> None:
        source = job.source.operation if isinstance(job.source, _Job) else job.source
        found = [source, *(self._sent(each) for each in job.needs)]
        job.operation = self.graph.add(
            "landing", found, sublayer=n, landings=tuple(job.landings), rides=rides
        )

    # -- sends --------------------------------------------------------------------------------

    def _sent(self, start: int) -> int:
        """The send of what `start` made, if one was launched, else `start`."""
        return self.sends.get(start, start)

    def _flush(self) -> None:
        """Launch the send that no product has run."""
        if self.sending is not None and self.partial not in self.sends:
            self._send(None)
        self.sending = self.rider = None

    def _send(self, rides: int | None) -> None:
        assert self.sending is not None
        self.sends[self.partial] = self.graph.add(
            "send", [self.partial], output=self.sending, sublayer=self.sending, rides=rides
        )

    # -- products -----------------------------------------------------------------------------

    def _product(self, part: str, n: int | None, needs: Sequence[int | None]) -> int:
        """A product of the read, which runs the send of the newest output."""
        found = self.graph.add("product", needs, part=part, sublayer=n)
        if self.rider is not None and self.partial not in self.sends:
            self._send(found)
        self.rider = None
        return found

    def _sublayer(self, n: int) -> None:
        record, plan = self.plan.sublayers[n], self.plan
        inner = []
        for kind in record.kind.split("+"):
            first = self._product("qkv" if kind == "attention" else "gate-up", n, [self.read])
            if kind == "attention":
                first = self.graph.add("attention", [first], sublayer=n)
            inner.append((LAST[kind], first))
        self._flush()
        carried, self.carried = self.carried, None
        keep, blocking = plan.own_needed[n], plan.blocking[n]
        add = self._group_sum() if record.reduce != "none" else None
        if record.reduce == "residual":
            add = self.residual
        apart = keep and add is not None
        pushes = self.way == "push" and record.reduce != "none"
        pushes = pushes and (blocking or apart) and not (keep and len(inner) > 1)
        before: int | None = None
        for part, need in inner[1:]:  # the others first, each adding the one before
            before = self.graph.add("product", [need, before], part=part, sublayer=n)
        part, need = inner[0]
        taken = add if pushes or not apart else None
        own = self.graph.add(
            "product", [need, before, taken], part=part, sublayer=n, pushes=pushes,
            output=n if pushes else None,
        )  # fmt: skip
        if carried is not None:
            self._land(carried, n + 1, rides=own)
        self.owns[n] = own
        if record.reduce == "none":
            if plan.group_begins[n] is not None:
                self.group.append(own)
            return
        if pushes:
            self.starts[n] = own
            return
        whole = self.graph.add("sum", [add, own], sublayer=n) if apart else own
        self.starts[n] = whole
        if self.way == "push":
            self.sending, self.partial = n, whole
        elif self.way == "nccl":
            if keep and not apart:
                self.owns[n] = self.graph.add("copy", [own], sublayer=n)
            self.starts[n] = self.graph.add(
                "all-reduce", [whole], sublayer=n, output=n, stream=COMM
            )

    def _group_sum(self) -> int | None:
        """The sum of the open group's partials, in as few kernels as it takes."""
        if not self.group:
            return None
        total, rest = self.group[0], self.group[1:]
        for i in range(0, len(rest), MAX_OWNS):
            total = self.graph.add("sum", [total, *rest[i : i + MAX_OWNS]])
        self.group = []
        return total
