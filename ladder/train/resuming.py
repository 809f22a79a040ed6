"""What a resumed run may change of its recipe, and what it must not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.presets import layers_named, resolve_plan, stated_degree
from ladder.train.config import DISTILLING, TrainConfig

# Keys that may change when a run resumes, since they do not change what is computed. The layout (tp
# and the keys after it) changes only rounding; data is compared by content, model by its shape. For
# init and teacher see ladder.train.run.
FREE_ON_RESUME = (
    "log_interval",
    "eval_interval",
    "checkpoint_interval",
    "keep_checkpoints",
    "tensorboard",
    "wandb",
    "out",
    "tp",
    "dp_shard",
    "sequence_parallel",
    "reducer",
    "micro_batch_size",
    "activation_checkpointing",
    "compile",
    "data",
    "model",
)
LENGTH = ("steps", "epochs")  # the keys that set the length of a run


def as_started(old: Mapping[str, Any], new: TrainConfig, model: ModelConfig) -> TrainConfig:
    """`new` for a resumed run; without its plan, if that is the one that the run took from `init`.

    The plan and tp_degree are then None, as in `old`. model: the model of the run.
    """
    kept = old.get("init") and old.get("plan") is None and old.get("tp_degree") is None
    if not kept or new.plan is None:
        return new
    named = replace(model, plan=new.plan, tp_degree=new.tp_degree)
    return replace(new, plan=None, tp_degree=None) if named.same(model) else new


def refuse_changes(
    old: Mapping[str, Any], new: TrainConfig, run: Path, moved: Collection[str] = ()
) -> None:
    """Raise UserError if a resumed run's config would change what is computed.

    The length is left to `refuse_length`. An option that `old` lacks, since it is newer than the
    run, counts as having had its default. moved: options whose folder may have another path now.
    """
    current = new.to_dict()
    for item in fields(TrainConfig):
        name = item.name
        before = old.get(name, item.default)
        if name == "plan" and _same_plan(
            before, current[name], old.get("tp_degree"), new.tp_degree
        ):
            continue
        if name == "tp_degree" and (
            _degree(before, old.get("plan")) == _degree(current[name], current["plan"])
        ):
            continue
        if name == "convert_layers" and _unnamed(before) == _unnamed(current[name]):
            continue  # the same plans, in files of other names
        if name in (*FREE_ON_RESUME, *LENGTH) or (name in moved and before and current[name]):
            continue
        if name in DISTILLING and not (old.get("teacher") or new.teacher):
            continue  # ignored by the old run, and refused now
        if before != current[name]:
            raise differs(name, current[name], before, run)


def _degree(tp_degree: int | None, plan: Any) -> int | None:
    """T as given, or as the plan's file states it."""
    return stated_degree(plan) if tp_degree is None else tp_degree


def _same_plan(one: Any, other: Any, tp_degree: int | None, other_degree: int | None) -> bool:
    """Whether two specifications are of one plan: the same records, whatever their form and name.

    Presets, which are of any number of layers, are compared in that of the other specification.
    """
    if _unnamed(one) == _unnamed(other):
        return True
    layers = layers_named(one) or layers_named(other)
    if layers is None:
        return False
    try:
        found = [resolve_plan(*each) for each in
                 ((one, layers, tp_degree), (other, layers, other_degree))]  # fmt: skip
    except UserError:  # whoever trains with it will say why
        return False
    return found[0].sublayers == found[1].sublayers


def _unnamed(value: Any) -> Any:
    """A plan's specification, or a schedule of plans, without the names that files give plans."""
    if isinstance(value, list):
        return [
            {**each, "plan": _unnamed(each["plan"])}
            if isinstance(each, Mapping) and "plan" in each
            else each
            for each in value
        ]
    if not isinstance(value, Mapping):
        return value
    return {key: each for key, each in value.items() if key != "name"}


def refuse_length(old: Mapping[str, Any], new: TrainConfig, epochs: float, run: Path) -> None:
    """Raise UserError if a resumed run would have another number of steps.

    To be called after `refuse_changes`, which compares what determines the steps of an epoch.
    epochs: the epochs from which `new.steps` was computed; 0: `steps` was given.
    """
    before = old.get("steps", TrainConfig.steps)
    if before == new.steps:
        return
    if epochs:
        raise UserError(
            f"epochs={epochs:g} makes steps={new.steps}, but the run in {run} was started with "
            f"steps={before}; resume with steps={before} in place of epochs, or start a new run "
            f"with another out"
        )
    raise differs("steps", new.steps, before, run)


def _brief(value: Any) -> str:
    """A value in an error: of a plan's records, its name."""
    if isinstance(value, Mapping):
        return str(value.get("name", "{...}"))
    return "null" if value is None else "[...]" if isinstance(value, list) else repr(value)


def differs(name: str, now: Any, before: Any, run: Path) -> UserError:
    """The error for an option that must stay as it was when the run in `run` was started."""
    now, before = map(_brief, (now, before))
    changed = f"{name}={now} differs from the run in {run}, which was started with {name}={before}"
    remedy = "resume with that"
    if now == before:
        changed = f"{name}={now} is not what it was when the run in {run} was started"
        remedy = f"resume with what the run keeps: ladder train {run}/recipe.json --resume"
    return UserError(f"{changed}; {remedy}, or start a new run with another out")
