"""Model configs from and to Hugging Face's. The weights have the same names and layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ladder.models.config import ROPE_TYPES, ModelConfig, RopeScaling
from ladder.models.errors import UserError
from ladder.models.plan import number
from ladder.models.presets import resolve_plan

# The supported architectures by model_type, with transformers' defaults for keys that a config.json
# lacks, where they differ between architectures.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def config_from_huggingface(data: Mapping[str, Any], where: str) -> ModelConfig:
    """The model config of a checkpoint's config.json, as written by transformers 4 or 5.

    Raises UserError for an unsupported architecture or variant.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{where} has model_type={kind!r}; {', '.join(FAMILIES)} and our own can be loaded"
        )
    if data.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} has hidden_act={data['hidden_act']!r}; only 'silu' is supported")
    refuse_quantised(data, where)
    rope: dict[str, Any] = {"rope_theta": data.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        given = data.get(name) or {}
        if not isinstance(given, Mapping):
            raise UserError(f"{where} has {name}={given!r}; it must be null or an object of fields")
        rope |= given
    theta = rope["rope_theta"]
    part = rope.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1
    if part != 1:
        raise UserError(
            f"{where} has partial_rotary_factor={part!r}, which transformers' {CLASSES[kind]} does "
            f"not compute either: it rotates whole heads; set it to 1 if that is right"
        )
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    missing = [name for name in (*names, "num_attention_heads") if name not in data]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; is it a {CLASSES[kind]} config.json?")
    data = {**FAMILIES[kind], **data}
    if data.get("original_max_position_embeddings") is not None:  # it takes precedence
        rope["original_max_position_embeddings"] = data["original_max_position_embeddings"]
    scaling = rope_fields(rope, data["max_position_embeddings"], where)
    try:
        config = ModelConfig(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
            head_dim=data.get("head_dim") or 0,
            max_seq_len=data["max_position_embeddings"],
            rope_theta=theta,
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            norm_eps=data.get("rms_norm_eps", 1e-6),
            tie_embeddings=data.get("tie_word_embeddings", False),
            attention_bias=kind in ("llama", "qwen3") and data.get("attention_bias", False),
            mlp_bias=kind == "llama" and data.get("mlp_bias", False),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    _refuse_window(data, config, where)
    return config


def refuse_quantised(data: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a config.json of quantised weights."""
    if data.get("quantization_config"):
        raise UserError(
            f"{where} has a quantization_config; quantised weights cannot be loaded, take the "
            f"model in float32, bfloat16 or float16"
        )


def rope_fields(rope: Mapping[str, Any], longest: Any, where: str) -> dict[str, Any] | None:
    """The fields of RopeScaling; None if the rotary frequencies are not scaled.

    longest: max_position_embeddings.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        known = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
        spare = {key: value for key, value in rope.items() if key not in known}
        spare = {key: value for key, value in spare.items() if value not in (None, 1)}
        if spare:
            raise UserError(
                f"{where} scales its rotary frequencies by {spare!r} without a rope_type that says "
                f"how; give the type, or remove them"
            )
        return None
    if kind == "longrope":
        raise UserError(
            f"{where} has rope_type='longrope', whose frequencies depend on the length of a "
            f"sequence, which the model's do not; {', '.join(ROPE_TYPES)} can be loaded"
        )
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(
            f"{where} has rope_type={kind!r}; default, {', '.join(ROPE_TYPES)} can be loaded"
        )
    found = {name: rope.get(name) for name in ("factor", *ROPE_TYPES[kind])}
    if kind == "dynamic":  # transformers uses max_position_embeddings, up to which nothing changes
        found["original_max_position_embeddings"] = longest
    if kind == "yarn":
        if found["original_max_position_embeddings"] is None:
            found["original_max_position_embeddings"] = longest
        found |= {name: found[name] or None for name in ("beta_fast", "beta_slow")}
        if found["attention_factor"] is None:
            found["attention_factor"] = _attention_factor(rope)
    names = ["factor"] if kind != "llama3" else list(found)
    missing = [name for name in names if found[name] is None]
    if missing:
        raise UserError(f"{where} has rope_type={kind!r} without {', '.join(missing)}; add them")
    return {"rope_type": kind, **found}


def _attention_factor(rope: Mapping[str, Any]) -> float | None:
    """The attention factor of DeepSeek's `mscale` and `mscale_all_dim` for yarn, if both exist."""
    factor, *scales = (number(rope.get(name)) for name in ("factor", "mscale", "mscale_all_dim"))
    if not all(scales):
        return None
    if not all(isinstance(each, int | float) and each > 0 for each in (factor, *scales)):
        raise UserError(f"factor, mscale and mscale_all_dim of {dict(rope)!r} must be above 0")
    above, below = (0.1 * each * math.log(max(factor, 1.0)) + 1.0 for each in scales)
    return float(above / below)


def _refuse_window(data: Mapping[str, Any], config: ModelConfig, where: str) -> None:
    """Raise UserError if a sliding window is shorter than the longest sequence."""
    window = data.get("sliding_window")
    if data["model_type"] == "llama" or window is None:
        return
    if data["model_type"] != "mistral":  # Qwen models have windows on some layers or none
        first = data.get("max_window_layers", 28)
        some = type(first) is int and first < config.num_layers
        kinds = data.get("layer_types") or ["sliding_attention"] * some
        if type(first) is not int or not isinstance(kinds, list):
            raise UserError(
                f"{where} has max_window_layers={first!r}, layer_types={kinds!r}; these must be a "
                f"whole number and a list"
            )
        if not data.get("use_sliding_window", False) or "sliding_attention" not in kinds:
            return
    if type(window) is not int or window < config.max_seq_len:
        raise UserError(
            f"{where} has sliding_window={window!r}, below max_position_embeddings="
            f"{config.max_seq_len}: the model supports only full attention. If shorter sequences "
            f"suffice, set max_position_embeddings to the window in that file"
        )


def config_to_huggingface(
    config: ModelConfig,
    dtype: torch.dtype,
    kept: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A config.json for transformers 4 and 5.

    kept: the config.json that the model was converted from. It is returned if it agrees with
    `config`, with the current dtype and end-of-text tokens, which training may have changed.
    source: the model's config.json, for its token ids. Raises UserError if no architecture of
    transformers computes the model.
    """
    refuse_other_plans(config)
    where = "the config.json kept"
    source = source or {}
    eos_token_id = source.get("eos_token_id")
    others = [name for name in TOKEN_IDS if name != "eos_token_id"]
    ids = {name: source[name] for name in others if source.get(name) is not None}
    if kept is not None and config_from_huggingface(kept, where) == _plain(config):
        found = {**kept, **ids}
        for name in ("torch_dtype", "dtype"):  # transformers 4 and 5
            if name in found:
                found[name] = str(dtype).removeprefix("torch.")
        ends = stop_tokens({"eos_token_id": eos_token_id}, where)
        if not set(ends) <= set(stop_tokens(kept, where)):
            found["eos_token_id"] = eos_token_id
        return found
    if not config.has_usual_slots:
        raise UserError(
            f"mixer={config.mixer!r}, feed_forward={config.feed_forward!r}: no Hugging Face "
            f"architecture of {', '.join(FAMILIES)} has these; they have attention and swiglu"
        )
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    mixed = [name for name in ("qkv_bias", "mlp_bias") if getattr(config, name)]
    if (kind == "qwen3" and mixed) or (kind == "qwen2" and config.mlp_bias):
        raise UserError(
            f"qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, mlp_bias={config.mlp_bias}: no "
            f"Hugging Face architecture of {', '.join(FAMILIES)} has these together"
        )
    scaling = config.rope_scaling
    data: dict[str, Any] = {
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else scaling.to_dict(),
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": eos_token_id,
    }
    for name in others:  # null if the model has none: LlamaConfig's default of bos_token_id is 1
        data[name] = ids.get(name, (kept or {}).get(name))
    if kind != "qwen2":
        data["attention_bias"] = config.attention_bias
    if kind == "llama":
        data["mlp_bias"] = config.mlp_bias
    return data


def refuse_other_plans(config: ModelConfig) -> None:
    """Raise UserError unless the plan is that of Hugging Face's models."""
    if config.plan.sublayers != resolve_plan("standard", config.num_layers).sublayers:
        raise UserError(
            f"plan {config.plan.name!r} cannot be written for Hugging Face's classes, which "
            f"compute only `standard`; keep the model in our format (without --to hf), or add "
            f"--plan standard, which changes what the model computes"
        )


def _plain(config: ModelConfig) -> ModelConfig:
    """The config with the plan `standard`, which every Hugging Face config has."""
    return replace(config, plan=resolve_plan("standard", config.num_layers))


def stop_tokens(data: Mapping[str, Any], where: str) -> list[int]:
    """The end-of-sequence ids of a config.json or generation_config.json, or []."""
    found = data.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        raise UserError(
            f"{where} has eos_token_id={found!r}; it must be a token's id, a list of ids, or null"
        )
    return ids
