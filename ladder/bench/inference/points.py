"""The points of `ladder bench inference`, and the option sets and suites that define them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ladder.checkpoint import model_hash, newest, quantised_as, read_config
from ladder.config import configs_folder, find, load_plan, load_yaml, model_config
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, check_keys, unknown
from ladder.models.presets import resolve_plan
from ladder.models.ranks import Ranks
from ladder.models.storage import QUANTISED
from ladder.parallel.choose import INFERENCE, REDUCERS
from ladder.parallel.refusals import fused_refusal, rounding_refusal
from ladder.plans import CHECKPOINT

SHAPE_PLANS = ("standard", "ladder", "none")
CHECKPOINT_PLANS = (CHECKPOINT, "standard", "none")


@dataclass(frozen=True)
class InferencePoint:
    """One configuration to measure.

    degree: T, for plans that depend on it (above tp: virtual ranks); 0 for others. no_comm: the
    plan without its reduces, for the difference to the plan: its exposed communication. weights:
    how matrices are stored, bf16 or a name in QUANTISED. activations: the type of inputs in the
    products of prompts, bf16 or fp8. cache: the type of keys and values, bf16 or fp8. Older records
    lack these three.
    """

    model: str
    plan: str
    reducer: str
    tp: int
    batch: int
    prompt: int
    new_tokens: int
    layers: int
    p2p: bool = True
    degree: int = 0
    no_comm: bool = False
    weights: str = "bf16"
    activations: str = "bf16"
    cache: str = "bf16"

    @property
    def case(self) -> InferencePoint:
        """The fields that comparable points share; the others are empty."""
        return replace(self, plan="", reducer="", degree=0, no_comm=False)

    @property
    def plan_name(self) -> str:
        """The plan, with T if it has virtual ranks, since another T computes another function."""
        return self.plan + (f" (T {self.degree})" if self.degree > self.tp else "")

    def __str__(self) -> str:
        plan = f"{self.plan} no_comm" if self.no_comm else self.plan
        virtual = f" of T {self.degree}" if self.degree > self.tp else ""
        return f"{plan}{virtual}, reducer {self.reducer}, {describe_case(self)}"


def describe_case(case: InferencePoint) -> str:
    """A case as text."""
    sizes = f"TP {case.tp}, batch {case.batch}"
    return f"{case.model}, {case.layers} layers, {sizes}, {describe_kind(case)}"


def describe_kind(case: InferencePoint) -> str:
    """The tokens, P2P and formats of a case as text."""
    return (
        f"prompt {case.prompt}, {case.new_tokens} new tokens{'' if case.p2p else ', P2P off'}"
        f"{'' if case.weights == 'bf16' else f', {case.weights} weights'}"
        f"{'' if case.activations == 'bf16' else f', {case.activations} activations'}"
        f"{'' if case.cache == 'bf16' else f', {case.cache} cache'}"
    )


def cache_kind(point: InferencePoint) -> str:
    """The type of a point's cache, as the engine's argument."""
    return "auto" if point.cache == "bf16" else point.cache


@dataclass(frozen=True)
class Settings:
    """An option set; every combination of its plans, reducers, tp, batch and p2p is a point.

    plans: () for SHAPE_PLANS, or CHECKPOINT_PLANS. tp: () for all ranks. layers: 0 for all.
    tp_degree: T of the plans that depend on it; 0: tp.
    """

    model: str = "llama-3-8b"
    layers: int = 0
    plans: tuple[str, ...] = ()
    reducers: tuple[str, ...] = ("push", "async")
    tp: tuple[int, ...] = ()
    tp_degree: int = 0
    batch: tuple[int, ...] = (1,)
    prompt: int = 1024
    new_tokens: int = 512
    p2p: tuple[bool, ...] = (True,)
    weights: str = "bf16"
    activations: str = "bf16"
    cache: str = "bf16"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> Settings:
        """An option set from options or from a suite; single values may replace lists of one."""
        check_keys(where or "the benchmark", data, [item.name for item in fields(cls)])
        values = {}
        for item in fields(cls):
            if item.name in data:
                value = data[item.name]
                if isinstance(item.default, tuple):
                    value = tuple(value) if isinstance(value, list | tuple) else (value,)
                    value = tuple(dict.fromkeys(value))
                values[item.name] = value
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}" if where else str(error)) from error

    def __post_init__(self) -> None:
        least = {"layers": 0, "tp_degree": 0, "tp": 1, "batch": 1, "prompt": 1, "new_tokens": 2}
        for name, lowest in least.items():
            for each in _values(getattr(self, name)):
                if not isinstance(each, int) or isinstance(each, bool) or each < lowest:
                    raise UserError(f"{_option(name)}={each!r} must be {lowest} or more")
        for name in ("model", "plans", "reducers"):
            for each in _values(getattr(self, name)):
                if not isinstance(each, str):
                    raise UserError(f"{_option(name)}={each!r} must be a name")
        if self.weights not in ("bf16", *QUANTISED):
            raise unknown("type of --weights", self.weights, ("bf16", *QUANTISED))
        for name in ("activations", "cache"):
            if getattr(self, name) not in ("bf16", "fp8"):
                raise unknown(f"type of --{name}", getattr(self, name), ("bf16", "fp8"))
        if self.activations == "fp8" and self.weights != "fp8":
            raise UserError(
                f"--activations=fp8 with --weights={self.weights}: products in fp8 need --weights "
                f"fp8; give that, or leave --activations out"
            )
        for name in ("reducers", "batch", "p2p"):
            if not getattr(self, name):
                raise UserError(f"{_option(name)} is empty; give at least one")
        for reducer in self.reducers:
            if reducer not in INFERENCE:
                raise unknown(f"reducer of {_option('reducers')}", reducer, INFERENCE)
        for p2p in self.p2p:
            if not isinstance(p2p, bool):
                raise UserError(f"--p2p={p2p!r} must be on or off")
        self._check_model()

    def _check_model(self) -> None:
        """Raise UserError unless the model supports the layers, the context and the plans."""
        whole = load_shape(self.model)
        stored = quantised_as(newest(Path(self.model))) if is_folder(self.model) else None
        if stored not in (None, self.weights):
            raise UserError(
                f"--weights={self.weights}: {self.model} holds {stored} weights; give --weights "
                f"{stored}, or the folder that it was converted from"
            )
        if self.layers > whole.num_layers:
            raise UserError(
                f"--layers={self.layers}: {self.model} has {whole.num_layers} layers; give fewer, "
                f"or 0 for all"
            )
        total = self.prompt + self.new_tokens
        if total > whole.max_seq_len:
            raise UserError(
                f"--prompt={self.prompt} and --new-tokens={self.new_tokens} make {total} tokens, "
                f"above the context of {self.model}, {whole.max_seq_len}; lower them"
            )
        for plan in self.chosen_plans:
            if plan != CHECKPOINT:
                layers = self.layers or whole.num_layers
                resolve_plan(load_plan(plan), layers, self.tp_degree or 2)
            elif self.layers or not is_folder(self.model):
                raise UserError(
                    f"--plans {CHECKPOINT}, the plan and weights of a folder, needs --model=FOLDER "
                    f"and no --layers"
                )
        for tp in self.tp:
            whole.check_divides(tp, "--tp")

    @property
    def chosen_plans(self) -> tuple[str, ...]:
        default = CHECKPOINT_PLANS if is_folder(self.model) and not self.layers else SHAPE_PLANS
        return self.plans or default


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_folder(model: str) -> bool:
    """Whether `--model` is a checkpoint's folder; the name of a shape takes precedence."""
    return not (configs_folder() / "models" / f"{model}.yaml").is_file() and Path(model).is_dir()


