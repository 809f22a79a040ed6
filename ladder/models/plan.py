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
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ladder.models.errors import UserError, check_keys, unknown

KINDS = ("attention", "mlp", "attention+mlp")
REDUCES = ("output", "residual", "accumulated", "none")
MOST_KEPT = 64  # own parts that a landing on the base adds again: each costs time and memory


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
        sublayers since the last reduce, its group, and replaces what their own parts had added,
        at the read whose `peer_lag` lets this sublayer's output land; `none` leaves the partial on
        its rank.
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
            raise unknown("kind", self.kind, KINDS, where)
        if self.reduce not in REDUCES:
            raise unknown("reduce", self.reduce, REDUCES, where)
        for name in ("own_lag", "peer_lag"):
            lag = getattr(self, name)
            if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
                raise UserError(f"{name}={lag!r} of {where} must be a whole number, 0 or more")
        scale = self.own_scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e6:
            raise UserError(
                f"own_scale={scale!r} of {where} must be a number above 0 and below 1e6"
            )
        if self.reduce == "residual" and scale != 1:
            raise UserError(
                f"own_scale={scale!r} of {where} must be 1 with reduce=residual, which sums the "
                f"whole residual; use reduce=output"
            )


@dataclass(frozen=True)
class Landing:
    """One output, or a part of it, joining the residual before a read.

    The residual becomes X_r + summed * S + own * o^r. So (True, 0) is the whole output, (False, 1)
    only this rank's own partial, (True, -1) only its peers'.

    replaces: the residual becomes S alone, the sum of partial + X_r / T.
    on_base: the residual becomes B + S, and so does B. S is the sum of an `accumulated` reduce. B,
        the base, is the residual without the own parts of groups that have not landed. Own parts of
        later sublayers, which B lacks, are landed again by the landings that follow in this read.
    """

    output: int
    summed: bool
    own: float = 0.0
    replaces: bool = False
    on_base: bool = False


