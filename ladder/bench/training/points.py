"""The layouts and points of `ladder bench train`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ladder.config import load_plan, model_config
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.presets import resolve_plan
from ladder.train.config import TrainConfig

LAYOUTS = "ddp, fsdp, hsdpN (replicas of N shards), tpN, tpN+sp, tpN+sp+fused; tpN also with +fsdp"


@dataclass(frozen=True)
class Layout:
    """A layout of the model over ranks: tp and dp_shard as in `make_mesh`, sequence parallelism,
    and the reducer of the recipe."""

    name: str
    tp: int = 1
    dp_shard: int = 1
    sequence_parallel: bool = False
    reducer: str = "auto"

    def data_parallel(self, gpus: int) -> tuple[int, int]:
        """The replicas of a TP group over so many GPUs, and the shards of each parameter.

        Raises UserError for a layout that they cannot have.
        """
        if gpus % self.tp:
            raise UserError(f"--layouts {self.name}: {self.tp} does not divide the {gpus} GPUs")
        replicas = gpus // self.tp
        shards = self.dp_shard or replicas
        if replicas % shards:
            raise UserError(
                f"--layouts {self.name}: {shards} shards do not divide {replicas} replicas"
            )
        return replicas, shards


def parse_layout(text: str) -> Layout:
    """The layout of a name such as `tp4+sp+fsdp`. Raises UserError for an unknown one."""
    fields: dict[str, Any] = {}
    for part in text.split("+"):
        kind = part.rstrip("0123456789")
        number = int(part[len(kind) :] or 0)
        if kind == "tp" and number:
            fields["tp"] = number
        elif kind == "sp" and part == kind:
            fields["sequence_parallel"] = True
            fields.setdefault("reducer", "sequence")  # not `auto`: a layout's name says what runs
        elif part == "fused":
            fields["reducer"] = part
        elif kind == "hsdp" and number:
            fields["dp_shard"] = number
        elif part in ("ddp", "fsdp"):
            fields["dp_shard"] = 1 if part == "ddp" else 0
        else:
            raise UserError(f"--layouts: {part!r} of {text!r} is unknown; known: {LAYOUTS}")
    if fields.get("sequence_parallel") and fields.get("tp", 1) == 1:
        raise UserError(f"--layouts: {text!r} has sp without tpN; sequence parallelism needs TP")
    if fields.get("reducer") == "fused" and "sequence_parallel" not in fields:
        raise UserError(f"--layouts: {text!r} has fused without sp; write tpN+sp+fused")
    return Layout(text, **fields)


@dataclass(frozen=True)
class TrainingPoint:
    """One configuration to time. no_comm: without the sublayers' reduces. tp_degree: T of a plan
    that depends on it; None for other plans, and in old records."""

    model: str
    layers: int
    plan: str
    layout: str
    seq_len: int
    batch: int
    micro_batch: int
    dtype: str
    checkpointing: str
    compile: bool
    no_comm: bool = False
    tp_degree: int | None = None


def points(options: Any) -> list[TrainingPoint]:
    """The points of the command's options, each plan with and without communication."""
    found: list[TrainingPoint] = []
    for name in options.layouts:
        layout = parse_layout(name)
        for plan in options.plans:
            reduces = [False, True] if layout.tp > 1 else [False]
            if plan == "none":
                if layout.tp == 1:
                    continue  # without TP there is no reduce to leave out
                plan, reduces = "standard", [True]
            for no_comm in reduces:
                point = TrainingPoint(
                    options.model, options.layers, plan, name, options.seq_len, options.batch,
                    options.micro_batch or options.batch, options.dtype,
                    options.activation_checkpointing, options.compile, no_comm,
                )  # fmt: skip
                if point not in found:
                    found.append(point)
    return found


def shape_of(point: TrainingPoint, tp_degree: int) -> ModelConfig:
    """The model config of a point. Raises UserError for options that do not fit it."""
    whole = model_config(point.model)
    if not 0 <= point.layers <= whole.num_layers:
        raise UserError(
            f"--layers={point.layers} must be 1 to the {whole.num_layers} layers of {point.model}, "
            f"or 0 for all"
        )
    if not 1 <= point.seq_len <= whole.max_seq_len:
        raise UserError(
            f"--seq-len={point.seq_len} must be 1 to the context of {point.model}, "
            f"{whole.max_seq_len}"
        )
    layers = {"num_layers": point.layers} if point.layers else {}
    shape = model_config({"name": point.model, "max_seq_len": point.seq_len, **layers})
    plan = resolve_plan(load_plan(point.plan), shape.num_layers, tp_degree)
    shape.check_divides(parse_layout(point.layout).tp, "--layouts tp")
    return replace(shape, plan=plan, tp_degree=tp_degree if plan.depends_on_tp else None)


def recipe_of(point: TrainingPoint) -> TrainConfig:
    """The training options of a point, checked as a recipe's are."""
    layout = parse_layout(point.layout)
    return TrainConfig(
        data="random tokens",
        out="",
        tp=layout.tp,
        dp_shard=layout.dp_shard,
        sequence_parallel=layout.sequence_parallel,
        reducer=layout.reducer,
        activation_checkpointing=point.checkpointing,
        compile=point.compile,
        dtype=point.dtype,
        seq_len=point.seq_len,
    )


def is_virtual(point: TrainingPoint, tp_degree: int) -> bool:
    """Whether a process computes several ranks of the plan's T."""
    degree = shape_of(point, tp_degree).tp_degree
    return degree is not None and degree > parse_layout(point.layout).tp
