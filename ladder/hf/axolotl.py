"""A plugin that makes our models known to Axolotl:

    plugins: [ladder.hf.axolotl.LadderPlugin]
    cls_model_config: LadderConfig
    base_model: a-llama-folder    # or one of ours
    ladder_plan: hybrid           # what ladder takes as a plan
    ladder_tp_degree: null        # where the plan depends on T
    ladder_float32_weights: true  # with bf16: true, which else rounds weights and all updates
    adapter: lora                 # if wanted; `axolotl merge-lora` then writes a folder of ours

configs/axolotl/paper-sft.yaml is a whole one. What Axolotl would ignore is an error: see
ladder.hf.axolotl_options. Tried with Axolotl 0.19.0, which pins transformers 5.16.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from ladder.hf import LadderForCausalLM
from ladder.hf.axolotl_options import (
    CONFIG_CLASS,
    WITH_ADAPTERS,
    Planned,
    check,
    check_keys,
    check_plugins,
)
from ladder.models.errors import UserError

try:
    import axolotl.cli.args
    from axolotl.integrations.base import BasePlugin, PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.logging import get_logger
    from pydantic import BaseModel, Field
except ImportError as error:  # Axolotl prints an ImportError of a plugin and goes on without it
    raise UserError(
        f"ladder.hf.axolotl is a plugin of Axolotl 0.19, which cannot be imported here ({error})"
    ) from error

LOG = get_logger(__name__)


class LadderArgs(BaseModel):
    """The keys that the plugin adds to a YAML."""

    ladder_plan: Any = Field(
        default=None,
        json_schema_extra={"description": "A preset, presets on layers, a YAML file, or records"},
    )
    ladder_tp_degree: int | None = Field(
        default=None, json_schema_extra={"description": "T, for plans that depend on it"}
    )
    ladder_float32_weights: bool = Field(
        default=False, json_schema_extra={"description": "Weights of float32 under bf16: true"}
    )


class LadderPlugin(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.{LadderArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Check the YAML, as it was written, and give `cls_model_config` its meaning.

        Axolotl takes config classes from transformers by name, with no options.
        """
        check_plugins(cfg.get("plugins") or [], PluginManager.get_instance().plugins)
        if "model_config_type" not in cfg:  # or Axolotl has added what it found out (ray)
            check_keys(cfg, [merge_input_args()[1]], _command_line())
        check(cfg)
        if cfg.get("adapter"):
            cfg.update(WITH_ADAPTERS)
        setattr(transformers, CONFIG_CLASS, Planned.of(cfg))

    def on_config_validation_error(self, cfg: Any) -> None:
        vars(transformers).pop(CONFIG_CLASS, None)

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Make sure that it is our model, under the plan that was asked for, whatever led here."""
        wished = Planned.of(cfg).from_pretrained(cfg.base_model_config or cfg.base_model).resolved
        if not isinstance(model, LadderForCausalLM) or model.transformer.config != wished:
            raise UserError(f"Axolotl has built a {type(model).__name__} of another plan or shape")
        LOG.info(f"ladder: plan {wished.plan.name!r}, {wished.num_layers} layers")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Keep the residual stream in bfloat16, as `ladder finetune` does, and weights in float32.

        Axolotl makes embeddings float32 where it does not shard; the stream would follow them, and
        the kernel that packed documents have on GPUs wants bfloat16.
        """
        if cfg.ladder_float32_weights:
            model.float()
        if cfg.torch_dtype is torch.bfloat16:
            model.transformer.compute_dtype = torch.bfloat16


def _command_line() -> set[str]:
    """Options of its commands, which Axolotl puts among the YAML's keys."""
    classes = [each for each in vars(axolotl.cli.args).values() if dataclasses.is_dataclass(each)]
    return {field.name for each in classes for field in dataclasses.fields(each)}
