"""Report pages: self-contained HTML files, from the template report.html.j2.

A page has its finding in a sentence, a figure, tables, and the commands and machines of the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ladder.bench import figures

TEMPLATE = "report.html.j2"
RUNS = ("command", "hardware", "driver", "versions", "commit", "date", "measured rates")


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Heading:
    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Aside:
    """Preformatted text, folded behind a summary."""

    kind: ClassVar[str] = "aside"
    summary: str
    text: str


@dataclass(frozen=True)
class Link:
    """A link to another page, by a relative path. more: the text after it."""

    kind: ClassVar[str] = "link"
    path: str
    text: str
    more: str = ""


@dataclass(frozen=True)
class Table:
    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Figure:
    """A figure. svg: drawn by `ladder.bench.figures`."""

    kind: ClassVar[str] = "figure"
    svg: str
    caption: str = ""

    @property
    def drawing(self) -> Markup:
        return Markup(figures.inline(self.svg))


PagePart = Text | Heading | Code | Aside | Link | Table | Figure
NO_FIGURES = Text(f"No figures: {figures.NEEDED}.")


def page(
    title: str, finding: str, parts: Iterable[PagePart], machines: Iterable[Mapping[str, Any]] = ()
) -> str:
    """A complete HTML page of the parts, the figure first.

    finding: the result in a sentence. machines: the facts of its records.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(TEMPLATE).render(
        title=title, finding=finding, parts=list(parts), runs_head=RUNS, runs=runs(machines)
    )


def runs(machines: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """The rows under RUNS: one per command, machine and commit (see `ladder.records.facts`)."""
    found: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for facts in machines:
        own = (_hardware(facts), _of(facts, "driver"), _versions(facts), _of(facts, "commit"))
        known = found.setdefault((_command(facts), *own), {"date": {}, "rates": {}})
        known["date"][_of(facts, "date")] = None
        if rates := _rates(facts):
            known["rates"][rates] = None
    return [
        [*own, ", ".join(known["date"]), "; ".join(known["rates"]) or "-"]
        for own, known in found.items()
    ]


def _of(facts: Mapping[str, Any], key: str) -> str:
    return str(facts.get(key) or "-")


def _hardware(facts: Mapping[str, Any]) -> str:
    gpu = _of(facts, "gpu")
    number = facts.get("gpus") or facts.get("ranks")
    if gpu in ("-", "none"):
        return "CPU"
    return f"{number}x {gpu}" if number else gpu


def _versions(facts: Mapping[str, Any]) -> str:
    names = {"torch": "torch", "nccl": "NCCL", "python": "Python", "ladder": "ladder"}
    return ", ".join(f"{name} {facts[key]}" for key, name in names.items() if facts.get(key))


def _rates(facts: Mapping[str, Any]) -> str:
    """The rates that floors are computed from."""
    names = {
        "bandwidth_tb_s": "TB/s", "matrix_tflop_s": "TFLOP/s", "link_gb_s": "GB/s of the link",
    }  # fmt: skip
    return ", ".join(f"{facts[key]:g} {unit}" for key, unit in names.items() if facts.get(key))


def _command(facts: Mapping[str, Any]) -> str:
    """The command, after its NCCL_* environment variables."""
    environment = facts.get("environment") or {}
    return " ".join(
        [*(f"{key}={value}" for key, value in environment.items()), _of(facts, "command")]
    )
