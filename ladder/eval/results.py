"""What an evaluation found, side by side: a table, JSON, Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Metrics that are a function of (sum of nats) / (sum of bytes or words).
RATIOS = {"bits_per_byte": 1 / math.log(2), "byte_perplexity": None, "word_perplexity": None}


@dataclass(frozen=True)
class Metric:
    """One figure of a task. stderr: its standard error; None where there is no estimate.

    higher_is_better: None where the task does not say. examples: how many it was computed from.
    """

    task: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    examples: int

    def __str__(self) -> str:
        error = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        return f"{self.value:.4f}{error}"


def metrics(results: Mapping[str, Any]) -> list[Metric]:
    """The figures of all tasks and groups in what the harness's `evaluate` returned."""
    found = []
    for task, values in results["results"].items():
        for key, value in values.items():
            name, comma, kind = key.partition(",")
            if not comma or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{name}_stderr,{kind}")
            if not isinstance(stderr, int | float):
                samples = results.get("samples", {}).get(task, [])
                pairs = [each[name] for each in samples if name in each and each["filter"] == kind]
                stderr = ratio_stderr(name, pairs)
            found.append(
                Metric(
                    task=task,
                    num_fewshot=int(results["n-shot"].get(task) or 0),
                    metric=name if kind == "none" else f"{name} ({kind})",
                    value=float(value),
                    stderr=None if stderr is None else float(stderr),
                    higher_is_better=results["higher_is_better"].get(task, {}).get(name),
                    examples=int(values.get("sample_len") or 0),
                )
            )
    return found


def ratio_stderr(name: str, pairs: Sequence[Any]) -> float | None:
    """The standard error of a metric in RATIOS over documents; the harness has none.

    pairs: (nats, bytes or words) of each document. That of a ratio of sums, by linearisation:
    sqrt(n / (n - 1) sum (x_i - r w_i)^2) / sum w_i; a perplexity's is multiplied by its slope.
    """
    if name not in RATIOS or len(pairs) < 2:
        return None
    total = sum(weight for _, weight in pairs)
    ratio = sum(nats for nats, _ in pairs) / total
    squares = sum((nats - ratio * weight) ** 2 for nats, weight in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / total
    factor = RATIOS[name]
    return error * (math.exp(-ratio) if factor is None else factor)


def shown(found: Sequence[Metric], groups: Mapping[str, Sequence[str]]) -> list[Metric]:
    """Without the parts of a group that has figures of its own (57 subjects, say)."""
    whole = {each.task for each in found}
    hidden: set[str] = set()

    def hide(group: str) -> None:
        for child in groups.get(group, ()):
            hidden.add(child)
            hide(child)

    for group in groups:
        if group in whole:
            hide(group)
    return [each for each in found if each.task not in hidden]


def table(columns: Mapping[str, Sequence[Metric]]) -> list[list[str]]:
    """Cells: a head, then a line for each task and metric with every model's value."""
    rows = [["task", "shots", "metric", *columns]]
    cells = {
        name: {(each.task, each.metric): str(each) for each in found}
        for name, found in columns.items()
    }
    for each in next(iter(columns.values())):
        arrow = {True: " ↑", False: " ↓", None: ""}[each.higher_is_better]
        values = [cells[name].get((each.task, each.metric), "-") for name in columns]
        rows.append([each.task, str(each.num_fewshot), each.metric + arrow, *values])
    return rows


def markdown(rows: Sequence[Sequence[str]], facts: Mapping[str, Any]) -> str:
    """A page with the table, and beneath it what it was measured with."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    said = [f"- {key}: {value}" for key, value in facts.items() if value is not None]
    note = "± is one standard error; ↑ higher is better, ↓ lower."
    return "\n".join(["# Evaluation", "", *lines, "", note, "", *said, ""])


def plain(columns: Mapping[str, Sequence[Metric]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(each) for each in found] for name, found in columns.items()}
