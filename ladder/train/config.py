"""The recipe of a training run: TrainConfig, its loading and its checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ladder.config import (
    CHECKPOINTING,
    DTYPES,
    apply_overrides,
    build,
    configs_folder,
    find,
    load_mapping,
    load_plan,
    model_config,
    text_fields,
)
from ladder.data.weights import parse_sources
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.train.conversion import listed_last

# What people write for none. Text is taken literally, so it would name a folder or a project.
NOT_TEXT = ("null", "none", "~", "false", "true", "no", "off")

DISTILLING = ("distill_weight", "distill_temperature")  # they mean nothing without a teacher

# Limits far above any run. Larger values would exhaust memory or overflow: the windows of a step
# are listed before the first is read, and `epochs` is multiplied by the number of windows.
MOST = {
    "batch_size": 2**20,
    "micro_batch_size": 2**20,
    "tp": 2**16,
    "dp_shard": 2**16,
    "steps": 2**40,
    "epochs": 2**20,
}

# Adam divides by the root of a mean of squared gradients, plus eps. In float32 the squares of
# gradients below some 1e-19 are 0: eps alone must then keep the quotient small, and not NaN.
LEAST_EPS = 1e-16


@dataclass(frozen=True)
class TrainConfig:
    """A training recipe; lengths are in tokens, sizes in sequences, intervals in steps.

    model: a name from configs/models, a YAML path, or a mapping of `name` and overrides; its
        vocabulary is the data's. None: `tiny`. plan, tp_degree: see `ladder plans`; a plan of None
        is `standard`.
    init: a run's folder, a checkpoint or a Hugging Face Llama folder with the initial weights. It
        determines the model's shape, so `model` is left out. A plan of None is the folder's plan;
        another is possible if it stores the same tensors, but for norms with a weight for each rank
        (see ladder.train.start). Empty: random weights.
    data: a folder made by `ladder data prepare`, of text or of conversations, or a list of
        several, each `{path, weight}`: sequences are drawn in the proportions of the weights. out:
        the run's folder.
    convert_layers: changes the plan during training, from the plan of `init`, or `standard`, to
        `plan`. {start_step: 100, every: 50, order: last-first} converts the last layer after 100
        steps and the one below it 50 steps later; [{step: 100, plan: ladder@24-31}, ...] gives the
        plan from each step on, the last being the run's. None: one plan for the whole run.
    teacher: a folder as for init, of a model with the same vocabulary (for example the unconverted
        one), for distillation; empty: none. distill_weight: the weight in the loss of the
        divergence from the teacher's distributions at distill_temperature; the rest is
        cross-entropy (see ladder.train.objective).
    dp_shard: the number of data-parallel ranks that shard parameters, gradients and optimiser
        state. 1: no sharding (DDP); 0: all ranks (FSDP); in between: replicated shards (HSDP).
    sequence_parallel: the residual is sharded by tokens over the TP ranks.
    reducer: how the TP ranks sum their outputs (see ladder.parallel.choose): `async`, or with
        sequence_parallel `sequence` or `fused`; `auto` takes `async`, or `fused` where its products
        were measured to overlap, else `sequence`.
    activation_checkpointing: the activations kept for the backward pass: all (`none`), those of
        matrix products and attention (`selective`), or only each sublayer's input (`full`).
    compile: torch.compile of each sublayer, landing and norm.
    epochs: passes over the data, in place of `steps`; 0: `steps` counts. Of several sources: as
        many sequences as all of them have, drawn by weight.
    batch_size: sequences per step over all ranks; micro_batch_size: sequences per forward pass on
        one rank (0: the rank's whole share at once).
    mask_documents: a token attends only to tokens of its own document in the window; an end-of-text
        token belongs to the document that it ends. The order of the data, the targets and the
        positions do not change. Conversations are always kept apart.
    lr: the peak, reached after warmup_steps; then a cosine to min_lr at the last step.
    eval_windows: held-out windows per evaluation, evenly spread over all of them, also for the
        final one (0: all).
    checkpoint_interval: 0 saves after the last step only. keep_checkpoints: the number of newest
        checkpoints to keep; 0: all.
    dtype: float32, or bfloat16 for activations and matrix products (parameters stay float32).
    wandb: a project at Weights & Biases that also receives the metrics; empty: none.
    """

    data: Any
    out: str
    model: Any = None
    plan: Any = None
    init: str = ""
    tp_degree: int | None = None
    convert_layers: Any = None
    teacher: str = ""
    distill_weight: float = 0.5
    distill_temperature: float = 1.0
    tp: int = 1
    dp_shard: int = 1
    sequence_parallel: bool = False
    reducer: str = "auto"
    activation_checkpointing: str = "none"
    compile: bool = False
    steps: int = 1000
    epochs: float = 0.0
    seq_len: int = 512
    batch_size: int = 16
    micro_batch_size: int = 0
    mask_documents: bool = False
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    log_interval: int = 10
    eval_interval: int = 0
    eval_windows: int = 64
    checkpoint_interval: int = 0
    keep_checkpoints: int = 0
    tensorboard: bool = True
    wandb: str = ""

    def __post_init__(self) -> None:
        if self.plan is None:
            object.__setattr__(self, "plan", listed_last(self.convert_layers))
        if not self.init:
            for name, default in (("model", "tiny"), ("plan", "standard")):
                if getattr(self, name) is None:
                    object.__setattr__(self, name, default)
        elif self.model is not None:
            raise UserError(
                f"model={self.model!r} beside init={self.init!r}: the shape is that of the weights "
                f"there; leave model out"
            )
        parse_sources(self.data)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "float" and item.name != "grad_clip" and not math.isfinite(value):
                raise UserError(f"{item.name}={value} must be a finite number")
        positive = ("tp", "steps", "seq_len", "batch_size", "log_interval")
        not_negative = (
            "dp_shard",
            "micro_batch_size",
            "epochs",
            "warmup_steps",
            "eval_interval",
            "eval_windows",
            "checkpoint_interval",
            "keep_checkpoints",
            "weight_decay",
            "min_lr",
            "seed",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in not_negative:
            if not getattr(self, name) >= 0:
                raise UserError(f"{name}={getattr(self, name)} must be 0 or more")
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise UserError(f"{name}={getattr(self, name)} is too large; {most:,} is the most")
        if self.seed >= 2**63:
            raise UserError(f"seed={self.seed} must be below 2**63")
        if not self.lr > 0 or self.min_lr > self.lr:
            raise UserError(f"lr={self.lr} must be above 0 and at least min_lr={self.min_lr}")
        if not 0 <= self.distill_weight <= 1:
            raise UserError(f"distill_weight={self.distill_weight} must be in [0, 1]")
        if not self.distill_temperature > 0:
            raise UserError(f"distill_temperature={self.distill_temperature} must be above 0")
        for name in DISTILLING:
            if not self.teacher and getattr(self, name) != getattr(TrainConfig, name):
                raise UserError(
                    f"{name}={getattr(self, name)} without a teacher: give teacher=FOLDER, or "
                    f"leave {name} out"
                )
        if self.adam_eps < LEAST_EPS:
            raise UserError(
                f"adam_eps={self.adam_eps} must be {LEAST_EPS} or more: squares of small gradients "
                f"are 0 in float32, and Adam then divides by adam_eps alone; 1e-8 is usual"
            )
        if not self.grad_clip > 0:
            raise UserError(f"grad_clip={self.grad_clip} must be above 0; inf clips nothing")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas={list(self.betas)} must be two numbers in [0, 1)")
        if self.activation_checkpointing not in CHECKPOINTING:
            raise unknown("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.reducer != "auto":
            from ladder.parallel.choose import training_reducer  # late: it imports torch

            training_reducer(self.reducer, self.sequence_parallel)
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if not self.epochs and self.warmup_steps >= self.steps:
            raise UserError(
                f"warmup_steps={self.warmup_steps} must be below steps={self.steps}; lower it, "
                f"for example warmup_steps={self.steps // 10}"
            )

    def with_steps(self, windows: int) -> TrainConfig:
        """The config with `epochs` turned into steps, for training data of `windows` windows."""
        if not self.epochs:
            return self
        steps = math.ceil(self.epochs * windows / self.batch_size)
        return replace(self, steps=steps, epochs=0.0)

    def evaluates(self, done: int) -> bool:
        """Whether the held-out loss is measured after `done` steps."""
        return done == self.steps or due(done, self.eval_interval)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, from which `build` makes an equal config."""
        return {**asdict(self), "betas": list(self.betas)}

    def resolved(self, model: ModelConfig) -> dict[str, Any]:
        """The config as plain data, with the shape written out: named shapes may change later."""
        if self.init:  # the shape is saved with the weights
            return self.to_dict()
        name = self.model if isinstance(self.model, str) else self.model["name"]
        shape = model.to_dict()
        for key in ("plan", "tp_degree", "vocab_size"):
            del shape[key]
        return {**self.to_dict(), "model": {"name": name, **shape}}

    def model_config(self, vocab_size: int) -> ModelConfig:
        """The model to train from random weights, with the data's vocabulary."""
        config = model_config(self.model, self.plan, self.tp_degree, vocab_size=vocab_size)
        self.check_model(config)
        return config

    def check_model(self, config: ModelConfig) -> None:
        """Raise UserError if this recipe cannot train that model."""
        config.refuse_no_comm()
        if self.seq_len > config.max_seq_len:
            remedy = "lower it" if self.init else "lower it, or set model.max_seq_len"
            raise UserError(
                f"seq_len={self.seq_len} is longer than the model's max_seq_len="
                f"{config.max_seq_len}; {remedy}"
            )

    def check_rows(self, sequences: int, of: str = "") -> None:
        """Raise UserError if sequence parallelism cannot split a pass of so many sequences; of: the
        option whose last batch has so many."""
        if self.sequence_parallel:
            from ladder.parallel.sequence import check_rows  # late: it imports torch

            check_rows(sequences, self.seq_len, self.tp, of)


def due(done: int, interval: int) -> bool:
    """Whether `done` is a multiple of `interval`; never if `interval` is 0."""
    return bool(interval) and done % interval == 0


def load_train_config(source: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of a YAML path or a name in configs/train, with key=value overrides."""
    path = find("train", source)
    data = load_mapping(path)
    texts = text_fields(TrainConfig)
    plain = [item for item in overrides if "=" not in item or "." not in item.partition("=")[0]]
    given = apply_overrides({}, plain, texts)
    none = [item.name for item in fields(TrainConfig) if item.default is None]
    for name in none:
        if f"{name}=" in map(str.strip, plain):  # as of a shell variable that is not set
            raise UserError(
                f"{name}= is empty; give a value, leave it out, or write {name}=null for none"
            )
    for name, what in (("init", "folder"), ("teacher", "folder"), ("wandb", "project")):
        if data.get(name, "") is None:  # `wandb:` or `wandb: null` in the file
            data[name] = ""
        value = given.get(name, data.get(name, ""))
        if str(value).lower() in NOT_TEXT:
            raise UserError(
                f"{name}={value} would name a {what}; give its name, or for none leave {name} out, "
                f"or write {name}= (empty)"
            )
    instead = [("steps", "epochs"), ("epochs", "steps"), ("init", "model")]
    if data.get("model"):  # a recipe of pretraining, whose plan belongs to its own model
        instead += [("init", "plan"), ("init", "tp_degree")]
        if not path.resolve().is_relative_to(configs_folder().resolve()):
            _refuse_own_plan(source, data, given)
    for name, other in instead:
        if given.get(name) and other not in given:  # an empty one replaces nothing
            data.pop(other, None)  # an override of `name` also replaces `other`
    data = apply_overrides(data, overrides, texts)
    if data.get("epochs") and "steps" in data:
        raise UserError(
            f"steps={data['steps']} with epochs={data['epochs']}: both set the length of the run; "
            f"leave one out"
        )
    data["plan"] = load_plan(data.get("plan"))
    if isinstance(data.get("convert_layers"), list):
        data["convert_layers"] = [
            {**each, "plan": load_plan(each["plan"])}
            if isinstance(each, dict) and "plan" in each
            else each
            for each in data["convert_layers"]
        ]
    return build(TrainConfig, data, where=f"training config {source!r}")


def _refuse_own_plan(source: str, data: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError where `init` is given beside a user's own recipe with a model and a plan.

    The plan may be meant for the recipe's model alone, as in the recipes of configs/train, where
    the plan of `init` counts then; or for whatever model is trained. The losses do not show a wrong
    guess at once, so the user must say. The default is let through: every run's recipe.json has it.
    """
    init, default = given.get("init"), (None, "standard")
    left = [key for key in ("plan", "tp_degree") if key not in given]
    left = [key for key in left if data.get(key) not in default]
    if not init or not left:
        return
    shown = {key: data[key] if isinstance(data[key], str | int) else "..." for key in left}
    asked = " ".join(f"{key}={value}" for key, value in shown.items())
    none = " ".join(f"{key}=null" for key in left)
    raise UserError(
        f"init={init} replaces the model of {source}, whose {' and '.join(left)} may be meant for "
        f"that model alone; add {asked} to train the weights with it, or {none} to keep the plan "
        f"of init"
    )
