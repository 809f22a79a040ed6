"""LadderConfig: the config.json of our folders, in transformers' interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ladder.config import load_plan
from ladder.hf_config import TOKEN_IDS, config_from_huggingface, refuse_quantised, rope_fields
from ladder.models.config import ModelConfig, RopeScaling
from ladder.models.errors import UserError
from ladder.models.transformer import tensor_shapes

KEPT = (*TOKEN_IDS, "dtype", "torch_dtype")  # of another architecture's config.json
SHAPE = {  # names that transformers reads from any config, and ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
}
OTHERS = {  # further names in a Llama's config
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "rope_parameters": "rope_scaling",
    "rms_norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
ALWAYS = {"hidden_act": "silu", "sliding_window": None}  # what our models compute
OVERRIDES = (*SHAPE, *OTHERS, *ALWAYS)


class LadderConfig(PreTrainedConfig):
    """The config.json of our folders; `model` holds the fields of ModelConfig.

    `LadderConfig.from_pretrained` also reads the architectures of config_from_huggingface. Its
    arguments `plan` and `tp_degree` replace those of the folder. Of the other numbers only
    max_position_embeddings can be changed.
    """

    model_type = "ladder"
    has_no_defaults_at_init = True
    auto_map: ClassVar[dict[str, str]] = {}  # trl reads it; save_pretrained fills it
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers' way)
    _rewired: ClassVar[bool] = False  # whether `plan` computes another function than the folder's

    model: dict | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_quantised(kwargs, "the model's config.json")
        config = resolved(self.model)
        config.refuse_no_comm()
        self.model = config.to_dict()
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OVERRIDES:
            self.model = overridden(self.model, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def resolved(self) -> ModelConfig:
        return resolved(self.model)

    @property
    def tie_word_embeddings(self) -> bool:
        return self.resolved.tie_embeddings

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, value: bool) -> None:  # PEFT, which merges into two weights
        self.model = {**self.resolved.to_dict(), "tie_embeddings": value}

    @property
    def adapter_base(self) -> str:
        """What PEFT writes into an adapter's folder as the model that it belongs to.

        A folder loaded under another plan would be loaded without that plan, and compute something
        else. So its name says what to do, and transformers' error for a missing folder shows it.
        """
        if not self._rewired:
            return self.name_or_path
        name, plan = self.name_or_path or "a model", self.resolved.plan.name
        return (
            f"{name} under plan {plan!r}: give the base model by LadderForCausalLM.from_pretrained("
            f"FOLDER, plan=...) to PeftModel.from_pretrained"
        )

    def to_dict(self) -> dict[str, Any]:
        # PEFT reads it here, and then ties the adapters of trained tokens.
        found = {**super().to_dict(), "tie_word_embeddings": self.tie_word_embeddings}
        found.pop("_rewired", None)
        return found

    def to_diff_dict(self) -> dict[str, Any]:
        """The keys of config.json, where `model` says it."""
        found = super().to_diff_dict()
        return {key: value for key, value in found.items() if key != "tie_word_embeddings"}

    @classmethod
    def get_config_dict(cls, path: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """transformers' method, which also translates config.json files of other architectures."""
        data, rest = super().get_config_dict(path, **kwargs)
        if data and data.get("model_type") != cls.model_type:
            model = config_from_huggingface(data, f"config.json of {path}").to_dict()
            data = {"model_type": cls.model_type, "model": model} | {
                name: data[name] for name in KEPT if name in data
            }
        return data, rest

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        plan, tp_degree = kwargs.pop("plan", None), kwargs.pop("tp_degree", None)
        if plan is not None:
            model = config_dict.get("model")
            new = rewired(model, load_plan(plan), tp_degree)
            other = resolved(model).plan.sublayers != resolved(new).plan.sublayers
            config_dict = {**config_dict, "model": new, "_rewired": other}
        elif tp_degree is not None:
            raise UserError(f"tp_degree={tp_degree} goes with a plan; give plan= too")
        for name in OVERRIDES:
            if name in kwargs:
                model = overridden(config_dict.get("model"), name, kwargs.pop(name))
                config_dict = {**config_dict, "model": model}
        original = config_dict.get("huggingface")  # of a folder that `ladder convert` made
        if isinstance(original, dict):
            ids = {name: original[name] for name in TOKEN_IDS if name in original}
            config_dict = {**ids, **config_dict}
        return super().from_dict(config_dict, **kwargs)


def _field(name: str) -> property:
    return property(lambda config: config.model[name])


for _theirs, _ours in SHAPE.items():
    setattr(LadderConfig, _theirs, _field(_ours))


def resolved(model: Any) -> ModelConfig:
    """The model config of the fields `model`."""
    if not isinstance(model, dict):
        raise UserError(
            f"model={model!r} of a LadderConfig must be ModelConfig's fields: give "
            f"LadderConfig(model=ModelConfig(...).to_dict()), or load one by from_pretrained"
        )
    return ModelConfig.from_dict(model)


def overridden(model: Any, name: str, value: Any) -> Any:
    """The fields `model` of a config after `name`, as a Llama's config has it, is set.

    Raises UserError where the model would go on computing with the old value.
    """
    old = resolved(model)
    fields = old.to_dict()
    if name in ALWAYS:
        if value != ALWAYS[name]:
            raise UserError(
                f"{name}={value!r} is not supported: our models compute {name}={ALWAYS[name]!r}; "
                f"leave it out"
            )
        return model
    ours = (SHAPE | OTHERS)[name]
    scaling = old.rope_scaling
    if fields[ours] == value or (ours == "rope_scaling" and _same_rope(old, value, name)):
        return model
    # transformers scales yarn's frequencies by this length where a config.json names no other.
    yarn = scaling is not None and scaling.rope_type == "yarn"
    scales = yarn and fields["rope_scaling"]["original_max_position_embeddings"] == old.max_seq_len
    if name == "max_position_embeddings" and not scales:
        return resolved({**fields, ours: value}).to_dict()
    more = ""
    if name == "num_hidden_layers":
        more = "; generate's assistant_early_exit, which sets it, is not supported: leave it out"
    raise UserError(
        f"{name}={value!r} cannot replace {fields[ours]!r} in a config of our models: change "
        f"{name} in the folder's config.json before loading (in our format, `model.{ours}`){more}"
    )


def _same_rope(old: ModelConfig, value: Any, name: str) -> bool:
    """Whether transformers' rotary settings are the model's."""
    if not isinstance(value, dict):
        return False
    found = rope_fields(value, old.max_seq_len, name)
    same = (None if found is None else RopeScaling(**found)) == old.rope_scaling
    return same and value.get("rope_theta", old.rope_theta) == old.rope_theta


def rewired(model: Any, plan: Any, tp_degree: int | None) -> dict[str, Any]:
    """The fields `model` of a config with another plan that has the same tensors."""
    old = resolved(model)
    new = replace(old, plan=plan, tp_degree=tp_degree)
    new.refuse_no_comm()
    if tensor_shapes(old) != tensor_shapes(new):
        raise UserError(
            f"plan={new.plan.name!r} has other norms than {old.plan.name!r}, which the folder "
            f"holds; convert the folder first: ladder convert FOLDER --plan PLAN --out OUT"
        )
    return new.to_dict()
