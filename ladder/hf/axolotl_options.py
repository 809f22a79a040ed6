"""Checks of an Axolotl YAML for our models, without an import of Axolotl (see ladder.hf.axolotl).

Axolotl ignores unknown keys, and goes on without a plugin that it cannot import. Many of its
options replace nn.Linear or the attention of transformers, or hook into a layer's forward. Our
models have none of these (only matrices for LoRA), so such an option would do nothing or fail far
from its cause. Here it is an error, before any data is read.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ladder.checkpoint import read_config
from ladder.config import load_plan
from ladder.hf.configuration import LadderConfig
from ladder.hf_config import TOKEN_IDS
from ladder.models.errors import UserError

PLUGIN = "ladder.hf.axolotl.LadderPlugin"
CONFIG_CLASS = "LadderConfig"
MATRICES = "no quantiser supports our matrices"
ATTENTION = "they compute attention with code of their own, where this option has no effect"
LAYERS = "it hooks into the forward of transformers' layers, which our models do not have"
RANKS = (
    "Axolotl's trainer does not support our models' parallelism, and each rank would train only "
    "its own part; use FSDP (fsdp_version: 2), or ladder finetune"
)
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# Replacements of Axolotl's defaults for adapters: its kernels patch other models, and its merge
# would keep base_model's config.json, which lacks the plan.
WITH_ADAPTERS = {**dict.fromkeys(LORA_KERNELS, False), "merge_method": "legacy"}
REFUSED = {
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "gptq", "qat", "fp8", "use_onebitllms",
         "model_quantization_config", "relora"), MATRICES),
    **dict.fromkeys(
        ("flash_attention", "flex_attention", "xformers_attention", "sage_attention",
         "eager_attention", "s2_attention", "flash_attn_cross_entropy", "flash_attn_fuse_mlp",
         "flash_attn_rms_norm", "flash_optimum", "fused_attn_kernel", "large_head_attention",
         "scaling_softmax", "sdpa_varlen"), ATTENTION),
    **dict.fromkeys(LORA_KERNELS, "they patch the attention and MLPs of transformers' models"),
    **dict.fromkeys(
        ("activation_offloading", "layer_offloading", "selective_checkpointing", "tiled_mlp",
         "use_kernels"), LAYERS),
}  # fmt: skip
SIZES = ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree")
AXOLOTLS = "axolotl.integrations."
# Axolotl's own plugins that work with any model class.
NEUTRAL = ("grokfast", "lm_eval", "spectrum", "swanlab")
WRAPPED = {"Attention", "MLP"}


def check_yaml(options: Mapping[str, Any]) -> None:
    """Raise UserError for a YAML's missing keys, and for options that our models do not support."""
    if options.get("cls_model_config") != CONFIG_CLASS:
        raise UserError(
            f"cls_model_config={options.get('cls_model_config')!r} must be {CONFIG_CLASS!r}: "
            f"otherwise, if Axolotl cannot import {PLUGIN}, it does not stop but trains base_model "
            f"without the plan"
        )
    for name, why in REFUSED.items():
        if options.get(name):
            raise UserError(f"{name}={options[name]!r} is not for our models: {why}; leave it out")
    if options.get("adapter") not in (None, "lora"):
        raise UserError(f"adapter={options['adapter']!r} is not for our models: only lora is")
    if options.get("adapter") and options.get("merge_method") not in (None, "legacy"):
        raise UserError(
            f"merge_method={options['merge_method']!r} would write base_model's config.json, "
            f"without the plan; say legacy"
        )
    for name in SIZES:
        if (options.get(name) or 1) != 1:
            raise UserError(f"{name}={options[name]!r} is not for our models: {RANKS}")
    attention = options.get("attn_implementation")
    if attention not in (None, "sdpa"):
        raise UserError(
            f"attn_implementation={attention!r} is not for our models: {ATTENTION}; say sdpa"
        )
    if options.get("gradient_checkpointing") not in (None, False, True):
        value = options["gradient_checkpointing"]
        raise UserError(f"gradient_checkpointing={value!r} is not for our models: true or false")
    model = options.get("model_type") or options.get("type_of_model")
    if model not in (None, "AutoModelForCausalLM"):
        raise UserError(f"model_type={model!r} would load another model; leave it out")
    for name in ("model_config", "overrides_of_model_config"):
        for key in options.get(name) or {}:
            if key not in TOKEN_IDS:
                hint = "use ladder_plan" if key == "plan" else "our models do not read it"
                raise UserError(
                    f"{name}.{key} is ignored: {hint}; only {', '.join(TOKEN_IDS)} are for {name}"
                )
    _check_fsdp(options)


def _check_fsdp(options: Mapping[str, Any]) -> None:
    config = options.get("fsdp_config") or {}
    version = options.get("fsdp_version") or config.get("fsdp_version") or config.get("version")
    if (options.get("fsdp") or config) and str(version) != "2":
        raise UserError(f"fsdp_version={version!r} must be 2 for our models")
    for name in ("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap"):
        wrapped = config.get(name)
        if wrapped and {each.strip() for each in wrapped.split(",")} != WRAPPED:
            raise UserError(
                f"fsdp_config.{name}={wrapped!r} must be 'Attention,MLP': our layers have no "
                f"forward of their own, in which FSDP would gather their shards"
            )


