"""What a run starts from: random weights, or a model folder's, perhaps under another plan.

A plan says when outputs reach the stream, which no weight knows of. So plans whose sublayers have
the same kinds, and whose norms read equal streams in the same places, store the same tensors, and a
standard checkpoint is a hybrid's as it is. Other plans need tensors that the checkpoint lacks (a
norm's weight on each rank, one norm where there were two): those are for `ladder convert`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladder.checkpoint import WEIGHTS, TensorReader, fill, newest, read_config, refuse_damage
from ladder.data.batches import TokenData, check_tokenizer
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer, tensor_shapes
from ladder.parallel.sharding import initialise
from ladder.train.config import TrainConfig
from ladder.train.conversion import Schedule, make_schedule


@dataclass(frozen=True)
class Start:
    """The model to train, and the folder that its weights begin as; None: random ones.

    first: the plan before anything is converted. schedule: the plans up to the model's own.
    """

    config: ModelConfig
    folder: Path | None
    first: Plan
    schedule: Schedule

    def at(self, step: int) -> ModelConfig:
        """The model as step `step` trains it."""
        return replace(self.config, plan=self.schedule.plan(step))

    def fill(self, model: Transformer, seed: int) -> None:
        """Give a model that is placed its first weights; each process reads its own slices.

        Raises UserError, on every rank, where they do not fit or are not what was written.
        """
        if self.folder is None:
            initialise(model, seed)
        else:
            reader = TensorReader(self.folder, WEIGHTS)
            reader.check(model)
            refuse_damage(reader, "start from another checkpoint of the run")
            fill(model, reader)


def starting_point(
    config: TrainConfig,
    data: TokenData,
    checkpoint: Path | None = None,
    first_plan: Any = None,
) -> Start:
    """What a recipe's model is and starts from.

    checkpoint: of this run, where it goes on, with the plan that the run began with, as
    `first_plan`; then nothing else is asked, and `init` may be gone.

    Raises UserError where the recipe, the data or a plan do not fit the weights.
    """
    if not config.init:
        model = config.model_config(data.vocab_size)
        return _scheduled(config, model, checkpoint, resolve_plan("standard", model.num_layers))
    folder = checkpoint or newest(Path(config.init))
    stored = read_config(folder)
    model = stored
    if config.plan is not None or config.tp_degree is not None:
        plan = stored.plan if config.plan is None else config.plan
        model = replace(stored, plan=plan, tp_degree=config.tp_degree)
    config.check_model(model)
    check_same_tensors(stored, model, f"init={config.init}")
    _check_vocabulary(config, model, data, folder)
    first = stored.plan if first_plan is None else resolve_plan(first_plan, model.num_layers)
    return _scheduled(config, model, folder, first)


def _scheduled(config: TrainConfig, model: ModelConfig, folder: Path | None, first: Plan) -> Start:
    schedule = make_schedule(config.convert_layers, first, model, config.steps)
    seen = set()
    for _, plan in schedule.plans:
        stored = tuple(record.kind for record in plan.sublayers), tuple(plan.equal_reads)
        if stored not in seen:  # these alone decide which tensors there are
            seen.add(stored)
            check_same_tensors(model, replace(model, plan=plan), "convert_layers")
    return Start(model, folder, first, schedule)


def check_same_tensors(stored: ModelConfig, model: ModelConfig, where: str) -> None:
    """Raise UserError unless weights of `stored` are weights of `model` as they are."""
    before, after = tensor_shapes(stored), tensor_shapes(model)
    if before == after:
        return
    name = min(n for n in {*before, *after} if before.get(n) != after.get(n))
    said = [str(list(found[name])) if name in found else "absent" for found in (before, after)]
    raise UserError(
        f"{where} has plan {stored.plan.name!r}, whose tensors are not those of plan="
        f"{model.plan.name!r} ({name}: {said[0]} there, {said[1]} here); convert it first, with "
        f"`ladder convert`, or choose a plan that changes lags alone, such as hybrid"
    )


def _check_vocabulary(
    config: TrainConfig, model: ModelConfig, data: TokenData, folder: Path
) -> None:
    """The numbers of the data must mean to the model what they meant to its tokenizer."""
    if data.vocab_size > model.vocab_size:
        raise UserError(
            f"data={config.data} has vocab_size={data.vocab_size}, above the {model.vocab_size} of "
            f"init={config.init}; prepare the data with --tokenizer {folder}"
        )
    check_tokenizer(data, folder, f"data={config.data}", f"init={config.init}")
