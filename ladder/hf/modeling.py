"""LadderForCausalLM: the Transformer as a model of transformers.

`save_pretrained` writes this file and the ladder modules that it imports into every folder (see
ladder.hf.bundle). So its imports are few, and all at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ladder.hf.attending import LadderCache, given_mask, packed, refuse_forms
from ladder.hf.configuration import LadderConfig
from ladder.hf.refusals import (
    refuse_attention,
    refuse_config,
    refuse_devices,
    refuse_options,
    refuse_replicas,
)
from ladder.models.errors import UserError
from ladder.models.sublayers import Context, Sublayer
from ladder.models.transformer import Transformer, default_parts
from ladder.reader import TensorReader


class LadderModel(nn.Module):
    """The model without its head: `model` of a LadderForCausalLM, as in transformers.

    It has the modules of `transformer.model`, which it replaces.
    """

    def __init__(self, config: LadderConfig, transformer: Transformer) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        for name, part in transformer.model.named_children():
            self.add_module(name, part)
        self.__dict__["transformer"] = transformer  # past nn.Module, which would register it
        transformer.model = self

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        last: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """The head's input [B, S, D], after the final norm.

        attention_mask: [B, past + S], 0 for padding, left or right; or [B, 1, S, keys], true where
        attended. use_cache: the config's by default, False in training. Without a cache, a new
        document begins where position_ids restart, or where the numbers of a mask change (1, 1, 2,
        2): tokens attend only to their own document, and nothing is cached. last: [B], the one
        position per sequence to return: [B, 1, D].
        """
        if input_ids is None or inputs_embeds is not None:
            raise UserError("inputs_embeds is not supported: give only input_ids")
        refuse_forms(input_ids, attention_mask)
        for name, asked in (
            ("output_attentions", output_attentions),
            ("output_hidden_states", output_hidden_states),
        ):
            self._refuse_output(name, asked)
        self._refuse_adapters()
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:  # recomputation would store keys twice
            use_cache, past_key_values = False, None
        transformer, size = self.transformer, input_ids.shape[1]
        past, keys, documents = 0, size, None
        if past_key_values is None and (
            attention_mask is None or attention_mask.shape == input_ids.shape
        ):
            rows = None if position_ids is None else position_ids.expand_as(input_ids)
            documents = packed(rows, attention_mask)
        if documents is not None:
            use_cache, attention_mask = False, None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            past = past_key_values.get_seq_length()
            keys, _ = past_key_values.get_mask_sizes(size, 0)
        longest = transformer.config.max_seq_len
        # generate() would only warn, and then generate noise. Documents are bounded one by one.
        if documents is None and past + size > longest:
            raise UserError(
                f"{int(past)} tokens in the cache and {size} more exceed the model's "
                f"max_seq_len={longest}; shorten the prompt, or lower max_new_tokens"
            )
        mask = given_mask(attention_mask, past, input_ids, keys)
        if position_ids is None and past:
            position_ids = (past + torch.arange(size, device=input_ids.device)).unsqueeze(0)
        cache = None
        if mask is not None or past_key_values is not None:
            cache = LadderCache(past_key_values, transformer.reducer.ranks.held)
        hidden = transformer.hidden(
            input_ids,
            positions=position_ids,
            documents=documents,
            cache=cache,
            mask=mask,
            last=last,
        )
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)

    def _replicate_for_data_parallel(self) -> Any:
        refuse_replicas()

    def _refuse_output(self, name: str, asked: bool | None) -> None:
        if getattr(self.config, name, False) if asked is None else asked:
            raise UserError(f"{name}=True is not supported: leave it out")

    def _refuse_adapters(self) -> None:
        transformer, degree = self.transformer, self.transformer.reducer.ranks.degree
        if degree > 1 and transformer.adapted:
            raise UserError(
                f"adapters support matrices of one rank, and this model has {degree} (plan "
                f"{transformer.config.plan.name!r}); use a plan that does not depend on T and one "
                f"process, or train all weights"
            )


class LadderForCausalLM(PreTrainedModel, GenerationMixin):
    """A Transformer, the attribute `transformer`, as a model of transformers.

    The Transformer's modules are registered here and the Transformer itself is not, so tensors have
    its names, without a prefix.
    """

    config_class = LadderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Attention", "MLP"]  # noqa: RUF012  (what FSDP wraps)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"model": "ladder"}  # noqa: RUF012  (a style that ladder.hf.model registers)
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]  # noqa: RUF012

    def __init__(self, config: LadderConfig) -> None:
        refuse_config(config)
        super().__init__(config)
        self.name_or_path = config.adapter_base
        # With given parts no weights are drawn: `_init_weights` does, unless they are loaded.
        self.wrap(Transformer(config.resolved, default_parts(config.resolved)))
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: Transformer, **fields: Any) -> LadderForCausalLM:
        """A model that wraps `transformer`. fields: further fields of LadderConfig."""
        dtype = transformer.lm_head.weight.dtype
        config = LadderConfig(model=transformer.config.to_dict(), dtype=dtype, **fields)
        with torch.device("meta"):
            model = cls(config)
        model.wrap(transformer)
        return model.eval()

    def wrap(self, transformer: Transformer) -> None:
        self.model, self.lm_head = LadderModel(self.config, transformer), transformer.lm_head
        self.__dict__["transformer"] = transformer  # past nn.Module, which would register it

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "lm_head" and "transformer" in self.__dict__:  # replaced by an adapter
            self.transformer.lm_head = value

    def get_decoder(self) -> LadderModel:
        return self.model

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **options: Any
    ) -> str:
        refuse_attention(attn_implementation)
        return "sdpa"

    def _init_weights(self, module: nn.Module) -> None:
        names = (name for name, each in self.named_modules() if each is module)
        for name, parameter in module.named_parameters(next(names), recurse=False):
            # A parameter on `meta` has its values on disk.
            if not (getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta):
                seed = int(torch.randint(2**62, ()))
                generator = torch.Generator(parameter.device).manual_seed(seed)
                self.transformer.initialise(parameter, name, generator)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **options: Any
    ) -> nn.Module:
        """Not supported: raises UserError unless the size stays the same."""
        size = self.config.resolved.vocab_size
        if new_num_tokens not in (None, size) or options.get("pad_to_multiple_of"):
            raise UserError(
                f"an embedding cannot be resized from {size} to {new_num_tokens} tokens; choose "
                f"special tokens that the tokenizer already has, or resize the original Llama with "
                f"transformers first"
            )
        return self.model.embed_tokens

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Checkpoint attention and MLP separately, without the communication between them."""
        self.model.gradient_checkpointing = enable

        def call(sublayer: Sublayer, x: Tensor, context: Context) -> Any:
            kept = sublayer.layer % every_n_layers or not sublayer.training
            if kept or not torch.is_grad_enabled():
                return sublayer.compute(x, context)
            return gradient_checkpointing_func(sublayer.compute, x, context)

        runtime = self.transformer.runtime
        self.transformer.use(replace(runtime, call=call if enable else None))

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **options: Any) -> Any:
        """transformers' method, with a check that the folder has exactly the model's tensors.

        Raises UserError as `load_model` does, and for quantisation.
        """
        refuse_options(options)
        options.setdefault("use_safetensors", True)
        folder = Path(str(path), options.get("subfolder") or "")
        if (folder / "config.json").is_file() and not options.get("variant"):
            TensorReader(folder, "model").close()  # its errors for missing or .bin files are clear
        return super().from_pretrained(path, *args, **options)

    @staticmethod
    def _load_pretrained_model(
        model: Any,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> Any:
        """Check the files that transformers has found or downloaded before it reads them.

        It would fill missing tensors with random numbers, and accept tied tensors that differ. The
        devices of a device_map are known here, too, and nothing is on them yet.
        expected_keys: the names of an adapter's tensors, when an adapter is loaded.
        """
        refuse_devices(load_config.device_map)
        if checkpoint_files is not None and expected_keys is None:
            files = [Path(file) for file in checkpoint_files]
            reader = TensorReader(files[0].parent, "model", [file.name for file in files])
            reader.check(model.transformer)
            reader.close()
        return PreTrainedModel._load_pretrained_model(
            model, state_dict, checkpoint_files, load_config, expected_keys
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and with `labels` the mean loss of the next tokens, as in LlamaForCausalLM.

        The other arguments are those of LadderModel; kwargs go to the loss function.
        """
        last = None
        if input_ids is not None and type(logits_to_keep) is int and logits_to_keep == 1:
            refuse_forms(input_ids, attention_mask)
            last = torch.full_like(input_ids[:, 0], input_ids.shape[1] - 1)
        out = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_attentions,
            output_hidden_states,
            last,
            return_dict=True,
        )
        hidden = out.last_hidden_state
        if last is None:
            whole = isinstance(logits_to_keep, int)
            hidden = hidden[:, slice(-logits_to_keep, None) if whole else logits_to_keep]
        reducer, size = self.transformer.reducer, self.transformer.config.vocab_size
        logits = reducer.gather(self.lm_head(hidden), size)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=out.past_key_values)