def load_shape(model: str, layers: int = 0) -> ModelConfig:
    """The shape of a named model or of a checkpoint, with the plan `standard`."""
    if is_folder(model):
        config = read_config(newest(Path(model)), quantised=True)
        layers = layers or config.num_layers
        return replace(config, plan="standard", tp_degree=None, num_layers=layers)  # type: ignore[arg-type]
    return _named_shape(model, layers)


@functools.cache
def _named_shape(model: str, layers: int) -> ModelConfig:
    return model_config({"name": model, **({"num_layers": layers} if layers else {})})


def resolve(point: InferencePoint) -> ModelConfig:
    """The config of a point. Raises UserError if there is no such model."""
    if point.plan == CHECKPOINT:
        config = read_config(newest(Path(point.model)), quantised=True)
        plan, degree = config.plan, config.tp_degree or point.tp
    else:
        config = load_shape(point.model, point.layers)
        degree = point.degree or point.tp
        plan = resolve_plan(load_plan(point.plan), config.num_layers, degree)
    if point.no_comm:
        plan = plan.as_no_comm()
    config.check_divides(point.tp, "--tp")
    return replace(config, plan=plan, tp_degree=degree if plan.depends_on_tp else None)


def definition(point: InferencePoint) -> str:
    """A hash of what a point's names stand for now: a shape and a plan, or a folder's model."""
    model = model_hash(newest(Path(point.model))) if is_folder(point.model) else ""
    usual = {item.name: item.default for item in fields(ModelConfig)}  # others may come
    shape = {key: value for key, value in resolve(point).to_dict().items() if value != usual[key]}
    content = json.dumps([shape, model])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def counterpart(point: InferencePoint, reducer: str) -> InferencePoint | None:
    """The point with the same computation and no communication; None if `point` is one.

    For plans with the records of `standard` it is `none`. reducer: the one that is still used for
    the embedding and the head.
    """
    config = resolve(point)
    if point.tp == 1 or config.plan.no_comm:
        return None
    bare = replace(point, plan="none", reducer=reducer, degree=0)
    records = config.plan.as_no_comm().sublayers
    if point.degree in (0, point.tp) and records == resolve(bare).plan.sublayers:
        return bare
    return replace(point, reducer=reducer, no_comm=True)


