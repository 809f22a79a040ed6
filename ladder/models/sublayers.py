"""Sublayers, which fill a block's two slots, and the context that they get from a pass.

A block has two slots, a mixer (`self_attn`) and a feed-forward (`mlp`), named as in Hugging Face's
Llama. The config names the sublayer of each slot. For the shapes see ladder.models.layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from ladder.models.config import ModelConfig
from ladder.models.documents import Packed, attend
from ladder.models.forward_pass import Operators, select_positions
from ladder.models.layers import (
    ColumnParallelLinear,
    KVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    rotate,
)


class KeyValueCache(Protocol):
    """The interface of a cache for attention; `ladder.infer.cache` implements it."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [R * B, heads, S, head_dim]; return all that may be attended to."""
        ...


@dataclass(frozen=True)
class Context:
    """The arguments of a pass's sublayers, which share all of them except the operators.

    tables: the rotary tables, [2, B or 1, 1, S, head_dim]. mask: [R * B, 1, S, keys], true where
    attended, or documents; None: causal. last: [B], the one position of each sequence that the
    last layer must compute. call: runs a sublayer.
    """

    tables: Tensor
    operators: Operators  # no default: torch 2.11's compiler would break the graph at it
    mask: Tensor | Packed | None = None
    cache: KeyValueCache | None = None
    last: Tensor | None = None
    call: Call | None = None

    def using(self, operators: Operators) -> Context:
        """This context with the operators of another sublayer."""
        # Not by `replace`, nor for other operators alone: no compiler traces these.
        return Context(self.tables, operators, self.mask, self.cache, self.last, self.call)


class Sublayer(nn.Module):
    """The module of a slot: the unit that FSDP, activation checkpointing and compilation wrap.

    Subclasses define `compute`. `forward`, which has FSDP's hooks, calls it through the context.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.is_last = layer, layer == config.num_layers - 1

    def forward(self, x: Any, context: Context) -> Any:
        return self.compute(x, context) if context.call is None else context.call(self, x, context)

    def compute(self, x: Any, context: Context) -> Any:
        """The partial, for the pass's `write`, from the result x [(R,) B, S, D] of its `read`.

        A pass may have its own form of both: x is for `column`, and the result is that of `row`.
        """
        raise NotImplementedError

    def wanted(self, x: Any, context: Context) -> Any:
        """The positions of x [(R,) B, S, D] that are needed later."""
        if context.last is None or not self.is_last or x.shape[-2] == 1:
            return x
        return select_positions(x, context.last)


Call = Callable[[Sublayer, Any, Context], Any]


class Attention(Sublayer):
    """Grouped-query causal self-attention on this process's heads.

    With a cache, `mask` ([R * B, 1, S, keys], true where attended) replaces the causal mask;
    without a mask, the tokens are the first of their sequences and attend only to each other.
    Without a cache, a mask restricts attention to documents (see ladder.models.documents).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        size, head_dim = config.hidden_size, config.head_dim
        bias = config.attention_bias or config.qkv_bias
        self.head_dim = head_dim
        self.q_proj = ColumnParallelLinear(size, config.num_heads * head_dim, bias)
        self.k_proj = KVParallelLinear(size, config.num_kv_heads, head_dim, bias)
        self.v_proj = KVParallelLinear(size, config.num_kv_heads, head_dim, bias)
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, size, config.attention_bias)
        # One weight for the heads of all ranks; each rank's gradient is that of its own heads.
        self.q_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def compute(self, x: Tensor, context: Context) -> Any:
        weights = self.q_proj, self.k_proj, self.v_proj
        q, k, v = [self._heads(y) for y in context.operators.column(x, weights)]
        q, k = rotate(self.q_norm(q), context.tables), rotate(self.k_norm(k), context.tables)
        mask, cache = context.mask, context.cache
        if cache is not None:
            held = cache.update(self.layer, k, v)
            k, v = (k, v) if mask is None else held
        if isinstance(mask, Packed):
            out = attend(q, k, v, mask)
        elif mask is not None and q.shape[2] == 1:
            # Queries that share a head of keys become rows, a form that every kernel supports.
            rows = q.unflatten(1, (k.shape[1], -1)).squeeze(3)
            out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
            out = out.flatten(1, 2).unsqueeze(2)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
        out = out.transpose(1, 2).flatten(2)
        out = out.unflatten(0, x.shape[:2]) if x.dim() == 4 else out
        return context.operators.row(self.wanted(out, context), self.o_proj)

    def _heads(self, y: Tensor) -> Tensor:
        """[(R,) B, S, heads * head_dim] -> [R * B, heads, S, head_dim]."""
        y = y.unflatten(-1, (-1, self.head_dim))
        return (y.flatten(0, 1) if y.dim() == 5 else y).transpose(1, 2)


class MLP(Sublayer):
    """SwiGLU on this process's part of the intermediate size."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = ColumnParallelLinear(size, inner, bias)
        self.up_proj = ColumnParallelLinear(size, inner, bias)
        self.down_proj = RowParallelLinear(inner, size, bias)

    def compute(self, x: Tensor, context: Context) -> Any:
        weights = self.gate_proj, self.up_proj
        gate, up = context.operators.column(x, weights)
        return context.operators.row(F.silu(gate) * up, self.down_proj)


MIXERS: dict[str, Callable[[ModelConfig, int], Sublayer]] = {"attention": Attention}
FEED_FORWARDS: dict[str, Callable[[ModelConfig, int], Sublayer]] = {"swiglu": MLP}


class Layer(nn.Module):
    """One block's slots; the plan decides how its sublayers are wired, so it has no forward."""

    def __init__(self, mixer: Sublayer, feed_forward: Sublayer, norms: dict[str, RMSNorm]) -> None:
        super().__init__()
        self.self_attn, self.mlp = mixer, feed_forward
        for name, norm in norms.items():
            self.add_module(name, norm)

    @property
    def slots(self) -> tuple[Sublayer, Sublayer]:
        return self.self_attn, self.mlp

    def sublayer(self, kind: str) -> Callable[[Any, Context], Any]:
        """The function of a record of this kind."""
        if kind == "attention+mlp":
            return self._both
        return self.mlp if kind == "mlp" else self.self_attn

    def _both(self, x: Any, context: Context) -> Any:
        return self.self_attn(x, context) + self.mlp(self.mlp.wanted(x, context), context)

    def norm(self, kind: str) -> nn.Module:
        """The norm of a record of this kind: an RMSNorm, or what PEFT wraps around it."""
        norm = self.post_attention_layernorm if kind == "mlp" else self.input_layernorm
        assert isinstance(norm, nn.Module)
        return norm
