"""Residual plans: when, and whether, each sublayer's output reaches what later sublayers read.

Tensor parallelism (TP) splits every sublayer over T ranks. Each rank computes a *partial*; the
sum of the partials is the sublayer's output. Every architecture of this package is one list of
`SublayerRecord`s, which say which outputs a sublayer reads and how its own partial is summed:

    standard                            ladder
    x --+-- attention --reduce-- + --   x --+-- attention --reduce----------- + --
        |      (wait)            |          |   mlp reads x, not attention's   |
        +------------------------+          |   output, while it is summed     |
                                            +---------------------------------+

Notation, used in this package throughout: sublayer n of N, rank r of T, residual X_r, partial
o_n^r, sum over ranks S_n = sum_q o_n^q. Sources: Ladder Residual (arXiv 2501.06589), Equation 2 and
Algorithm 1 for `ladder`, section 5 for `desync-nx`; Delayed Tensor Parallelism (Kog, 2026) for
`dtp-d`; PaLM for `parallel`. `accumulate-nx` is this project's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from ladder.models.errors import UserError, check_keys, unknown

KINDS = ("attention", "mlp", "attention+mlp")
REDUCES = ("output", "residual", "accumulated", "none")


def number(value: Any) -> Any:
    """A string that is a number as that (YAML reads 1e-3 as a string); anything else unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True)
class SublayerRecord:
    """One sublayer of a plan: what it reads, and how its output is summed.

    kind: `attention`, `mlp`, or `attention+mlp` (one norm, one input, one reduce for both).
    own_lag: it reads the residual without this rank's newest `own_lag` outputs.
    peer_lag: the same for the other ranks' outputs.
    reduce: `output` sums its partial over the ranks; `residual` sums partial + X_r / T, which
        makes the residuals equal again and lands at once; `accumulated` sums the partials of all
        sublayers since the last reduce, which replace what the own ones added; `none` leaves the
        partial on its rank.
    own_scale: factor on the own partial, as it joins this rank's own residual.
    """

    kind: str
    own_lag: int = 0
    peer_lag: int = 0
    reduce: str = "output"
    own_scale: float = 1.0

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], where: str) -> SublayerRecord:
        """Build one from a mapping; `where` names the place in error messages."""
        check_keys(where, record, [field.name for field in fields(cls)])
        if "kind" not in record:
            raise UserError(f"{where} has no kind; allowed: {', '.join(KINDS)}")
        if record.get("reduce") == "stream":  # its former name, in saved plans
            record = {**record, "reduce": "residual"}
        if "own_scale" in record:
            record = {**record, "own_scale": number(record["own_scale"])}
        return cls(**record)

    def validate(self, where: str) -> None:
        if self.kind not in KINDS:
            raise unknown(f"kind of {where}", self.kind, KINDS)
        if self.reduce not in REDUCES:
            raise unknown(f"reduce of {where}", self.reduce, REDUCES)
        for name in ("own_lag", "peer_lag"):
            lag = getattr(self, name)
            if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
                raise UserError(f"{name}={lag!r} of {where} must be a whole number, 0 or more")
        scale = self.own_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
            raise UserError(
                f"own_scale={scale!r} of {where} must be a number above 0 and below 1e6"
            )
        if self.equalises and scale != 1:
            what = "sums the whole residual" if self.reduce == "residual" else "sums plain partials"
            raise UserError(
                f"own_scale={scale!r} of {where} must be 1 with reduce={self.reduce}, which "
                f"{what}; use reduce=output"
            )

    @property
    def equalises(self) -> bool:
        """Whether its sum lands at once and leaves equal residuals, whatever own parts differed."""
        return self.reduce in ("residual", "accumulated")


@dataclass(frozen=True)
class Landing:
    """One output, or a part of it, joining the residual before a read.

    The residual becomes X_r + summed * S + own * o^r. So (True, 0) is the whole output, (False, 1)
    only this rank's own partial, (True, -1) only its peers'. Where `replaces` is set it becomes S
    alone, the sum of partial + X_r / T, or for an `accumulated` reduce B + S, where B is the
    residual that the first sublayer of its group read, and S the sum of the group's partials.
    """

    output: int
    summed: bool
    own: float = 0.0
    replaces: bool = False


