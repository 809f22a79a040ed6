"""Whether predictions order choices as measurements do, and what a wrong order costs.

The choices are the recorded plans, reducers and layouts of one shape, batch and number of GPUs:
those among which `ladder predict MODEL` would choose, by the same rule. Training steps are compared
by their time for a token, since layouts do different work in a step. Plans that compute no model
(`none`, `no_comm`) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from ladder.perf.planner.question import CLOSE, choose
from ladder.perf.prediction.eras import SAID
from ladder.perf.prediction.records import Run, Score

APART = 0.03  # pairs whose measured times are closer have no order
CHOSEN = ("plan", "reducer", "degree", "no_comm", "layout")  # the fields of a point to choose
HEAD = ["order", "choices", "pairs", "tau", "recommended", "regret", "ladder / standard"]


@dataclass(frozen=True)
class Ranking:
    """One case. pairs: of choices that are more than APART apart. right: the pairs that were
    predicted in the right order. recommended: the choice that `ladder predict` would recommend.
    regret: its measured time over that of the best choice, less 1. speedup: for each reducer or
    layout, the predicted less the measured speedup of ladder over standard, in points."""

    case: str
    choices: int
    pairs: int
    right: int
    recommended: str
    regret: float
    speedup: tuple[float, ...]

    @property
    def tau(self) -> float | None:
        """Kendall's: 1 for the measured order, -1 for its reverse; None without pairs."""
        return 2 * self.right / self.pairs - 1 if self.pairs else None


def rankings(found: Iterable[Score]) -> list[Ranking]:
    """The ranking of each case with more than one choice, from the scores of one phase. If a prompt
    was recorded both by copies and by operators, the latter counts: it is what runs now."""
    groups: dict[tuple[tuple[str, object], ...], dict[object, Score]] = {}
    for each in found:
        fields = asdict(each.point)
        if not fields["no_comm"] and fields["plan"] != "none":
            case = tuple((key, value) for key, value in fields.items() if key not in CHOSEN)
            case += (("kernels", SAID[each.era]),)
            some = groups.setdefault(case, {})
            known = some.get(each.point)
            if known is None or each.inside or not known.inside:
                some[each.point] = each
    return [_ranking(case, [*some.values()]) for case, some in groups.items() if len(some) > 1]


def _ranking(case: Sequence[tuple[str, object]], scores: Sequence[Score]) -> Ranking:
    some = [_of_a_token(each) for each in scores]
    apart = [
        (a, b) for a, b in combinations(some, 2)
        if abs(a.measured - b.measured) > APART * min(a.measured, b.measured)
    ]  # fmt: skip
    right = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in apart)
    best = choose(some, _plan, _predicted, _predicted)
    assert best is not None  # a case has several
    least = min(each.measured for each in some)
    said = dict(case)
    where = ", ".join(
        f"{key} {said[key]}" for key in ("tp", "gpus", "batch", "prompt") if key in said
    )
    if said.get("weights", "bf16") != "bf16":
        where += f", {said['weights']} weights"
    if said.get("cache", "bf16") != "bf16":
        where += f", {said['cache']} cache"
    if said["kernels"]:
        where += f", {said['kernels']}"
    return Ranking(
        f"{said['model']}, {where}", len(some), len(apart), right, _choice(best),
        best.measured / least - 1, tuple(_speedups(some)),
    )  # fmt: skip


def _of_a_token(score: Score) -> Score:
    """The score, for a training step with its times divided by its tokens, as `ladder predict
    --train` compares them."""
    if not isinstance(score.point, Run):
        return score
    tokens = score.point.tokens
    return replace(score, measured=score.measured / tokens, predicted=score.predicted / tokens)


def _plan(score: Score) -> str:
    return str(score.point.plan)


def _predicted(score: Score) -> float:
    return score.predicted


def _choice(score: Score) -> str:
    fields = asdict(score.point)
    return ", ".join(str(fields[key]) for key in ("plan", "reducer", "layout") if fields.get(key))


def _speedups(some: Sequence[Score]) -> Iterable[float]:
    times = {_choice(each): each for each in some}
    for name, each in times.items():
        plan, _, rest = name.partition(", ")
        plain = times.get(f"standard, {rest}")
        if plan == "ladder" and plain is not None:
            found, real = (
                plain.predicted / each.predicted, plain.measured / each.measured
            )  # fmt: skip
            yield 100 * (found - real)


def table(found: Sequence[Ranking]) -> list[list[str]]:
    """A row for each case, and one for all of them."""
    rows = [HEAD]
    for each in found:
        tau = "-" if each.tau is None else f"{each.tau:.2f}"
        speedup = ", ".join(f"{error:+.1f}" for error in each.speedup)
        rows.append([each.case, str(each.choices), str(each.pairs), tau, each.recommended,
                     f"{100 * each.regret:.1f} %", speedup or "-"])  # fmt: skip
    pairs = sum(each.pairs for each in found)
    if len(found) > 1 and pairs:
        errors = [abs(error) for each in found for error in each.speedup]
        rows.append(
            ["all", str(sum(each.choices for each in found)), str(pairs),
             f"{2 * sum(each.right for each in found) / pairs - 1:.2f}", "largest:",
             f"{100 * max(each.regret for each in found):.1f} %",
             f"mean {sum(errors) / len(errors):.1f}" if errors else "-"]
        )  # fmt: skip
    return rows


NOTE = (
    f"order: choices of one case; tau: Kendall's, of pairs more than {APART:.0%} apart; "
    f"recommended: as by `ladder predict`, standard unless another plan gains {CLOSE:.0%}; regret: "
    f"what that takes beyond the best, measured; ladder / standard: predicted less measured "
    f"speedup, points"
)
