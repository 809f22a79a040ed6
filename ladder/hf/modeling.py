"""The Transformer as transformers has its models: a config, and a model that can generate.

This file goes along with every folder that `save_pretrained` writes, with the files of ours that it
imports (see ladder.hf.bundle). So it imports no more than it needs, and all of that at its top.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ladder.convert.huggingface import config_from_huggingface
from ladder.models.config import ModelConfig
from ladder.models.documents import starts_of
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer, tensor_shapes

# What is kept of another architecture's config.json.
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


class LadderConfig(PreTrainedConfig):
    """The config.json of a folder of ours: `model` holds the fields of ModelConfig.

    `LadderConfig.from_pretrained` reads what config_from_huggingface does as well, and takes `plan`
    and `tp_degree`, which replace the folder's own.
    """

    model_type = "ladder"
    has_no_defaults_at_init = True
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers' way)

    model: dict | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.model, dict):
            raise UserError(f"model={self.model!r} of a LadderConfig must be ModelConfig's fields")
        config = ModelConfig.from_dict(self.model)
        config.refuse_bound()
        self.model = config.to_dict()
        super().__post_init__(**kwargs)

    @property
    def resolved(self) -> ModelConfig:
        assert self.model is not None
        return ModelConfig.from_dict(self.model)

    @classmethod
    def get_config_dict(cls, path: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As transformers', and another architecture's config.json translated."""
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
            config_dict = {**config_dict, "model": rewired(model, plan, tp_degree)}
        elif tp_degree is not None:
            raise UserError(f"tp_degree={tp_degree} goes with a plan; give plan= too")
        return super().from_dict(config_dict, **kwargs)


def _field(name: str) -> property:
    return property(lambda config: config.model[name])


for _theirs, _ours in {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "tie_word_embeddings": "tie_embeddings",
}.items():  # what transformers asks of any config
    setattr(LadderConfig, _theirs, _field(_ours))


def rewired(model: Any, plan: Any, tp_degree: int | None) -> dict[str, Any]:
    """The fields `model` of a config with another plan, for which its weights need no change."""
    old = ModelConfig.from_dict(model)
    new = ModelConfig.from_dict({**old.to_dict(), "plan": plan, "tp_degree": tp_degree})
    new.refuse_bound()
    if tensor_shapes(old) != tensor_shapes(new):
        raise UserError(
            f"plan={new.plan.name!r} has other norms than {old.plan.name!r}, which the folder "
            f"holds; convert the folder first: ladder convert FOLDER --plan PLAN --out OUT"
        )
    return new.to_dict()


class LadderCache:
    """transformers' cache as the Transformer asks for one; with None, tokens see each other alone.

    Virtual ranks lie side by side as heads there, so that the first dimension is the batch, which
    beam search reorders.
    """

    def __init__(self, cache: Any, held: int) -> None:
        self.cache, self.held = cache, held

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return keys, values
        if self.held == 1:
            return self.cache.update(keys, values, layer)
        stored = self.cache.update(self._as_heads(keys), self._as_heads(values), layer)
        return self._as_rows(stored[0]), self._as_rows(stored[1])

    def _as_heads(self, x: Tensor) -> Tensor:
        """[R * B, heads, S, head_dim] -> [B, R * heads, S, head_dim]."""
        return x.unflatten(0, (self.held, -1)).transpose(0, 1).flatten(1, 2)

    def _as_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.held, -1)).transpose(0, 1).flatten(0, 1)


def attended(mask: Tensor | None, past: Any, tokens: Tensor, keys: int) -> Tensor:
    """What `tokens` [B, S], after `past` others, may see of `keys` places: [B, 1, S, keys], bool.

    mask: [B, past + S], 0 where there is padding. Padding sees itself, for to see nothing has no
    softmax; nothing sees it.
    """
    batch, size = tokens.shape
    places = torch.arange(keys, device=tokens.device)
    own = past + torch.arange(size, device=tokens.device)[:, None]
    seen = (places <= own)[None, None].expand(batch, 1, size, keys)
    if mask is None:
        return seen
    kept = nn.functional.pad(mask[:, :keys].bool(), (0, max(0, keys - mask.shape[1])), value=True)
    return seen & kept[:, None, None, :] | (places == own)


