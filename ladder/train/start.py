"""The initial weights of a run: random, or those of a model folder, possibly under another plan.

A plan decides when outputs reach the residual; no weight depends on that. So plans with the same
kinds of sublayers, whose norms read equal residuals at the same reads, store the same tensors: a
standard checkpoint also is one of a hybrid. Where ranks read residuals that differ (desync), each
has a norm weight of its own, which begins as a copy of the checkpoint's. Other plans (`parallel`:
one norm instead of two) need tensors that `ladder convert` makes, from a model whose norms are not
yet like that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.checkpoint import WEIGHTS, TensorReader, fill, newest, read_config, refuse_damage
from ladder.data.prepared import TokenData, check_tokenizer
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer, meta_model, tensor_shapes
from ladder.parallel.sharding import initialise
from ladder.train.config import TrainConfig
from ladder.train.conversion import Schedule, make_schedule

ONLY_LAGS = "choose a plan that changes only lags, such as hybrid"


@dataclass(frozen=True)
class Start:
    """The model to train, and the folder of its initial weights; None: random weights.

    stored: the config of that folder. copied: the names of norms whose stored weight is copied for
    each rank. first: the plan before any conversion. schedule: the plans from the first to the
    model's own.
    """

    config: ModelConfig
    folder: Path | None
    stored: ModelConfig
    copied: Collection[str]
    first: Plan
    schedule: Schedule

    def at(self, step: int) -> ModelConfig:
        """The model's config, with its plan, at step `step`."""
        return replace(self.config, plan=self.schedule.plan(step))

    def fill(self, model: Transformer, seed: int) -> None:
        """Load or draw the initial weights of a sharded model; each process reads its own slices.

        Raises UserError, on every rank, if they do not fit the model or are damaged.
        """
        if self.folder is None:
            initialise(model, seed)
        else:
            reader = TensorReader(self.folder, WEIGHTS)
            reader.check(meta_model(self.stored))
            refuse_damage(reader, "start from another checkpoint of the run")
            fill(model, reader, self.copied)


def starting_point(
    config: TrainConfig,
    data: TokenData,
    checkpoint: Path | None = None,
    first_plan: Any = None,
) -> Start:
    """The model of a recipe and its initial weights.

    checkpoint: the checkpoint from which this run resumes; `init` is then not read and may be gone.
    first_plan: the plan with which a resumed run began.

    Raises UserError if the recipe, the data or a plan do not fit the weights.
    """
    if not config.init:
        model = config.model_config(data.vocab_size)
        first = resolve_plan("standard", model.num_layers)
        schedule = _schedule(config, model, first)
        return Start(model, checkpoint, model, (), first, schedule)
    folder = checkpoint or newest(Path(config.init), "init=")
    stored = read_config(folder)
    model = stored
    if config.plan is not None or config.tp_degree is not None:
        plan = stored.plan if config.plan is None else config.plan
        model = replace(stored, plan=plan, tp_degree=config.tp_degree)
    config.check_model(model)
    copied = norms_per_rank(stored, model)
    check_same_tensors(stored, model, f"init={config.init}", copied)
    _check_vocabulary(config, model, data, folder)
    first = stored.plan if first_plan is None else resolve_plan(first_plan, model.num_layers)
    return Start(model, folder, stored, copied, first, _schedule(config, model, first))


def _schedule(config: TrainConfig, model: ModelConfig, first: Plan) -> Schedule:
    schedule = make_schedule(config.convert_layers, first, model, config.steps)
    seen = set()
    for _, plan in schedule.plans:
        stored = tuple(record.kind for record in plan.sublayers), tuple(plan.equal_reads)
        if stored not in seen:  # kinds and equal reads determine the tensors
            seen.add(stored)
            check_same_tensors(model, replace(model, plan=plan), "convert_layers", remedy=ONLY_LAGS)
    return schedule


def norms_per_rank(stored: ModelConfig, model: ModelConfig) -> list[str]:
    """The names of norms that have one weight in `stored`, and one for each rank in `model`."""
    before, after = tensor_shapes(stored), tensor_shapes(model)
    return [
        name
        for name, shape in after.items()
        if len(shape) == 2 and name in before and before[name] == shape[1:]
    ]


def check_same_tensors(
    stored: ModelConfig,
    model: ModelConfig,
    where: str,
    apart: Collection[str] = (),
    remedy: str | None = None,
) -> None:
    """Raise UserError unless both configs have the same tensors, except for those in `apart`.

    remedy: what the error says to do; None: to convert `stored`, if it can be converted.
    """
    before, after = tensor_shapes(stored), tensor_shapes(model)
    different = [n for n in {*before, *after} if before.get(n) != after.get(n) and n not in apart]
    if not different:
        return
    name = min(different)
    said = [str(list(found[name])) if name in found else "absent" for found in (before, after)]
    degrees = ""
    if None not in (degree := (stored.tp_degree, model.tp_degree)) and degree[0] != degree[1]:
        degrees = f"tp_degree={degree[0]} there, tp_degree={degree[1]} here; "
    if remedy is None and stored.has_usual_norms:
        remedy = f"convert it first, with `ladder convert`, or {ONLY_LAGS}"
    elif remedy is None:
        remedy = (
            "such a model cannot be converted; start from the model it was made from, or keep its "
            "plan (leave plan and tp_degree out)"
        )
    raise UserError(
        f"{where} has plan {stored.plan.name!r}, whose tensors are not those of plan="
        f"{model.plan.name!r} ({degrees}{name}: {said[0]} there, {said[1]} here); {remedy}"
    )


def _check_vocabulary(
    config: TrainConfig, model: ModelConfig, data: TokenData, folder: Path
) -> None:
    """Raise UserError if the data was tokenised with another vocabulary than the model's."""
    if data.vocab_size > model.vocab_size:
        raise UserError(
            f"data={config.data} has vocab_size={data.vocab_size}, above the {model.vocab_size} of "
            f"init={config.init}; prepare the data with --tokenizer {folder}"
        )
    check_tokenizer(data, folder, f"data={config.data}", f"init={config.init}")
