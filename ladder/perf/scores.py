"""A number of the paper beside ours, with its tolerance; and what a figure consists of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# fitted: a parameter was set to reach the number, or the number follows from such a parameter.
# held out: no parameter was set to it. counted: it depends on no parameter. check: it tests the
# simulator itself.
Basis = Literal["fitted", "held out", "counted", "check"]
FIT: Basis = "fitted"
OUT: Basis = "held out"


@dataclass(frozen=True)
class Score:
    """paper, ours: the numbers, in `unit`; None if the paper has a claim but no number. error: our
    number less the paper's, in points if the unit is %, else in % of the paper's. within: whether
    the error is within `tolerance`, or whether the claim holds."""

    what: str
    paper: float | None
    ours: float | None
    unit: Literal["%", "x", ""]
    tolerance: str
    basis: Basis
    error: float | None
    within: bool

    def texts(self) -> list[str]:
        """The cells of a table's row."""
        error = "" if self.error is None else f"{self.error:+.1f}"
        error += "" if self.error is None else " points" if self.unit == "%" else " %"
        return [
            self.what, _number(self.paper, self.unit), _number(self.ours, self.unit), error,
            self.tolerance, "yes" if self.within else "NO", self.basis,
        ]  # fmt: skip


HEAD = ["result", "paper", "ours", "error", "tolerance", "within", "basis"]


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} %" if unit == "%" else f"{value:.2f}x"


def points(what: str, paper: float, ours: float, tolerance: float, basis: Basis) -> Score:
    """The score of a share in %, with a tolerance in points."""
    error = ours - paper
    within = abs(error) <= tolerance
    return Score(what, paper, ours, "%", f"{tolerance:g} points", basis, error, within)


def speedup(what: str, paper: float, ratio: float, tolerance: float, basis: Basis) -> Score:
    """The score of a ratio of times, which the paper gives as % above 1."""
    return points(what, paper, 100 * (ratio - 1), tolerance, basis)


def factor(what: str, paper: float, ours: float, tolerance: float, basis: Basis) -> Score:
    """The score of a ratio, with a tolerance in % of the paper's."""
    error = 100 * (ours / paper - 1)
    within = abs(error) <= tolerance
    return Score(what, paper, ours, "x", f"{tolerance:g} %", basis, error, within)


def exact(what: str, paper: float, ours: float, unit: Literal["%", "x"]) -> Score:
    """The score of a count, which must equal the paper's in all of the paper's digits."""
    digits = 0 if unit == "%" else 1
    error = ours - paper if unit == "%" else 100 * (ours / paper - 1)
    within = round(ours, digits) == paper
    return Score(what, paper, ours, unit, "its digits", "counted", error, within)


def holds(what: str, claim: bool, basis: Basis = OUT) -> Score:
    """The score of a claim of the paper without a number."""
    return Score(what, None, None, "", "the sign", basis, None, claim)


@dataclass(frozen=True)
class Row:
    """A line of a chart. ours, paper: series -> value."""

    name: str
    ours: dict[str, float]
    paper: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Dots:
    """Rows of points on one x axis: the paper's hollow, ours full."""

    rows: tuple[Row, ...]
    x_label: str
    digits: int = 2


@dataclass(frozen=True)
class Curves:
    """Lines: name -> (x, y).

    ticks: the ticks of a logarithmic x axis; (): the axis is linear. tabled: all lines have the
    same x, and the details are a table of them. digits: of the numbers in that table. spans: name
    -> (least, most) of each of a line's points, shown in the table and as an area.
    """

    series: dict[str, tuple[list[float], list[float]]]
    x_label: str
    y_label: str
    title: str = ""
    ticks: tuple[float, ...] = ()
    tabled: bool = False
    digits: int = 1
    spans: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def table(self) -> list[list[str]]:
        places = next(iter(self.series.values()))[0]
        rows = [
            [f"{x:g}", *(self._cell(name, n) for name in self.series)] for n, x in enumerate(places)
        ]
        return [[self.x_label, *self.series], *rows]

    def _cell(self, name: str, n: int) -> str:
        text = f"{self.series[name][1][n]:,.{self.digits}f}"
        if name not in self.spans:
            return text
        low, high = self.spans[name]
        return f"{text} ({low[n]:,.{self.digits}f} to {high[n]:,.{self.digits}f})"


@dataclass(frozen=True)
class Result:
    """One figure or table. number: of the paper's figure; None: the title says what it is. chart:
    what the page draws and the table of details lists. more: charts below it."""

    number: int | None
    title: str
    scores: tuple[Score, ...]
    chart: Dots | Curves
    notes: tuple[str, ...] = ()
    more: tuple[Curves, ...] = ()

    @property
    def heading(self) -> str:
        return self.title if self.number is None else f"Figure {self.number}: {self.title}"

    def details(self) -> list[list[str]]:
        """Our numbers of the chart as a table; [] for curves that are not `tabled`."""
        if isinstance(self.chart, Curves):
            return self.chart.table() if self.chart.tabled else []
        rows = [row for row in self.chart.rows if row.ours]
        names = list(dict.fromkeys(name for row in rows for name in row.ours))
        digits = self.chart.digits
        return [["", *names]] + [
            [row.name, *(f"{row.ours[n]:.{digits}f}" if n in row.ours else "-" for n in names)]
            for row in rows
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "figure": self.number, "title": self.title,
            "scores": [asdict(score) for score in self.scores],
            "notes": list(self.notes), "charts": [asdict(chart) for chart in self.charts],
        }  # fmt: skip

    @property
    def charts(self) -> tuple[Dots | Curves, ...]:
        return self.chart, *self.more
