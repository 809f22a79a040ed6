"""Checks of a converted folder: its tensors' checksums, and its logits against transformers'."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ladder.checkpoint import WEIGHTS, TensorReader, read_config
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer, meta_model, tensor_shapes
from ladder.parallel.sharding import shard_model

MOST_PARAMETERS = 2**28  # of the model whose logits are compared: 1 GiB in float32
ROWS = 1024  # vocabulary of the part that is compared of a larger model
TOLERANCE = 1e-4  # relative to the largest logit, in float32


def tensor_checksum(value: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
    found.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def verify_checksums(
    folder: Path, sums: Mapping[str, str], on_tensor: Callable[[str], None]
) -> None:
    """Raise UserError unless the folder holds exactly the tensors in `sums`, with these checksums.

    on_tensor: called with the name of each tensor after its comparison.
    """
    reader = TensorReader(folder, WEIGHTS, quantised=True)
    wrong = sorted(set(reader.files) ^ set(sums))
    for name in sums:
        if name not in wrong and tensor_checksum(reader.whole(name)) != sums[name]:
            wrong.append(name)
        reader.close()
        on_tensor(name)
    if wrong:
        raise UserError(
            f"{', '.join(wrong[:3])}: the written data differs from the converted data; the disk "
            f"or memory may be faulty: convert to another disk"
        )


def cannot_compare(old: ModelConfig, new: ModelConfig) -> str | None:
    """The reason why logits cannot be compared with transformers'; None if they can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if tensor_shapes(old) != tensor_shapes(new):
        return f"plan {new.plan.name!r} has other norms"
    return None


@torch.no_grad()
def compare_logits(ours: Path, theirs: Path, dtype: torch.dtype | None = None) -> tuple[float, str]:
    """Compare the logits of our folder and of Hugging Face's on random tokens, in float32.

    Returns the largest difference relative to the largest logit, and a text that says what was
    compared. Ours are computed under `standard`, for any stored plan. Of a model above
    MOST_PARAMETERS, only as many first layers as fit (at least one) and the first ROWS tokens of
    the vocabulary are compared. One model is in memory at a time. dtype: the type to which one of
    the folders was cast; the weights of both are rounded to it. Raises UserError if the difference
    is above TOLERANCE.
    """
    config = read_config(ours)
    part = _fitting(config)
    whole = tensor_shapes(part) == tensor_shapes(config)
    shape = (2, min(64, config.max_seq_len))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, part.vocab_size, shape, generator=generator)
    what = "logits"
    if not whole:
        what += f" of the first {part.num_layers} of {config.num_layers} layers"
    if config.plan.sublayers != resolve_plan("standard", config.num_layers).sublayers:
        what += " under plan standard"
    if dtype is not None:
        what += f" with weights in {str(dtype).removeprefix('torch.')}"
    expected = _their_logits(theirs, None if whole else part, tokens, dtype)
    found = _rounded(_ours(ours, part), dtype)(tokens)
    difference = (found - expected).abs().max() / expected.abs().max()
    if not difference <= TOLERANCE:
        raise UserError(
            f"the {what} differ from transformers' by {difference:.1e} of the largest: the "
            f"config.json sets an option that ladder or transformers does not support; nothing was "
            f"written"
        )
    return float(difference), what


def _fitting(config: ModelConfig) -> ModelConfig:
    """The config under `standard`, cut to a part of at most about MOST_PARAMETERS if larger."""

    def first(layers: int, rows: int) -> ModelConfig:
        return replace(
            config,
            num_layers=layers,
            vocab_size=rows,
            plan=resolve_plan("standard", layers),
            tp_degree=None,
        )

    def size(layers: int, rows: int) -> int:
        return sum(map(math.prod, tensor_shapes(first(layers, rows)).values()))

    if size(config.num_layers, config.vocab_size) <= MOST_PARAMETERS:
        return first(config.num_layers, config.vocab_size)
    rows = min(config.vocab_size, ROWS)
    one = size(1, rows)
    layers = 1 + (MOST_PARAMETERS - one) // (size(2, rows) - one)
    return first(max(1, min(layers, config.num_layers)), rows)


def _ours(folder: Path, config: ModelConfig) -> Transformer:
    model = meta_model(config)
    shard_model(model, dtype=torch.float32)
    _fill(model, folder)
    return model


def _rounded(model: Any, dtype: torch.dtype | None) -> Any:
    """The model with its weights rounded to `dtype`, in their own type."""
    for parameter in model.parameters() if dtype else ():
        parameter.copy_(parameter.to(dtype))
    return model


def _their_logits(
    folder: Path, part: ModelConfig | None, tokens: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """The logits of transformers' model of the folder; with `part`, only of that part."""
    try:
        logits: Tensor = _rounded(_theirs(folder, part), dtype)(tokens).logits
        return logits
    except Exception as error:  # transformers raises errors of many types
        raise UserError(
            f"transformers cannot load or run {folder} ({' '.join(str(error).split())[:300]}), so "
            f"the logits cannot be compared; correct its config.json"
        ) from error


def _theirs(folder: Path, part: ModelConfig | None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    if part is None:
        options["use_safetensors"] = True
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers, config.vocab_size = part.num_layers, part.vocab_size
    config.pad_token_id = None  # it may be beyond the smaller vocabulary
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[: part.num_layers]
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    _fill(model, folder)
    return model


def _fill(model: nn.Module, folder: Path) -> None:
    """Copy the folder's tensors, or their first parts, to a model that may be smaller."""
    reader = TensorReader(folder, WEIGHTS)
    for name, parameter in model.named_parameters():
        parameter.copy_(reader.part(name, tuple(slice(0, size) for size in parameter.shape)))
        reader.close()
