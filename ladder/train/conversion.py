"""Progressive conversion: a model is converted to its plan layer by layer, while it trains.

The current plan is a function of the step, so that a run resumes exactly. A change of plan leaves
the weights as they are (see ladder.train.start) and changes what the layers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, check_keys, unknown
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan

ORDERS = ("last-first", "first-last")
FORMS = "{start_step: ..., every: ..., order: last-first}, or a list of {step: ..., plan: ...}"


@dataclass(frozen=True)
class Schedule:
    """Plans, each with the first step (from 0) at which it is used; the first plan's is 0."""

    plans: tuple[tuple[int, Plan], ...]

    def plan(self, step: int) -> Plan:
        """The plan at step `step`."""
        return next(plan for start, plan in reversed(self.plans) if start <= step)

    def notes(self) -> list[str]:
        """Lines about the schedule, to print before training."""
        return [f"plan {plan.name} from step {start + 1}" for start, plan in self.plans[1:]]


def listed_last(convert_layers: Any) -> Any:
    """The last plan of the list, which is the run's plan; None if `convert_layers` is no list."""
    if isinstance(convert_layers, list) and convert_layers:
        entry = convert_layers[-1]
        return entry.get("plan") if isinstance(entry, Mapping) else None
    return None


def make_schedule(convert_layers: Any, first: Plan, model: ModelConfig, steps: int) -> Schedule:
    """The schedule from plan `first` to the model's own, over a run of `steps` steps.

    convert_layers: None: no conversion. A mapping converts one layer after `start_step` steps, and
    another after every `every` steps. A list gives plans and the steps after which they start.

    Raises UserError for an invalid schedule, and for one that does not end within the run.
    """
    if convert_layers is None:
        return Schedule(((0, model.plan),))
    for plan in (first, model.plan):
        _refuse_ranks(plan)
    if isinstance(convert_layers, Mapping):
        plans = _by_layer(convert_layers, first, model)
    elif isinstance(convert_layers, list) and convert_layers:
        plans = _listed(convert_layers, first, model)
    else:
        raise UserError(f"convert_layers={convert_layers!r} must be {FORMS}")
    if plans[-1][0] >= steps:
        raise UserError(
            f"convert_layers ends with step {plans[-1][0]}, and the run with steps={steps}: the "
            f"last plan would never be trained; convert earlier, or train longer"
        )
    return Schedule(tuple(plans))


def _by_layer(spec: Mapping[str, Any], first: Plan, model: ModelConfig) -> list[tuple[int, Plan]]:
    check_keys("convert_layers", spec, ("start_step", "every", "order"))
    order = spec.get("order", ORDERS[0])
    if order not in ORDERS:
        raise unknown("order of convert_layers", order, ORDERS)
    start, every = _count(spec, "start_step", 0), _count(spec, "every", 1)
    last = model.plan
    before, after = _records(first), _records(last)
    todo = [layer for layer in range(model.num_layers) if before[layer] != after[layer]]
    if not todo:
        raise UserError(
            f"convert_layers: the run starts with plan {last.name!r}, and no layer is left to "
            f"convert; choose another plan, or leave convert_layers out"
        )
    if order == ORDERS[0]:
        todo.reverse()
    plans = [(0, first)]
    for n, layer in enumerate(todo):
        before[layer] = after[layer]
        done = n + 1 == len(todo)
        name = last.name if done else f"{last.name}, {n + 1} of {len(todo)} layers converted"
        records = tuple(record for each in before for record in each)
        plan = last if done else replace(first, sublayers=records, name=name)
        plans.append((start + n * every, plan))
    return plans


def _listed(entries: list[Any], first: Plan, model: ModelConfig) -> list[tuple[int, Plan]]:
    plans = [(0, first)]
    for n, entry in enumerate(entries, 1):
        where = f"entry {n} of convert_layers"
        if not isinstance(entry, Mapping) or "plan" not in entry:
            raise UserError(f"{where} is {entry!r}; convert_layers must be {FORMS}")
        check_keys(where, entry, ("step", "plan"))
        step = _count(entry, "step", 0, where)
        if n > 1 and step <= plans[-1][0]:
            raise UserError(f"step={step} of {where} must be above the one before")
        plans.append((step, resolve_plan(entry["plan"], model.num_layers)))
        _refuse_ranks(plans[-1][1])  # a plan's file may state its T
    if plans[-1][1].sublayers != model.plan.sublayers:
        raise UserError(
            f"convert_layers ends with plan {plans[-1][1].name!r} and not with plan="
            f"{model.plan.name!r}; leave plan out, or end with it"
        )
    plans[-1] = (plans[-1][0], model.plan)
    return plans


def _refuse_ranks(plan: Plan) -> None:
    if plan.depends_on_tp:
        raise UserError(
            f"convert_layers with plan {plan.name!r}, which depends on T: such a model cannot be "
            f"converted layer by layer; leave convert_layers out"
        )


def _count(spec: Mapping[str, Any], name: str, least: int, where: str = "convert_layers") -> int:
    value = spec.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={value!r} of {where} must be a whole number, {least} or more")
    return value


def _records(plan: Plan) -> list[list[Any]]:
    """The plan's records, layer by layer."""
    found: list[list[Any]] = [[] for _ in range(plan.num_layers)]
    for layer, record in zip(plan.layers, plan.sublayers, strict=True):
        found[layer].append(record)
    return found
