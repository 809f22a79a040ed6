"""The shape of a model, and its residual plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ladder.models.errors import UserError, check_keys, unknown
from ladder.models.plan import Plan, number
from ladder.models.preset_table import depends_on_tp
from ladder.models.presets import MOST_LAYERS, MOST_RANKS, resolve_plan, with_degree

# Limits of a shape, far above any real model: a mistyped number would take all memory or endless
# time. Tokens and positions pass through float32, which is exact up to 2**24.
MOST = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_layers": MOST_LAYERS,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "max_seq_len": 2**24,
    "tp_degree": MOST_RANKS,
    "norm_eps": 1.0,
}
MOST_ELSE = 1e12  # rotary settings


# The fields of each rotary scaling besides `factor`, with their defaults; ...: no default.
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "linear": {},
    "dynamic": {"original_max_position_embeddings": ...},
    "yarn": {
        "original_max_position_embeddings": ..., "attention_factor": None, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies for longer contexts, with Hugging Face's names.

    rope_type: `llama3` divides the low frequencies by `factor` and blends the middle ones; `linear`
    divides all frequencies; `yarn` divides them by a ramp over their index and multiplies cos and
    sin by `attention_factor` (0.1 ln factor + 1 by default); `dynamic` changes nothing up to
    original_max_position_embeddings tokens, and longer sequences are refused. Fields that a type
    does not have are None.
    """

    rope_type: str = "llama3"
    factor: float = 8.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in ROPE_TYPES:
            raise unknown("rope_scaling.rope_type", self.rope_type, ROPE_TYPES)
        taken = {"factor": ..., **ROPE_TYPES[self.rope_type]}
        for item in fields(self)[1:]:
            name, value = item.name, number(getattr(self, item.name))
            if name not in taken:
                if value is not None:
                    raise UserError(
                        f"rope_scaling.{name}={value!r} is no field of rope_type="
                        f"{self.rope_type!r}; leave it out"
                    )
                continue
            if value is None and taken[name] is not ...:
                value = taken[name]
            if value is None and name == "attention_factor":
                value = max(1.0, 0.1 * math.log(self.factor) + 1.0)
            object.__setattr__(self, name, value)
            if name != "truncate":
                _check_positive(f"rope_scaling.{name}", value)
            elif not isinstance(value, bool):
                raise UserError(f"rope_scaling.truncate={value!r} must be true or false")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if low in taken and getattr(self, low) >= getattr(self, high):
                raise UserError(
                    f"rope_scaling.{low}={getattr(self, low)} must be below "
                    f"{high}={getattr(self, high)}"
                )

    def to_dict(self) -> dict[str, Any]:
        """The fields of this type of scaling, as plain data."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder.

    num_layers: blocks of one attention and one MLP. max_seq_len: tokens. plan: any specification
    that `resolve_plan` accepts; the attribute is the resolved Plan. tp_degree: T if the plan
    depends on it, by default the T that the plan states; else None. attention_bias: biases of all
    four projections; qkv_bias: biases of q, k and v only (Qwen2). qk_norm: queries and keys are
    normed per head before the rotation (Qwen3). mixer, feed_forward: what fills the two slots of a
    block (ladder.models.sublayers).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0  # 0: hidden_size / num_heads
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mixer: str = "attention"
    feed_forward: str = "swiglu"
    tp_degree: int | None = None
    plan: Plan = field(default="standard")  # type: ignore[assignment]  # resolved below

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "int" and item.name != "head_dim":
                _check_count(item.name, value)
            if item.type == "bool" and not isinstance(value, bool):
                raise UserError(f"{item.name}={value!r} must be true or false")
            if item.type == "str" and not isinstance(value, str):
                raise UserError(f"{item.name}={value!r} must be a name")
            if item.type == "float":
                _check_positive(item.name, value)
                object.__setattr__(self, item.name, float(value))
        divided = ""
        if type(self.head_dim) is int and not self.head_dim:
            if self.hidden_size % self.num_heads:
                raise UserError(
                    f"hidden_size={self.hidden_size} is not divisible by "
                    f"num_heads={self.num_heads}; set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
            divided = f" (hidden_size={self.hidden_size} / num_heads={self.num_heads})"
        _check_count("head_dim", self.head_dim)
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim}{divided} must be an even whole number above 0"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}; "
                f"choose num_kv_heads among the divisors of num_heads"
            )
        if self.attention_bias and self.qkv_bias:
            raise UserError(
                "attention_bias=True with qkv_bias=True: attention_bias includes the biases of q, "
                "k and v; set qkv_bias to false"
            )
        scaling = _rope_scaling(self.rope_scaling)
        object.__setattr__(self, "rope_scaling", scaling)
        if scaling is not None and scaling.rope_type == "dynamic":
            longest = scaling.original_max_position_embeddings
            assert longest is not None
            if self.max_seq_len > longest:
                raise UserError(
                    f"max_seq_len={self.max_seq_len} with rope_scaling.rope_type='dynamic' exceeds "
                    f"original_max_position_embeddings={longest}, where frequencies would depend "
                    f"on the length of a sequence, which the model does not support; lower "
                    f"max_seq_len, or use linear or yarn"
                )
        if self.tp_degree is not None:
            _check_count("tp_degree", self.tp_degree)
            self.check_divides(self.tp_degree, "tp_degree")
        plan = resolve_plan(self.plan, self.num_layers, self.tp_degree)
        object.__setattr__(self, "plan", plan)
        if plan.depends_on_tp and self.tp_degree is None and plan.tp_degree is not None:
            object.__setattr__(self, "tp_degree", plan.tp_degree)
            self.check_divides(plan.tp_degree, "tp_degree")
        if plan.depends_on_tp and self.tp_degree is None:
            if plan.no_comm:
                raise UserError(f"{self._no_comm()}, or set tp_degree for a benchmark")
            raise depends_on_tp(plan.name)
        if not plan.depends_on_tp and self.tp_degree is not None:
            raise UserError(
                f"tp_degree={self.tp_degree} with plan {plan.name!r}, which does not depend on T: "
                f"leave tp_degree out; the model runs at any tp"
            )
        if (self.attention_bias or self.mlp_bias) and not all(plan.equal_reads):
            raise UserError(
                f"attention_bias={self.attention_bias}, mlp_bias={self.mlp_bias}: plan "
                f"{plan.name!r} has residuals that differ between ranks, where the bias of an "
                f"output projection has no meaning; set both to false"
            )

    @property
    def has_usual_slots(self) -> bool:
        """Whether blocks are attention and SwiGLU, which kernels, costs and Hugging Face know."""
        return (self.mixer, self.feed_forward) == ("attention", "swiglu")

    @property
    def has_usual_norms(self) -> bool:
        """Whether each sublayer has one norm for all ranks, of which any plan's can be made."""
        return all(self.plan.equal_reads) and len(self.plan.sublayers) == 2 * self.num_layers

    def check_divides(self, degree: int, option: str) -> None:
        """Raise UserError unless T = `degree` divides every dimension that is split."""
        for name in ("num_heads", "intermediate_size"):
            value = getattr(self, name)
            if value % degree:
                raise UserError(
                    f"{option}={degree} does not divide {name}={value}; choose {option} among its "
                    f"divisors"
                )
        if self.num_kv_heads % degree and degree % self.num_kv_heads:
            raise UserError(
                f"{option}={degree} neither divides num_kv_heads={self.num_kv_heads} "
                f"nor is a multiple of it; choose a divisor or a multiple"
            )

    def refuse_no_comm(self) -> None:
        """Raise UserError for a plan without communication, as `none`."""
        if self.plan.no_comm and (self.tp_degree or 1) > 1:
            raise UserError(self._no_comm())

    def _no_comm(self) -> str:
        return (
            f"plan={self.plan.name!r} has no communication (no_comm): it is for benchmarks and "
            f"computes no model; choose another plan"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "model config") -> ModelConfig:
        """A config from plain data, as `to_dict` returns; an unknown key is an error."""
        names = [item.name for item in fields(cls)]
        check_keys(where, data, names)
        missing = [name for name in names[:6] if name not in data]
        if missing:
            raise UserError(f"{where} lacks {', '.join(missing)}")
        plan = with_degree(data.get("plan"), data["num_layers"], data.get("tp_degree"))
        try:
            return cls(**{**data, "plan": plan} if "plan" in data else data)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def same(self, other: ModelConfig) -> bool:
        """Whether the other config is of the same model, whatever its plan is called."""
        names = [item.name for item in fields(self) if item.name != "plan"]
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        pairs.append((self.plan.sublayers, other.plan.sublayers))
        return all(mine == theirs for mine, theirs in pairs)

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as plain data, from which `from_dict` makes an equal config."""
        scaling = self.rope_scaling
        resolved = {
            "rope_scaling": None if scaling is None else scaling.to_dict(),
            "plan": self.plan.to_dict(),
        }
        return {**asdict(self), **resolved}


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name}={value!r} must be a whole number above 0")
    if value > MOST[name]:
        raise UserError(f"{name}={value} is too large; {MOST[name]:,} is the most")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise UserError(f"{name}={value!r} must be a number above 0")
    if value > (most := MOST.get(name, MOST_ELSE)):
        raise UserError(f"{name}={value} is too large; {most:,.0f} is the most")


def _rope_scaling(value: Any) -> RopeScaling | None:
    if value is None or isinstance(value, RopeScaling):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"rope_scaling={value!r} must be fields, as {{factor: 8}}")
    check_keys("rope_scaling", value, [item.name for item in fields(RopeScaling)])
    return RopeScaling(**value)