@dataclass(frozen=True)
class Plan:
    """A validated list of sublayer records, and all that follows from it.

    `name` is for people; nothing decides by it. Reads are numbered 0 .. N: read n is sublayer n's,
    read N the final norm's.
    """

    sublayers: tuple[SublayerRecord, ...]
    name: str = "custom"

    def __post_init__(self) -> None:
        if not self.sublayers:
            raise UserError(f"plan {self.name!r} has no sublayers")
        expected = "attention"
        for n, record in enumerate(self.sublayers):
            where = f"sublayer {n} of plan {self.name!r}"
            record.validate(where)
            if expected == "mlp" and record.kind != "mlp":
                raise UserError(
                    f"kind={record.kind!r} of {where} must be 'mlp': a layer is "
                    f"attention then mlp, or attention+mlp"
                )
            if expected == "attention" and record.kind == "mlp":
                raise UserError(f"kind='mlp' of {where} must follow an attention sublayer")
            expected = "mlp" if record.kind == "attention" else "attention"
        if expected == "mlp":
            raise UserError(f"plan {self.name!r} ends within a layer: its last kind is attention")
        _ = self.landings  # refuses outputs in flight where there must be none
        for n, begin in enumerate(self.group_begins):
            if begin is not None and not self.equal_reads[begin]:
                raise UserError(
                    f"the ranks' residuals differ at sublayer {begin} of plan {self.name!r}, where "
                    f"the group of sublayer {self._reduced_by(n)} (reduce=accumulated) begins; set "
                    f"reduce=residual for sublayer {begin - 1}"
                )

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layer (block of weights) that each sublayer belongs to, N entries."""
        layer, found = -1, []
        for record in self.sublayers:
            layer += record.kind != "mlp"
            found.append(layer)
        return tuple(found)

    @cached_property
    def last_attention(self) -> int:
        """The last sublayer that looks at other positions than its own."""
        return max(n for n, each in enumerate(self.sublayers) if each.kind != "mlp")

    @property
    def num_layers(self) -> int:
        return self.layers[-1] + 1

    @cached_property
    def landings(self) -> tuple[tuple[Landing, ...], ...]:
        """What lands before each read, in the order of the outputs; N + 1 entries.

        Outputs are counted in order, and what has landed never leaves: read n takes all but the
        newest `lag`, or as many as had landed before. Before the final norm everything lands.
        """
        reads: list[tuple[Landing, ...]] = []
        own = peers = 0  # how many outputs have landed, this rank's part and its peers' part
        for n in range(len(self.sublayers) + 1):
            own_lag, peer_lag = 0, 0
            if n < len(self.sublayers):
                own_lag, peer_lag = self.sublayers[n].own_lag, self.sublayers[n].peer_lag
            own_to, peers_to = max(own, n - own_lag), max(peers, n - peer_lag)
            if n and self.sublayers[n - 1].equalises:
                own_to = peers_to = n
            landed = []
            for m in sorted({*range(own, own_to), *range(peers, peers_to)}):
                record = self.sublayers[m]
                own_lands = own <= m < own_to
                peers_land = peers <= m < peers_to and record.reduce != "none"
                if record.equalises:
                    landed.append(Landing(m, summed=True, replaces=True))
                elif own_lands and peers_land:
                    landed.append(Landing(m, summed=True, own=record.own_scale - 1))
                elif own_lands:
                    landed.append(Landing(m, summed=False, own=record.own_scale))
                elif peers_land:
                    landed.append(Landing(m, summed=True, own=-1.0))
            own, peers = own_to, peers_to
            if self._needs_all(n) and (own < n or peers < n):
                last = self._reduced_by(n)
                has = f"has reduce={self.sublayers[n].reduce} with"
                if n != last:
                    has = f"is summed by sublayer {last} (reduce=accumulated) and has"
                raise UserError(
                    f"sublayer {n} of plan {self.name!r} {has} outputs in "
                    f"flight (own_lag={own_lag}, peer_lag={peer_lag}); its lags must be 0"
                )
            reads.append(tuple(landed))
        return tuple(reads)

    @cached_property
    def group_begins(self) -> tuple[int | None, ...]:
        """For each sublayer of an `accumulated` reduce's group where that begins, else None.

        The group is every sublayer since the last reduce, with the one that reduces. N entries.
        """
        found: list[int | None] = [None] * len(self.sublayers)
        begin = 0
        for n, record in enumerate(self.sublayers):
            if record.reduce == "accumulated":
                found[begin : n + 1] = [begin] * (n + 1 - begin)
            if record.reduce != "none":
                begin = n + 1
        return tuple(found)

    def _needs_all(self, n: int) -> bool:
        """Whether nothing may be in flight at read n, whose residual an equalising reduce needs."""
        if n == len(self.sublayers):
            return False
        return self.sublayers[n].equalises or self.group_begins[n] is not None

    def _reduced_by(self, n: int) -> int:
        """The sublayer whose reduce is the next from sublayer n on."""
        return next(m for m in range(n, len(self.sublayers)) if self.sublayers[m].reduce != "none")

    @cached_property
    def equal_reads(self) -> tuple[bool, ...]:
        """Whether all ranks read the same residual, N + 1 entries.

        A norm that reads residuals that differ has its own weight on each rank.
        """
        own: dict[int, float] = {}  # factor of o^r beyond S, of each landed output
        equal = []
        for read in self.landings:
            for landing in read:
                if landing.replaces:
                    own.clear()
                elif factor := own.pop(landing.output, 0.0) + landing.own:
                    own[landing.output] = factor
            equal.append(not own)
        return tuple(equal)

    @property
    def depends_on_tp(self) -> bool:
        """Whether T is part of the function that the model computes (its `tp_degree`)."""
        return any(
            record.own_lag != record.peer_lag or record.reduce != "output" or record.own_scale != 1
            for record in self.sublayers
        )

    @property
    def no_comm(self) -> bool:
        """Whether no sublayer's output is reduced: no communication, for benchmarks only."""
        return all(record.reduce == "none" for record in self.sublayers)

    @property
    def final_mean(self) -> bool:
        """Whether the residuals still differ at the end: norm on each rank, then the mean."""
        return not self.equal_reads[-1] and not self.no_comm

    @property
    def collectives(self) -> int:
        """All-reduces that the sublayers issue in one forward pass (one decoded token)."""
        return sum(record.reduce != "none" for record in self.sublayers)

    @cached_property
    def blocking(self) -> tuple[bool, ...]:
        """Whether each reduce blocks: its sum is waited for before anything else is launched."""
        waited = {}
        for n, read in enumerate(self.landings):
            for landing in read:
                if landing.summed:
                    waited[landing.output] = n
        return tuple(waited.get(n) == n + 1 for n in range(len(self.sublayers)))

    @cached_property
    def early(self) -> tuple[bool, ...]:
        """Whether what read n lands was all computed before sublayer n - 1, N + 1 entries.

        Then the landing may run beneath that sublayer.
        """
        return tuple(
            n > 0 and all(landing.output < n - 1 for landing in read)
            for n, read in enumerate(self.landings)
        )

    @cached_property
    def longest_flight(self) -> int:
        """The most sublayers that compute between an output and a read that lands it."""
        flights = (n - 1 - each.output for n, read in enumerate(self.landings) for each in read)
        return max(flights, default=0)

    @cached_property
    def done(self) -> tuple[tuple[int, ...], ...]:
        """Of which outputs nothing is left to land after each read, N + 1 entries."""
        last = {landing.output: n for n, read in enumerate(self.landings) for landing in read}
        found: list[list[int]] = [[] for _ in self.landings]
        for output, read in last.items():
            found[read].append(output)
        return tuple(map(tuple, found))

    @cached_property
    def own_needed(self) -> tuple[bool, ...]:
        """Whether each sublayer's own partial is read apart from the sum, N entries."""
        apart = {landing.output for read in self.landings for landing in read if landing.own}
        return tuple(n in apart for n in range(len(self.sublayers)))

    def as_no_comm(self) -> Plan:
        """This plan without its reduces, its own lags and scales kept.

        It has this plan's computation and no communication, as `none` has of `standard`. It is for
        benchmarks, computes no model, and is refused elsewhere (`ModelConfig.refuse_no_comm`).
        """
        records = tuple(
            replace(record, reduce="none", peer_lag=record.own_lag) for record in self.sublayers
        )
        return Plan(records, f"{self.name} no_comm")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as saved with a model: the name and every record, resolved."""
        return {"name": self.name, "sublayers": [asdict(record) for record in self.sublayers]}
