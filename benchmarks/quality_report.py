"""The tables of benchmarks/quality.py: runs grouped by plan, at equal tokens and equal time."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from quality_plans import PLANS, T

from ladder.models.errors import UserError

KEYS = ("plan", "seed", "tp_degree")  # they tell the runs of one recipe apart
# Keys of a recipe that change no training.
LOGGED = ("eval_interval", "log_interval", "checkpoint_interval", "keep_checkpoints")


def read(
    file: Path, keys: Sequence[str] = KEYS, script: str = "quality.py"
) -> list[dict[str, Any]]:
    """The records of a file that `script` wrote; of those with equal `keys` the newest."""
    return list({tuple(r[key] for key in keys): r for r in _lines(file, keys, script)}.values())


def read_all(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of several files; a repeated run counts twice, a copied line once.

    Raises UserError if they differ in recipe or data.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        for each in _lines(file, KEYS, "quality.py"):
            first = next(iter(found.values()), each)
            for key in ("recipe", "data"):
                if name := different(first[key], each[key]):
                    raise UserError(
                        f"{file} holds runs of another {key} than {files[0]}: {name} differs; "
                        f"give files of one"
                    )
            found[json.dumps(each, sort_keys=True)] = each
    return list(found.values())


def _lines(file: Path, keys: Sequence[str], script: str) -> list[dict[str, Any]]:
    if not file.is_file():
        raise UserError(f"no results at {file}; `{script} run` writes them")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            each = json.loads(line)
            _ = [each[key] for key in keys]
        except (ValueError, KeyError, TypeError) as error:
            wrong = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise UserError(
                f"line {number} of {file} is no record of {script} ({wrong}); remove the line, or "
                f"give a file that {script} wrote"
            ) from error
        found.append(each)
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first key that both have with different values; '' if there is none.

    Keys that only one has are of another version; those in LOGGED change no training. Both are
    ignored.
    """
    for key in one:
        if key in other and key not in LOGGED and one[key] != other[key]:
            nested = isinstance(one[key], dict) and isinstance(other[key], dict)
            if not nested:
                return key
            if inner := different(one[key], other[key]):
                return f"{key}.{inner}"
    return ""


COLUMNS = ("plan", "T", "seeds", "bits per byte", "spread", "less standard", "tokens/s", "MFU",
           "GiB", "wall s")  # fmt: skip
MEANING = """\
seeds: in brackets the runs, where a seed was run more than once. bits per byte: of all held-out
text, the mean over the runs. spread: the largest less the smallest of them. less standard: the mean
less that of standard, below 0 is better. T: of plans that depend on it, which train on one GPU as
that many virtual ranks. tokens/s, MFU: of training, medians. wall: a whole run, its start,
evaluation and checkpoint included."""


def label(record: dict[str, Any]) -> str:
    """The plan's name, with its T if that is not the usual one."""
    degree = record["tp_degree"]
    return record["plan"] if degree in (None, T) else f"{record['plan']} (T {degree})"


def by_plan(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The records by plan and T, in the order of PLANS, then others."""
    names = dict.fromkeys([*PLANS, *(label(record) for record in records)])
    found = {name: [r for r in records if label(r) == name] for name in names}
    return {name: members for name, members in found.items() if members}


def count(members: Sequence[dict[str, Any]]) -> str:
    """The number of seeds, and that of runs if it differs."""
    seeds, runs = len({record["seed"] for record in members}), len(members)
    return str(seeds) if seeds == runs else f"{seeds} ({runs} runs)"


def mean(members: Sequence[dict[str, Any]], key: str = "heldout_bits_per_byte") -> float:
    return statistics.fmean(record[key] for record in members)


def quality_cells(plan: str, groups: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Bits per byte, spread, difference from standard."""
    values = [record["heldout_bits_per_byte"] for record in groups[plan]]
    spread = f"{max(values) - min(values):.4f}" if len(values) > 1 else "-"
    less = "-"
    if "standard" in groups and plan != "standard":
        less = f"{mean(groups[plan]) - mean(groups['standard']):+.4f}"
    return [f"{mean(groups[plan]):.4f}", spread, less]


def rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each plan, under COLUMNS."""
    groups, found = by_plan(records), []
    for plan, members in groups.items():
        known = members[0]["mfu"] is not None, members[0]["memory_gib"] is not None
        found.append(
            [
                members[0]["plan"],
                str(members[0]["tp_degree"] or "-"),
                count(members),
                *quality_cells(plan, groups),
                f"{mean(members, 'tokens_per_second'):,.0f}",
                f"{100 * mean(members, 'mfu'):.0f}%" if known[0] else "-",
                f"{mean(members, 'memory_gib'):.0f}" if known[1] else "-",
                f"{mean(members, 'wall_s'):.0f}",
            ]
        )
    return found


def caption(records: Sequence[dict[str, Any]]) -> str:
    first = next(iter(by_plan(records).values()))[0]  # standard, if it was trained
    split, heldout = first["data"]["train"], first["data"]["heldout"]
    return (
        f"{first['recipe']['model']['name']}, {first['parameters']:,} parameters; "
        f"{first['tokens']:,} tokens, {first['tokens'] / split['tokens']:.2f} epochs of "
        f"{split['tokens']:,}; held out {heldout['tokens']:,} tokens, {heldout['bytes']:,} bytes"
    )


# ---- equal training time --------------------------------------------------------------------

TIMED = ("plan", "seeds", "training s", "of standard's", "bits per byte then", "less standard",
         "what it is")  # fmt: skip
TIMED_MEANING = """\
training s: tokens over the run's median tokens/s, without its start, evaluations and checkpoint.
bits per byte then: when standard's training ends, on average; between two evaluations, interpolated
in time. A run that ends earlier counts as it ended. The learning rate of a run that is cut there
has not fallen to its end: one planned for that time would be better. Plans of T train as virtual
ranks on one GPU, slower than on T GPUs: their time is not that of their training in parallel."""


def training_s(record: dict[str, Any]) -> float:
    return float(record["tokens"] / record["tokens_per_second"])


def bits_at(record: dict[str, Any], seconds: float) -> float | None:
    """Held-out bits per byte after so many seconds of training; None if not recorded."""
    if training_s(record) <= seconds:
        return float(record["heldout_bits_per_byte"])
    curve = record.get("heldout", [])
    if not curve:
        return None
    step_s = training_s(record) / curve[-1][0]  # the last evaluation is after the last step
    for (before, worse), (after, better) in pairwise(curve):
        if before * step_s <= seconds <= after * step_s:
            share = (seconds / step_s - before) / (after - before)
            return float(worse + share * (better - worse))
    return None


def timed_rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each plan, under TIMED; no rows without standard."""
    groups = by_plan(records)
    if "standard" not in groups:
        return []
    standard = groups["standard"]
    limit, reached = statistics.fmean(map(training_s, standard)), mean(standard)
    found = [["standard", count(standard), f"{limit:.0f}", "1.00", f"{reached:.4f}", "-", "ended"]]
    for name, members in groups.items():
        if name == "standard":
            continue
        seconds = statistics.fmean(map(training_s, members))
        row = [name, count(members), f"{seconds:.0f}", f"{seconds / limit:.2f}"]
        values = [bits_at(record, limit) for record in members]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            found.append([*row, "-", "-", "no curve recorded"])
            continue
        value = statistics.fmean(known)
        cut = sum(training_s(record) > limit for record in members)
        what = "ended" if not cut else f"{cut} of {len(members)} interpolated"
        found.append([*row, f"{value:.4f}", f"{value - reached:+.4f}", what])
    return found
