"""The kernels of a fused decode step as it was until 2026-11-28, by which older records are
predicted: on one stream, where sends and landings rode in products' launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ladder.models.plan import Plan
from ladder.perf.graph import COMM, LAST, Graph
from ladder.perf.lower_decode import FIRST, Job, Step


@functools.lru_cache(maxsize=64)
def riding(plan: Plan, way: str = "push") -> Graph:
    """One decode step. way: see `lower_decode.decode`. With `push`, extra programs of the next
    product write to the peers' slots; where the plan blocks, the product itself does."""
    return _Riding(plan, way).run()


class _Riding(Step):
    def __init__(self, plan: Plan, way: str) -> None:
        super().__init__(plan, way)
        self.carried: Job | None = None
        self.sending: int | None = None  # the output to send
        self.partial = -1  # the operation that made it
        self.rider: int | None = None  # a send that the next product may run
        self.sends: dict[int, int] = {}  # operation that made an output -> operation that sent it

    def run(self) -> Graph:
        early: tuple[int, list[Job]] | None = None
        for n in range(len(self.plan.sublayers)):
            self._finish(n, early)
            early = None
            if self.plan.early[n + 1]:
                early = n + 1, self._begin(n + 1)
            self._sublayer(n)
        self._finish(len(self.plan.sublayers), early)
        read = self.final()
        if self.plan.final_mean:
            self.rider = None
        return self.choose(self._product("head", None, read))

    # -- landings -----------------------------------------------------------------------------

    def _begin(self, n: int) -> list[Job]:
        """Start the landing of read n. Returns its jobs; none if nothing lands, or if the landing
        must wait for a collective."""
        landings = self.plan.landings[n]
        if self.read is not None and not landings:
            return []
        if self.way == "nccl" and any(each.summed for each in landings):
            return []
        jobs = self.jobs(landings)
        self.carried = jobs[0]
        return jobs

    def _finish(self, n: int, early: tuple[int, list[Job]] | None) -> None:
        """Land read n: launch the jobs that no product has run."""
        jobs = early[1] if early is not None else self._begin(n)
        landings = self.plan.landings[n]
        if landings or self.read is None:
            for job in jobs or self.jobs(landings):
                if job.operation is None:
                    if self.way == "push" and any(each.summed for each in job.landings):
                        self._flush()
                    self.land(job, n)
            self.finished()
            self.carried = None
        assert self.read is not None
        self.rider = self.sending
        self.landed(n, self.read)

    def land(self, job: Job, n: int, rides: int | None = None) -> None:
        """Land a job after the sends of what it lands, if there were sends."""
        job.needs = [self.sends.get(each, each) for each in job.needs]
        super().land(job, n, rides)

    # -- sends --------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Launch the send that no product has run."""
        if self.sending is not None and self.partial not in self.sends:
            self._send(None)
        self.sending = self.rider = None

    def _send(self, rides: int | None) -> None:
        assert self.sending is not None
        self.sends[self.partial] = self.add(
            "send", [self.partial], output=self.sending, sublayer=self.sending, rides=rides
        )

    # -- products -----------------------------------------------------------------------------

    def _product(self, part: str, n: int | None, read: int | None) -> int:
        """A product of the read, which runs the send of the newest output."""
        found = self.add("product", [read], part=part, sublayer=n)
        if self.rider is not None and self.partial not in self.sends:
            self._send(found)
        self.rider = None
        return found

    def _sublayer(self, n: int) -> None:
        record, plan = self.plan.sublayers[n], self.plan
        inner = []
        for kind in record.kind.split("+"):
            first = self._product(FIRST[kind], n, self.read)
            if kind == "attention":
                first = self.add("attention", [first], sublayer=n)
            inner.append((LAST[kind], first))
        self._flush()
        carried, self.carried = self.carried, None
        keep, blocking = plan.own_needed[n], plan.blocking[n]
        add = self.group_sum() if record.reduce != "none" else None
        if record.reduce == "residual":
            add = self.residual
        apart = keep and add is not None
        pushes = self.way == "push" and record.reduce != "none"
        pushes = pushes and (blocking or apart) and not (keep and len(inner) > 1)
        taken = add if pushes or not apart else None
        own = self._last_products(n, inner, taken, pushes)
        if carried is not None:
            self.land(carried, n + 1, rides=own)
        self.owns[n] = own
        if record.reduce == "none":
            if plan.group_begins[n] is not None:
                self.group.append(own)
            return
        if pushes:
            self.starts[n] = own
            return
        whole = self.add("sum", [add, own], sublayer=n) if apart else own
        self.starts[n] = whole
        if self.way == "push":
            self.sending, self.partial = n, whole
        elif self.way == "nccl":
            if keep and not apart:
                self.owns[n] = self.add("copy", [own], sublayer=n)
            self.starts[n] = self.add("all-reduce", [whole], sublayer=n, output=n, stream=COMM)

    def _last_products(
        self, n: int, inner: Sequence[tuple[str, int]], taken: int | None, pushes: bool
    ) -> int:
        """Add the last products, that of the first part at the end; each adds the one before."""
        before: int | None = None
        for part, need in inner[1:]:
            before = self.add("product", [need, before], part=part, sublayer=n)
        part, need = inner[0]
        return self.add(
            "product", [need, before, taken], part=part, sublayer=n, pushes=pushes,
            output=n if pushes else None,
        )  # fmt: skip
