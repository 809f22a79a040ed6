"""A plugin for Axolotl, which then trains our models:

    plugins: [ladder.hf.axolotl.LadderPlugin]
    cls_model_config: LadderConfig
    base_model: a-llama-folder    # or a folder of ours
    ladder_plan: hybrid           # any plan
    ladder_tp_degree: null        # set if the plan depends on T
    ladder_float32_weights: true  # with bf16: true, which otherwise rounds weights and updates
    adapter: lora                 # optional; `axolotl merge-lora` then writes a folder of ours

configs/axolotl/paper-sft.yaml is a complete example. Keys that Axolotl would ignore are errors: see
ladder.hf.axolotl_options. Tested with Axolotl 0.19.0, which pins transformers 5.16.1.
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
    check_plugins,
    check_yaml,
    check_yaml_keys,
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
        """Check the YAML as written, and register the class that `cls_model_config` names.

        Axolotl looks config classes up in transformers by name, and passes no options.
        """
        check_plugins(cfg.get("plugins") or [], PluginManager.get_instance().plugins)
        if "model_config_type" not in cfg:  # with ray, Axolotl has already added keys of its own
            check_yaml_keys(cfg, [merge_input_args()[1]], _command_line())
        check_yaml(cfg)
        if cfg.get("adapter"):
            cfg.update(WITH_ADAPTERS)
        setattr(transformers, CONFIG_CLASS, Planned.of(cfg))

    def on_config_validation_error(self, cfg: Any) -> None:
        vars(transformers).pop(CONFIG_CLASS, None)

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Raise UserError unless Axolotl has built our model with the plan of the YAML."""
        wished = Planned.of(cfg).from_pretrained(cfg.base_model_config or cfg.base_model).resolved
        if not isinstance(model, LadderForCausalLM) or model.transformer.config != wished:
            raise UserError(f"Axolotl has built a {type(model).__name__} of another plan or shape")
        LOG.info(f"ladder: plan {wished.plan.name!r}, {wished.num_layers} layers")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Keep the residual in bfloat16, as `ladder finetune` does, and weights in float32.

        Without sharding Axolotl makes embeddings float32. The residual would then be float32, too,
        but the GPU kernel for packed documents needs bfloat16.
        """
        if cfg.ladder_float32_weights:
            model.float()
        if cfg.torch_dtype is torch.bfloat16:
            transformer = model.transformer
            transformer.use(dataclasses.replace(transformer.runtime, compute_dtype=torch.bfloat16))


def _command_line() -> set[str]:
    """The options of Axolotl's commands, which it merges into the YAML's keys."""
    classes = [each for each in vars(axolotl.cli.args).values() if dataclasses.is_dataclass(each)]
    return {field.name for each in classes for field in dataclasses.fields(each)}
