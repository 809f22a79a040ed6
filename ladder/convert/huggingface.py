"""Hugging Face's Llama configs as ours. The weights need no conversion: names and layouts agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ladder.models.config import ModelConfig, RopeScaling
from ladder.models.errors import UserError


def config_from_huggingface(data: Mapping[str, Any], where: str) -> ModelConfig:
    """The config of a Llama checkpoint's config.json (transformers 4 and 5 spell rotary apart).

    Raises UserError for another architecture, or for a variant that the model does not compute.
    """
    kind = data.get("model_type")
    if kind != "llama":
        raise UserError(f"{where} has model_type={kind!r}; only 'llama' and our own can be loaded")
    if data.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} has hidden_act={data['hidden_act']!r}; only 'silu' is supported")
    rope: dict[str, Any] = {"rope_theta": data.get("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        given = data.get(name) or {}
        if not isinstance(given, Mapping):
            raise UserError(f"{where} has {name}={given!r}; it must be null or an object of fields")
        rope |= given
    theta = rope["rope_theta"]
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    missing = [name for name in (*names, "num_attention_heads") if name not in data]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; is it a Llama config.json?")
    scaling = _rope_fields(rope, where)
    try:
        return ModelConfig(
            vocab_size=data["vocab_size"],
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_layers=data["num_hidden_layers"],
            num_heads=data["num_attention_heads"],
            num_kv_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
            head_dim=data.get("head_dim") or 0,
            max_seq_len=data.get("max_position_embeddings", 2048),
            rope_theta=float(theta) if type(theta) is int else theta,
            rope_scaling=None if scaling is None else RopeScaling(**scaling),
            norm_eps=data.get("rms_norm_eps", 1e-6),
            tie_embeddings=data.get("tie_word_embeddings", False),
            attention_bias=data.get("attention_bias", False),
            mlp_bias=data.get("mlp_bias", False),
        )
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _rope_fields(rope: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The fields of RopeScaling, None where the rotary frequencies are not scaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{where} has rope_type={kind!r}; only 'default' and 'llama3' work")
    names = [item.name for item in fields(RopeScaling)]
    missing = [name for name in names if name not in rope]
    if missing:
        raise UserError(f"{where} has rope_type='llama3' without {', '.join(missing)}; add them")
    return {name: rope[name] for name in names}


def stop_tokens(data: Mapping[str, Any], where: str) -> list[int]:
    """The end-of-sequence ids of a config.json or generation_config.json, perhaps none."""
    found = data.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        raise UserError(
            f"{where} has eos_token_id={found!r}; it must be a token's id, a list of ids, or null"
        )
    return ids