def packed(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Where documents begin in rows [B, S] that hold several: see document_starts; else None.

    A document begins where `positions` [B, S] do not go on by one, or where the numbers of `mask`
    [B, S] change; 0 there is padding, within which nothing counts, and which sees itself alone.
    """
    given = positions if mask is None else mask
    if given is None:
        return None
    begins = torch.ones_like(given, dtype=torch.bool)
    after = torch.zeros_like(begins[:, 1:])
    if positions is not None:
        after = positions.diff() != 1
    inside = after
    if mask is not None:
        changes = mask[:, 1:] != mask[:, :-1]
        inside = (after | changes) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
        after = after | changes
    if not inside.any():
        return None
    begins[:, 1:] = after
    return starts_of(begins)


class LadderForCausalLM(PreTrainedModel, GenerationMixin):
    """`transformer`, with the names of its tensors, as one of transformers' models.

    Its modules are this one's too, and it is none itself, so that no name has a prefix.
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
        super().__init__(config)
        self.wrap(Transformer(config.resolved))
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def from_transformer(cls, transformer: Transformer, **fields: Any) -> LadderForCausalLM:
        """The model that computes by `transformer`; fields: further ones of LadderConfig."""
        dtype = transformer.lm_head.weight.dtype
        config = LadderConfig(model=transformer.config.to_dict(), dtype=dtype, **fields)
        with torch.device("meta"):
            model = cls(config)
        model.wrap(transformer)
        return model.eval()

    def wrap(self, transformer: Transformer) -> None:
        self.model, self.lm_head = transformer.model, transformer.lm_head
        # As nn.Embedding has it, for trainers that compare it with the tokenizer's size.
        self.model.embed_tokens.num_embeddings = transformer.config.vocab_size
        for module in (self, self.model):  # past nn.Module, which would register it
            module.__dict__["transformer"] = transformer

    def _init_weights(self, module: nn.Module) -> None:
        names = (name for name, each in self.named_modules() if each is module)
        for name, parameter in module.named_parameters(next(names), recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                seed = int(torch.randint(2**62, ()))
                generator = torch.Generator(parameter.device).manual_seed(seed)
                self.transformer.initialise(parameter, name, generator)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **options: Any
    ) -> nn.Module:
        """Refused: raises UserError unless the size stays as it is."""
        size = self.config.resolved.vocab_size
        if new_num_tokens not in (None, size) or options.get("pad_to_multiple_of"):
            raise UserError(
                f"an embedding of {new_num_tokens} tokens is wanted and the model has {size}; "
                f"choose special tokens that the tokenizer has already, or resize the model as "
                f"transformers' Llama first"
            )
        return self.model.embed_tokens

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Checkpoint attention and MLP, each on its own: what is communicated stays outside."""
        self.gradient_checkpointing = enable
        for i, layer in enumerate(self.model.layers):
            for sublayer in (layer.self_attn, layer.mlp):
                sublayer.__dict__.pop("forward", None)
                if enable and i % every_n_layers == 0:
                    run = functools.partial(_checkpointed, sublayer, gradient_checkpointing_func)
                    sublayer.forward = run

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
        """Logits, and with `labels` the mean loss of the next tokens; as LlamaForCausalLM's.

        attention_mask: [B, past + S], 0 where there is padding, left or right; or [B, 1, S, keys],
        true where attended. use_cache: by default the config's, and false in training. kwargs are
        the loss's. Without a cache, position_ids that begin again begin another document, and so
        do the numbers of a mask that change (1, 1, 2, 2): nothing sees another one, and nothing is
        cached then.
        """
        if input_ids is None or inputs_embeds is not None:
            raise UserError("inputs_embeds is not supported: give input_ids alone")
        for name, given in (
            ("output_attentions", output_attentions),
            ("output_hidden_states", output_hidden_states),
        ):
            if getattr(self.config, name, False) if given is None else given:
                raise UserError(f"{name}=True is not supported: a ladder's streams are in flight")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:  # a second pass would store keys again
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
        if past + size > longest:  # which generate() only warns of, and goes on with noise
            raise UserError(
                f"{int(past)} tokens in the cache and {size} more are longer than the model's "
                f"max_seq_len={longest}; shorten the prompt, or lower max_new_tokens"
            )
        if attention_mask is not None and attention_mask.dim() == 2:
            if attention_mask.shape[1] < past + size:
                raise UserError(
                    f"attention_mask has {attention_mask.shape[1]} places and there are "
                    f"{past + size} tokens, those in the cache included; give one for each"
                )
            if not past and attention_mask[:, :size].all():
                attention_mask = None  # which has a faster kernel
        mask = attention_mask
        if mask is None or mask.dim() == 2:
            plain = mask is None and not past
            mask = None if plain else attended(mask, past, input_ids, keys)
        if position_ids is None and past:
            position_ids = (past + torch.arange(size, device=input_ids.device)).unsqueeze(0)
        cache = None
        if mask is not None or past_key_values is not None:
            cache = LadderCache(past_key_values, transformer.reducer.ranks.held)
        last = None
        if isinstance(logits_to_keep, int) and logits_to_keep == 1:
            last = torch.full_like(input_ids[:, 0], size - 1)
        logits = transformer(
            input_ids,
            positions=position_ids,
            documents=documents,
            cache=cache,
            mask=mask,
            last=last,
        )
        if last is None and isinstance(logits_to_keep, int):
            logits = logits[:, -logits_to_keep:]
        elif last is None:
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def _checkpointed(sublayer: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
    forward = functools.partial(type(sublayer).forward, sublayer)
    if not (sublayer.training and torch.is_grad_enabled()):
        return forward(*args)
    return function(forward, *args)
