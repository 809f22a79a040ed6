"""Features of transformers that our models refuse: they would fail unclearly or compute wrongly."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from ladder.models.errors import UserError


def refuse_options(options: dict[str, Any]) -> None:
    """Raise UserError for options of `from_pretrained` that would quantise or unpickle."""
    for name in ("load_in_8bit", "load_in_4bit", "quantization_config", "gguf_file"):
        if given := options.get(name):
            shown = given if isinstance(given, bool | str | dict) else type(given).__name__
            raise UserError(
                f"{name}={shown!r} is not for our models, whose matrices no quantiser "
                f"supports; leave it out, and load with dtype=torch.bfloat16 to save memory"
            )
    if options.get("use_safetensors", True) is not True:
        raise UserError(
            f"use_safetensors={options['use_safetensors']!r} would unpickle the folder's "
            f"weights; leave it out"
        )
    if isinstance(config := options.get("config"), PreTrainedConfig):
        refuse_config(config)
        for name in ("plan", "tp_degree"):
            if name in options:
                raise UserError(
                    f"{name}={options[name]!r} beside config= has no effect: give {name} to "
                    f"LadderConfig.from_pretrained, or leave config out"
                )


def refuse_config(config: PreTrainedConfig) -> None:
    """Raise UserError for a config of another class, such as AutoConfig's for a Llama's folder."""
    if config.model_type != "ladder":
        raise UserError(
            f"config is a {type(config).__name__}; give LadderConfig.from_pretrained(FOLDER, "
            f"plan=...), or leave config out"
        )


def refuse_attention(implementation: str | None) -> None:
    """Raise UserError for an attention of transformers' that our models would not call."""
    if implementation is not None and implementation.startswith("paged|"):  # by generate_batch
        raise UserError(
            f"attn_implementation={implementation!r}: generate_batch (continuous batching) is not "
            f"supported; use generate, or ladder.infer.engine.Engine"
        )
    if implementation not in (None, "sdpa"):
        raise UserError(
            f"attn_implementation={implementation!r} is not for our models, whose attention is "
            f"always torch's scaled_dot_product_attention, with its flash kernels; leave it out"
        )


def refuse_devices(device_map: dict[str, Any] | None) -> None:
    """Raise UserError for layers that would compute on different GPUs.

    accelerate moves a module's inputs to its device, but the outputs that a plan has in flight pass
    no module. Weights on `cpu` or `disk` are fetched to the device of the others, which works.
    """
    given = {str(each) for each in (device_map or {}).values()} - {"cpu", "disk"}
    found = sorted({_device(each) for each in given})
    if len(found) > 1:
        raise UserError(
            f"device_map puts layers on the devices {', '.join(found)}, and ours compute on one: "
            f"give device_map={{'': 0}}, or, under torchrun, "
            f"distributed_config=DistributedConfig(tp_size={len(found)})"
        )


def _device(name: str) -> str:
    """A device of a device_map by one name: 0 and cuda are cuda:0 on the first GPU."""
    if name == "cuda":
        return f"cuda:{torch.cuda.current_device()}"
    return f"cuda:{name}" if name.isdecimal() else name


def refuse_replicas() -> None:
    """Raise UserError: the replicas of nn.DataParallel would compute with the first one's weights,
    since their `transformer` is the original's."""
    raise UserError(
        "nn.DataParallel cannot replicate our models, and the Trainer uses it in one process with "
        "several GPUs: start with torchrun, or set CUDA_VISIBLE_DEVICES=0"
    )
