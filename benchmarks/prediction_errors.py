"""Write ladder/perf/planner/errors.json: `python benchmarks/prediction_errors.py`.

For recorded passes to which nothing was fitted, the file has the predicted microseconds, the ratio
measured / predicted, and the tokens of the longest sequence. `ladder predict` makes its intervals
from it: write it again when predictions change.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ladder.perf.machine_files import load
from ladder.perf.planner.intervals import FILE, training_way
from ladder.perf.prediction.command import where
from ladder.perf.prediction.records import MEASURED, scores

MACHINES = "h200x4", "h100x2"  # and those of fewer of their GPUs
RESULTS = Path(__file__).parent / "results"
# Records of machines with shipped files, without settings that are no longer built.
NAMES = (
    "inference", "figures", "frame-after", "frame-after-2b", "p2p-off", "quality-latency", "table1",
    "half-8b", "accumulate", "rare-reduces-half-8b", "train-ahead", "train-8b-again", "train",
    "train-compiled", "quarter-8b", "heads", "decode", "train-virtual", "eight-bits-few-rows",
    "int8", "inference-fused", "inference-64", "inference-again", "fp8-again", "train-again",
    "inference-beside", "fp8-beside", "fp8-landings", "inference-keys", "inference-keys-64",
    "table1-8b", "train-8b", "fp8-halves", "2b-class", "70b", "fp8-half-8b", "fp8-one-half-8b",
    "inference-apart", "fp8-apart", "2b-class-apart", "70b-apart", "table1-apart", "plans-apart",
    "nccl-apart", "prompts-auto", "train-backward", "fp8", "train-operators", "inference-cuts",
    "fp8-cuts", "2b-class-cuts", "half-8b-cuts",
)  # fmt: skip
# Left out. The second has operators that were not in the table then, and are now. The third is used
# for fitting.
OLDER = (
    "2026-11-21-train-h200x4.jsonl", "2026-11-26-train-h100x2.jsonl", "2026-11-26-fp8-h100.jsonl",
)  # fmt: skip
LEAST_TOKENS = 16  # fewest new tokens of a decode record; the first are slower than the rest


def files() -> list[Path]:
    pattern = "2026-11-2[1-9]-{}-h[12]00*.jsonl"
    found = [path for name in NAMES for path in RESULTS.glob(pattern.format(name))]
    return sorted(path for path in found if path.name not in OLDER)


def entries(phases: Iterable[str] = MEASURED) -> list[dict[str, Any]]:
    found: dict[tuple[str, int, str, str, str, bool], list[list[float]]] = {}
    longest: dict[tuple[str, int, str, str, str, bool], int] = {}
    for machine, phase in itertools.product(map(load, MACHINES), phases):
        for each in scores(files(), machine, phase):
            short = phase == "decode" and each.point.new_tokens < LEAST_TOKENS
            if not each.calibrated and not short:
                gpus, way = where(each)
                if phase == "train":
                    way = training_way(way, each.point.virtual)
                key = machine.gpu, gpus, phase, way, each.point.model, each.era == "older"
                ratio = each.measured / each.predicted
                found.setdefault(key, []).append([round(1e3 * each.predicted, 1), round(ratio, 3)])
                tokens = each.point.seq_len if phase == "train" else each.point.prompt
                longest[key] = max(tokens, longest.get(key, 0))
    return [
        {"gpu": gpu, "gpus": gpus, "phase": phase, "way": way, "model": model,
         "tokens": longest[gpu, gpus, phase, way, model, older], "points": sorted(points)}
        | ({"older": True} if older else {})
        for (gpu, gpus, phase, way, model, older), points in sorted(found.items())
    ]  # fmt: skip


def main() -> None:
    made = {
        "what": "predicted us, measured / predicted of recorded passes; nothing was fitted to them",
        "files": [path.name for path in files()],
    }
    lines = ",\n".join(f"  {json.dumps(each)}" for each in entries())
    head = json.dumps(made, indent=1).removesuffix("\n}")
    FILE.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    print(FILE)


if __name__ == "__main__":
    main()
