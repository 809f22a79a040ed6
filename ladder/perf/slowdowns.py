"""The speed of operations beside others, as a share of that alone, by the resources they take."""

from __future__ import annotations

from ladder.perf.machine import Machine

COMMUNICATES = ("nccl", "push", "direct")


class Slowdowns:
    """The slowdowns of a machine's file. read: the names of the values that were asked for."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.read: set[str] = set()

    def value(self, name: str) -> float:
        self.read.add(name)
        return self.machine.value(name)

    def curve(self, name: str, nbytes: float) -> float | None:
        """The speed beside, or of, an all-reduce of `nbytes` bytes; None if it was not measured."""
        found = self.machine.family(name)
        return min(1.0, found[0].at(nbytes).us) if found else None

    def together(self, one: str, two: str) -> float:
        """The speed of an operation on resource `one` (see `Operation`) beside one on `two`."""
        if "wait" in (one, two) or "link" in (one, two):
            return 1.0
        if one == "all" and two in COMMUNICATES:
            return self.value(self._known(f"product_beside_{two}"))
        if one in COMMUNICATES and two == "all":
            return self.value(self._known(f"{one}_beside_product"))
        return 0.5  # both take all multiprocessors

    def _known(self, name: str) -> str:
        """The name of the value to read. Older files lack the speeds of landings over links
        (`direct`); those of our all-reduces (`push`) stand in."""
        return name if name in self.machine.values else name.replace("direct", "push")

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The values that were read but not measured by `ladder bench machine`, with sources."""
        said = []
        for name in sorted(self.read):
            found = self.machine.values.get(name)
            source = "declared" if found is None else found.provenance.partition(":")[0]
            if source != "measured":
                said.append(f"{name} {self.machine.value(name):g} ({source})")
        return tuple(said)