def check_plugins(named: Iterable[str], loaded: Mapping[str, Any]) -> None:
    """Raise UserError for a plugin that Axolotl failed to import, or that patches other models."""
    for name in named:
        if name not in loaded:
            raise UserError(
                f"plugins: {name} could not be imported (the reason is above), and Axolotl would "
                f"go on without it; install what it needs, or take it out"
            )
        module = type(loaded[name]).__module__
        if module.startswith(AXOLOTLS) and module[len(AXOLOTLS) :].split(".")[0] not in NEUTRAL:
            raise UserError(
                f"plugins: {name} patches other models and does not support ours; take it out"
            )


def check_yaml_keys(
    given: Mapping[str, Any], schemas: Sequence[Any], also: Collection[str] = (), where: str = ""
) -> None:
    """Raise UserError for a key that Axolotl would ignore, also in the entries of data sets.

    schemas: the pydantic models of the keys. also: further keys, of the command line.
    """
    known = set(also)
    for schema in schemas:
        for name, field in schema.model_fields.items():
            aliases = getattr(field.validation_alias, "choices", [field.validation_alias])
            known |= {name, field.alias, *aliases} - {None}
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, sorted(map(str, known)), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; take it out"
            raise UserError(f"{where}{key} is unknown to Axolotl, which would ignore it{hint}")
        if not where and key in ("datasets", "test_datasets", "pretraining_dataset"):
            inner = {each for s in schemas for each in _models(s.model_fields[key].annotation)}
            for i, entry in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(entry, Mapping):
                    check_yaml_keys(entry, sorted(inner, key=str), where=f"{key}[{i}].")


def _models(annotation: Any) -> set[Any]:
    """The pydantic models that an annotation names."""
    if hasattr(annotation, "model_fields"):
        return {annotation}
    return {each for part in typing.get_args(annotation) for each in _models(part)}


@dataclass(frozen=True)
class Planned:
    """The object that Axolotl finds under the name LadderConfig; it adds the YAML's plan."""

    plan: Any
    tp_degree: int | None
    adapter: str | None
    sequence_len: int | None
    checkpoint: Path | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Planned:
        plan = options.get("ladder_plan")
        return cls(
            load_plan(dict(plan) if isinstance(plan, Mapping) else plan),
            options.get("ladder_tp_degree"),
            options.get("adapter"),
            options.get("sequence_len"),
            resumed(options),
        )

    def from_pretrained(self, source: Any, **options: Any) -> LadderConfig:
        """The config of `source` with the plan. Raises UserError if they do not fit together."""
        revision = {name: options[name] for name in ("revision",) if name in options}
        model_type = PreTrainedConfig.get_config_dict(source, **revision)[0].get("model_type")
        if model_type is None:
            raise UserError(
                f"base_model={str(source)!r} is no model folder: it has no config.json; for a run "
                f"of ladder, use the folder that ladder convert RUN --out OUT writes"
            )
        if self.plan is None and model_type != LadderConfig.model_type:
            raise UserError(
                f"ladder_plan is missing, and base_model={str(source)!r} is a {model_type} folder "
                f"without a plan; give one, such as ladder_plan: hybrid, or standard for no change"
            )
        given = {"plan": self.plan, "tp_degree": self.tp_degree}
        config: LadderConfig = LadderConfig.from_pretrained(source, **options, **given)
        if self.adapter and config.resolved.plan.depends_on_tp:
            raise UserError(
                f"adapter={self.adapter!r} is for plans that do not depend on T, and "
                f"{config.resolved.plan.name!r} does; leave it out"
            )
        longest = config.resolved.max_seq_len
        if (self.sequence_len or 0) > longest:
            raise UserError(
                f"sequence_len={self.sequence_len} is longer than the model's {longest}; shorten "
                f"it, or raise max_position_embeddings in its config.json"
            )
        if self.checkpoint is not None:
            old = read_config(self.checkpoint)
            if old.plan.sublayers != config.resolved.plan.sublayers:
                raise UserError(
                    f"ladder_plan={self.plan!r} is not the plan of {self.checkpoint}, from which "
                    f"the run resumes ({old.plan.name!r}); give that, or another output_dir"
                )
        return config


def resumed(options: Mapping[str, Any]) -> Path | None:
    """The checkpoint from which Axolotl will resume, or None if there is none on this machine."""
    named = options.get("resume_from_checkpoint")
    if not named and options.get("auto_resume_from_checkpoints") and options.get("output_dir"):
        found = Path(options["output_dir"]).glob("checkpoint-*")
        steps = {int(p.name[11:]): p for p in found if p.name[11:].isdigit()}
        named = steps[max(steps)] if steps else None
    if not isinstance(named, str | Path) or not (Path(named) / "config.json").is_file():
        return None
    return Path(named)
