"""The same sublayers for inference on a GPU: weights packed once, fused kernels for decoding.

`fuse` swaps a placed model's attention, MLP and head modules for these and hands its Reducer the
fused landing. The loop, the plan and the function computed stay the Transformer's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.infer.cache import Cache
from ladder.kernels import add_rms_norm, decode_attention, gate_up, rotary_cache, skinny_linear
from ladder.kernels.linear import MAX_ROWS
from ladder.kernels.norm import MAX_ADDENDS
from ladder.models.config import ModelConfig
from ladder.models.layers import MLP, Attention, RMSNorm, local, rotary_tables, rotate
from ladder.models.reducer import Norm, add_norm
from ladder.models.transformer import Transformer


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed: our kernel for the few rows of decoding."""
    return skinny_linear(x, weight) if len(x) <= MAX_ROWS else F.linear(x, weight)


class FusedAttention(nn.Module):
    """`Attention` with one packed matrix for queries, keys and values.

    A single token per sequence (decoding) goes through the fused kernels and needs no mask; longer
    inputs are prompts from position 0 on, through torch's attention.
    """

    def __init__(self, attention: Attention, table: Tensor) -> None:
        super().__init__()
        weights = [local(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        index = attention.k_proj.held_heads()
        key, value = (w.unflatten(0, (-1, attention.head_dim))[index] for w in weights[1:])
        self.heads = weights[0].shape[0] // attention.head_dim
        self.kv_heads = len(index)
        self.packed = torch.cat((weights[0], key.flatten(0, 1), value.flatten(0, 1)))
        self.output = local(attention.o_proj.weight).contiguous()
        self.layer, self.head_dim, self.table = attention.layer, attention.head_dim, table

    def forward(self, x: Tensor, tables: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        assert mask is None, "fused attention knows what to see from the cache's positions"
        if x.shape[1] > 1:
            return self._prompt(x, tables, cache)
        positions = cache.positions[:, 0]
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        packed = linear(x[:, 0], self.packed)
        q = rotary_cache(packed, self.table, positions, keys, values, self.heads, self.kv_heads)
        out = decode_attention(q, keys, values, positions, self.head_dim**-0.5)
        return linear(out, self.output).unsqueeze(1)

    def _prompt(self, x: Tensor, tables: Tensor, cache: Cache) -> Tensor:
        packed = F.linear(x, self.packed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, tables), rotate(k, tables)
        cache.update(self.layer, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return F.linear(out.transpose(1, 2).flatten(2), self.output)


class FusedMLP(nn.Module):
    """`MLP` with one packed matrix for gate and up, and their product in the same kernel."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.packed = torch.cat((local(mlp.gate_proj.weight), local(mlp.up_proj.weight)))
        self.down = local(mlp.down_proj.weight).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        if len(rows) <= MAX_ROWS:
            inner = gate_up(rows, *self.packed.chunk(2))
        else:
            gate, up = F.linear(rows, self.packed).chunk(2, dim=-1)
            inner = F.silu(gate) * up
        return linear(inner, self.down).view(x.shape)


class FusedHead(nn.Module):
    """The output projection: x [B, S, D] -> logits [B, S, V_local]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return linear(x.flatten(0, 1), self.weight).view(*x.shape[:-1], -1)


def fused_add_norm(
    stream: Tensor, addends: list[tuple[Tensor, float]], norm: Norm
) -> tuple[Tensor, Tensor]:
    """`ladder.models.reducer.add_norm` as one kernel, for a norm with one weight."""
    if not isinstance(norm, RMSNorm) or len(addends) > MAX_ADDENDS:
        return add_norm(stream, addends, norm)
    weight = local(norm.weight).to(stream.dtype).flatten()
    pairs = [(value.flatten(0, 1), factor) for value, factor in addends]
    landed, normed = add_rms_norm(stream.flatten(0, 1), pairs, weight, norm.eps)
    return landed.view(stream.shape), normed.view(stream.shape)


def can_fuse(model: Transformer) -> bool:
    """Whether `fuse` knows this model: no virtual ranks, no biases."""
    config = model.config
    return model.reducer.ranks.held == 1 and not config.attention_bias and not config.mlp_bias


@torch.no_grad()
def fuse(model: Transformer) -> None:
    """Swap in the fused modules; the model's own matrices are freed. For inference alone."""
    assert can_fuse(model)
    device = local(model.model.embed_tokens.weight).device
    places = torch.arange(model.config.max_seq_len, device=device).unsqueeze(0)
    cos, sin = rotary_tables(model.config, places, torch.float32)[:, 0, 0]
    half = model.config.head_dim // 2
    table = torch.cat((cos[:, :half], sin[:, :half]), dim=-1).contiguous()

    def look_up(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
        if positions.shape[1] == 1:  # decoding: the fused kernel reads `table` itself
            return table
        return torch.stack((cos[positions], sin[positions])).unsqueeze(2).to(dtype)

    model.rotary = look_up
    for layer in model.model.layers:
        layer.self_attn = FusedAttention(layer.self_attn, table)
        layer.mlp = FusedMLP(layer.mlp)
    model.lm_head = FusedHead(local(model.lm_head.weight))
    model.reducer.add_norm = fused_add_norm