@dataclass(frozen=True)
class Plan:
    """A validated list of sublayer records, and all that follows from it.

    `name` is for people; nothing decides by it. tp_degree: the T for which the records were
    resolved, if they hold its square root; None: they say what they say for any T. Reads are
    numbered 0 .. N: read n is sublayer n's, read N the final norm's.
    """

    sublayers: tuple[SublayerRecord, ...]
    name: str = "custom"
    tp_degree: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sublayers", tuple(self.sublayers))  # a list could change later
        if not self.sublayers:
            raise UserError(f"plan {self.name!r} has no sublayers")
        expected = "attention"
        for n, record in enumerate(self.sublayers):
            where = f"sublayer {n} of plan {self.name!r}"
            if not isinstance(record, SublayerRecord):
                raise UserError(f"{where} is {record!r}; give SublayerRecords or use resolve_plan")
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
        for n, record in enumerate(self.sublayers):
            if record.reduce == "accumulated":
                self._validate_group(n)

    def _validate_group(self, last: int) -> None:
        """Raise UserError if the group of sublayer `last` begins with residuals that differ by more
        than the own parts of groups in flight, or if an own_scale has no meaning."""
        begin, scale = self.group_begins[last], self.sublayers[last].own_scale
        assert begin is not None
        _, base_equal = self._equal_and_base_equal[begin]
        if not base_equal:
            raise UserError(
                f"the ranks' residuals differ at sublayer {begin} of plan {self.name!r}, where "
                f"the group of sublayer {last} (reduce=accumulated) begins; set reduce=residual "
                f"for sublayer {begin - 1}"
            )
        if scale != 1 and not self.own_needed[last]:
            raise UserError(
                f"own_scale={scale!r} of sublayer {last} of plan {self.name!r} must be 1: no "
                f"sublayer reads its own part before the group's sum (reduce=accumulated)"
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
        newest `lag`, or as many as had landed before. Before the final norm everything lands. The
        sum of a group lands with the peers' part of the group's last output.

        `accumulate-2x` on two layers, with T = 4 and own_scale sqrt(T) = 2:

            read 0  ()
            read 1  Landing(0, summed=False, own=2.0): X_r + 2 o_0^r
            read 2  Landing(1, summed=True, on_base=True): B + S, S of outputs 0 and 1, on all ranks
            read 3  Landing(2, summed=False, own=2.0)
            read 4  Landing(3, summed=True, on_base=True)
        """
        reads: list[tuple[Landing, ...]] = []
        own = peers = 0  # how many outputs have landed, this rank's part and its peers' part
        for n in range(len(self.sublayers) + 1):
            own_lag, peer_lag = 0, 0
            if n < len(self.sublayers):
                own_lag, peer_lag = self.sublayers[n].own_lag, self.sublayers[n].peer_lag
            own_to, peers_to = max(own, n - own_lag), max(peers, n - peer_lag)
            if n and self.sublayers[n - 1].reduce == "residual":
                own_to = peers_to = n
            landed = [
                Landing(m, summed=True, on_base=True)
                for m in range(peers, peers_to)
                if self.sublayers[m].reduce == "accumulated"
            ]
            if landed:
                own = peers = landed[-1].output + 1  # on the base, own parts from there land anew
                self._refuse_sum(n, own - 1, own_to)
            for m in sorted({*range(own, own_to), *range(peers, peers_to)}):
                record = self.sublayers[m]
                own_lands = own <= m < own_to
                peers_land = peers <= m < peers_to and record.reduce != "none"
                if record.reduce == "residual":
                    landed.append(Landing(m, summed=True, replaces=True))
                elif own_lands and peers_land:
                    landed.append(Landing(m, summed=True, own=record.own_scale - 1))
                elif own_lands:
                    landed.append(Landing(m, summed=False, own=record.own_scale))
                elif peers_land:
                    landed.append(Landing(m, summed=True, own=-1.0))
            own, peers = own_to, peers_to
            self._refuse_in_flight(n, min(own, peers))
            reads.append(tuple(landed))
        return tuple(reads)

    def _refuse_sum(self, n: int, m: int, own_to: int) -> None:
        """Raise UserError if read n, which lands the own parts before `own_to`, must not land the
        sum of the group of sublayer m."""
        if own_to <= m:
            raise UserError(
                f"sublayer {n} of plan {self.name!r} reads the sum of sublayer {m} "
                f"(reduce=accumulated) before the own part that it replaces; its own_lag must not "
                f"be above its peer_lag"
            )
        if own_to - m - 1 > MOST_KEPT:
            raise UserError(
                f"sublayer {n} of plan {self.name!r} reads the sum of sublayer {m} "
                f"(reduce=accumulated) after {own_to - m - 1} newer own parts, more than the "
                f"{MOST_KEPT} that can be kept to be added again; lower its peer_lag"
            )

    def _refuse_in_flight(self, n: int, first: int) -> None:
        """Raise UserError if an output, of those from `first` on, must not be in flight at read n.

        A `residual` reduce, which sums the residual, allows none. Where a group begins, only
        outputs of other groups may be in flight: the base has no place for others.
        """
        if n == len(self.sublayers) or first == n:
            return
        record, begin = self.sublayers[n], self.group_begins[n]
        if record.reduce == "residual":
            has = f"has reduce=residual while output {n - 1} is still in flight"
        elif begin == n and self.group_begins[n - 1] is None:
            has = (
                f"starts a group (sublayers {n} to {self._reduced_by(n)}, reduce=accumulated) "
                f"while output {n - 1}, of no group, is still in flight"
            )
        else:
            return
        raise UserError(
            f"sublayer {n} of plan {self.name!r} {has}; set own_lag=0 and peer_lag=0 for sublayer "
            f"{n} (now own_lag={record.own_lag}, peer_lag={record.peer_lag})"
        )

    @cached_property
    def group_begins(self) -> tuple[int | None, ...]:
        """The first sublayer of each sublayer's group; None outside of `accumulated` groups.

        A group is all sublayers since the last reduce, up to the one that reduces. N entries.
        """
        found: list[int | None] = [None] * len(self.sublayers)
        begin = 0
        for n, record in enumerate(self.sublayers):
            if record.reduce == "accumulated":
                found[begin : n + 1] = [begin] * (n + 1 - begin)
            if record.reduce != "none":
                begin = n + 1
        return tuple(found)

    def _reduced_by(self, n: int) -> int:
        """The sublayer whose reduce is the next from sublayer n on."""
        return next(m for m in range(n, len(self.sublayers)) if self.sublayers[m].reduce != "none")

    @cached_property
    def equal_reads(self) -> tuple[bool, ...]:
        """Whether all ranks read the same residual, N + 1 entries.

        A norm that reads residuals that differ has its own weight on each rank.
        """
        return tuple(equal for equal, _ in self._equal_and_base_equal)

    @cached_property
    def _equal_and_base_equal(self) -> tuple[tuple[bool, bool], ...]:
        """For each read: whether the residuals are equal on all ranks; and whether they are if the
        own parts of `accumulated` groups whose sums have not landed are left out. N + 1 entries."""
        grouped: dict[int, float] = {}  # factor of o^r beyond S, of each landed output of a group
        others: dict[int, float] = {}  # and of the others
        found = []
        for read in self.landings:
            for landing in read:
                own = others if self.group_begins[landing.output] is None else grouped
                if landing.replaces or landing.on_base:
                    grouped.clear()
                    others.clear()
                elif factor := own.pop(landing.output, 0.0) + landing.own:
                    own[landing.output] = factor
            found.append((not grouped and not others, not others))
        return tuple(found)

    @cached_property
    def base_needed(self) -> tuple[bool, ...]:
        """Whether a group is open, or its sum in flight, after each read: N + 1 entries."""
        found = [False] * len(self.landings)
        for n, read in enumerate(self.landings):
            for landing in (each for each in read if each.on_base):
                begin = self._lands(landing).start
                found[begin:n] = [True] * (n - begin)
        return tuple(found)

    def _lands(self, landing: Landing) -> range:
        """The outputs of which `landing` lands a part, or the sum."""
        begin = self.group_begins[landing.output] if landing.on_base else None
        return range(landing.output if begin is None else begin, landing.output + 1)

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
        reads = enumerate(self.landings)
        waited = {each.output: n for n, read in reads for each in read if each.summed}
        return tuple(waited.get(n) == n + 1 for n in range(len(self.sublayers)))

    @cached_property
    def early(self) -> tuple[bool, ...]:
        """Whether all that read n lands was computed before sublayer n - 1, N + 1 entries.

        Then the landing may run beneath that sublayer.
        """
        return tuple(
            n > 0 and all(landing.output < n - 1 for landing in read)
            for n, read in enumerate(self.landings)
        )

    @cached_property
    def beside(self) -> tuple[bool, ...]:
        """Whether each sublayer may run beside the one before, whose output it does not need.

        A sublayer `attention+mlp` may not: its own parts run beside each other.
        """
        kinds = [record.kind for record in self.sublayers]
        return tuple(
            early and {kinds[n - 1], kind} == {"attention", "mlp"}
            for n, (kind, early) in enumerate(zip(kinds, self.early, strict=False))
        )

    @cached_property
    def longest_flight(self) -> int:
        """The most sublayers that compute between an output and a read that lands it."""
        flights = (n - 1 - each.output for n, read in enumerate(self.landings) for each in read)
        return max(flights, default=0)

    @cached_property
    def done(self) -> tuple[tuple[int, ...], ...]:
        """The outputs of which nothing is left to land after each read, N + 1 entries."""
        last = {landing.output: n for n, read in enumerate(self.landings) for landing in read}
        for n, read in enumerate(self.landings):
            for m in (m for landing in read for m in self._lands(landing)):
                last.setdefault(m, n)  # its own part lands with the sum of its group alone
        found: list[list[int]] = [[] for _ in self.landings]
        for output, n in last.items():
            found[n].append(output)
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
        return Plan(records, f"{self.name} no_comm", self.tp_degree)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as saved with a model: the name, the records' T, and every record."""
        records = [asdict(record) for record in self.sublayers]
        return {"name": self.name, "tp_degree": self.tp_degree, "sublayers": records}
