"""The results of an evaluation as a table, JSON and Markdown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ladder.files import write_text

# Metrics that are a function of (sum of nats) / (sum of bytes or words).
RATIOS = {"bits_per_byte": 1 / math.log(2), "byte_perplexity": None, "word_perplexity": None}


SAMPLES = "samples_*.jsonl"  # in --out; * is the task


@dataclass(frozen=True)
class Metric:
    """One figure of a task.

    num_fewshot: None for a group whose tasks differ in it. stderr: its standard error; None if
    there is no estimate. higher_is_better: None if the task does not say. examples: the number of
    examples.
    """

    task: str
    num_fewshot: int | None
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    examples: int

    def __str__(self) -> str:
        error = "" if self.stderr is None else f" ± {self.stderr:.4f}"
        return f"{self.value:.4f}{error}"


def metrics(results: Mapping[str, Any]) -> list[Metric]:
    """The figures of all tasks and groups in the results of the harness's `evaluate`."""
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
                    num_fewshot=results["n-shot"].get(task),
                    metric=name if kind == "none" else f"{name} ({kind})",
                    value=float(value),
                    stderr=None if stderr is None else float(stderr),
                    higher_is_better=results["higher_is_better"].get(task, {}).get(name),
                    examples=int(values.get("sample_len") or 0),
                )
            )
    return found


def ratio_stderr(name: str, pairs: Sequence[Any]) -> float | None:
    """The standard error of a metric in RATIOS over documents, which the harness does not compute.

    pairs: (nats, bytes or words) of each document. The error of a ratio of sums, linearised, is
    sqrt(n / (n - 1) sum (x_i - r w_i)^2) / sum w_i; that of a perplexity is multiplied by its
    slope.
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
    """The metrics to show: without those that a group reports for all its members."""
    reported: dict[str, set[str]] = {}
    for each in found:
        reported.setdefault(each.task, set()).add(each.metric)
    hidden: set[tuple[str, str]] = set()

    def hide(group: str, names: Iterable[str]) -> None:
        for child in groups.get(group, ()):
            hidden.update((child, name) for name in names)
            hide(child, names)

    for group in groups:
        hide(group, reported.get(group, ()))
    return [each for each in found if (each.task, each.metric) not in hidden]


def table(columns: Mapping[str, Sequence[Metric]]) -> list[list[str]]:
    """The cells of a table: a head, then a row per task and metric with every model's value."""
    rows = [["task", "shots", "metric", *columns]]
    cells = {
        name: {(each.task, each.metric): str(each) for each in found}
        for name, found in columns.items()
    }
    for each in next(iter(columns.values())):
        arrow = {True: " ↑", False: " ↓", None: ""}[each.higher_is_better]
        values = [cells[name].get((each.task, each.metric), "-") for name in columns]
        shots = "-" if each.num_fewshot is None else str(each.num_fewshot)
        rows.append([each.task, shots, each.metric + arrow, *values])
    return rows


def markdown(rows: Sequence[Sequence[str]], facts: Mapping[str, Any]) -> str:
    """A page with the table, and below it the facts of the measurement."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    said = [f"- {key}: {value}" for key, value in facts.items() if value is not None]
    note = "± is one standard error; ↑ higher is better, ↓ lower."
    return "\n".join(["# Evaluation", "", *lines, "", note, "", *said, ""])


def plain(columns: Mapping[str, Sequence[Metric]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(each) for each in found] for name, found in columns.items()}


def remove_samples(out: Path) -> None:
    """Remove the files of `write_samples` in `out`, and no others of such names."""
    for file in out.glob(SAMPLES):
        with file.open("rb") as lines:
            try:
                first = json.loads(lines.readline())
            except ValueError:
                continue
        if isinstance(first, dict) and [*first][:2] == ["model", "task"]:
            file.unlink()


def write_samples(out: Path, samples: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
    """Write samples_TASK.jsonl in `out`: the harness's record of each example, for each model.

    samples: the records by model and task. A file appears complete or not at all.
    """
    from lm_eval.utils import handle_non_serializable

    lines: dict[str, list[str]] = {}
    for model, tasks in samples.items():
        for task, records in tasks.items():
            for record in records:
                line = {"model": model, "task": task, **record}
                text = json.dumps(line, default=handle_non_serializable, ensure_ascii=False)
                lines.setdefault(task, []).append(text + "\n")
    for task, texts in lines.items():
        write_text(out / SAMPLES.replace("*", re.sub(r"[^\w.-]", "-", task)), "".join(texts))