def expand(
    settings: Sequence[Settings],
    ranks: int,
    p2p: bool,
    refusal: Callable[[str, int], str | None],
    asked: bool = False,
) -> tuple[list[list[InferencePoint]], list[str]]:
    """The cases, whose points are measured side by side, and lines about what is left out.

    refusal: the reason why a reducer cannot run at a TP degree, or None. asked: the options come
    from the user and not from a suite; then raises UserError if no point is left.
    """
    cases: dict[InferencePoint, dict[InferencePoint, None]] = {}
    left_out: dict[str, None] = {}
    for each in settings:
        if p2p not in each.p2p:
            continue
        for tp in each.tp or (ranks,):
            if ranks % tp:
                left_out[f"{each.model} at TP {tp}: there are {ranks} ranks"] = None
                continue
            # One process has nothing to reduce, so all reducers are the same.
            usable = ["async"] if tp == 1 else list(each.reducers)
            for reducer in list(usable):
                if tp > 1 and (why := refusal(reducer, tp)):
                    left_out[f"reducer {reducer} at TP {tp}: {why}"] = None
                    usable.remove(reducer)
            for batch in each.batch if usable else ():
                for point in _points(each, tp, batch, p2p, usable, left_out):
                    cases.setdefault(point.case, {})[point] = None
    if asked and left_out and not cases:
        raise UserError(
            f"nothing is left to measure with --p2p {'on' if p2p else 'off'}: "
            f"{'; '.join(left_out)}; choose options that can run here"
        )
    return [list(points) for points in cases.values()], list(left_out)


def refuse_degree(each: Settings, ranks: int) -> None:
    """Raise UserError if a TP degree does not divide the T of a plan."""
    for tp in each.tp or (ranks,):
        for plan in each.chosen_plans:
            if plan != CHECKPOINT and _degree(each, _point(each, plan, tp)) % tp:
                raise UserError(
                    f"--tp-degree={each.tp_degree} of plan {plan!r} cannot run at TP {tp}, which "
                    f"does not divide it; give a multiple of {tp}, or another --tp"
                )


def _point(each: Settings, plan: str, tp: int) -> InferencePoint:
    """A point of an option set, with the first batch size and reducer."""
    layers = load_shape(each.model, each.layers).num_layers
    return InferencePoint(
        each.model, plan, each.reducers[0], tp, each.batch[0], each.prompt, each.new_tokens,
        layers, weights=each.weights, activations=each.activations,
        cache=each.cache,
    )  # fmt: skip


def _degree(each: Settings, point: InferencePoint) -> int:
    """The T of a point's plan; 0 if the plan does not depend on T, or T is the TP degree."""
    if point.plan == CHECKPOINT:
        return read_config(newest(Path(each.model)), quantised=True).tp_degree or 0
    plan = resolve(point).plan
    return each.tp_degree if plan.depends_on_tp and not plan.no_comm else 0


def _points(
    each: Settings, tp: int, batch: int, p2p: bool, usable: list[str], left_out: dict[str, None]
) -> list[InferencePoint]:
    """The points of one case, each plan followed by its counterpart."""
    found: list[InferencePoint] = []
    for plan in each.chosen_plans:
        point = replace(_point(each, plan, tp), reducer=usable[0], batch=batch, p2p=p2p)
        degree = _degree(each, point)
        if degree % tp:
            left_out[f"{plan} at TP {tp}: it does not divide tp_degree={degree}"] = None
            continue
        point = replace(point, degree=degree)
        resolved = resolve(point).plan
        mine = usable[:1] if resolved.no_comm else list(usable)
        if "fused" in mine and not resolved.no_comm:
            degree = max(degree, tp)
            why = fused_refusal(resolved, Ranks(degree, 0, degree // tp))
            if each.weights != "bf16":
                why = f"its products take no {each.weights} weights"
            if why:
                left_out[f"{plan} at TP {tp}, reducer fused: {why}"] = None
                mine.remove("fused")
        why = None if resolved.no_comm else rounding_refusal(resolved)
        for reducer in [each for each in mine if why and REDUCERS[each].rounds]:
            left_out[f"{plan} at TP {tp}, reducer {reducer}: {why}"] = None
            mine.remove(reducer)
        if not mine:
            continue
        found += [replace(point, reducer=r) for r in mine]
        bare = counterpart(point, usable[0])
        found += [bare] if bare is not None and bare not in found else []
    return list(dict.fromkeys(found))


def load_option_sets(name: str, overrides: Mapping[str, Any] | None = None) -> list[Settings]:
    """The option sets of a suite from configs/bench (or of a YAML file).

    overrides: options that replace those of every set.
    """
    path = find("bench", name)
    data = load_yaml(path)
    if not isinstance(data, list) or not data or not all(isinstance(each, dict) for each in data):
        raise UserError(f"{path} must hold a list of option sets, as `- {{model: llama-3-8b}}`")
    return [
        Settings.from_dict({**each, **(overrides or {})}, f"set {i} of suite {name!r}")
        for i, each in enumerate(data, start=1)
    ]
