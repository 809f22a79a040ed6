"""The same sublayers for inference on a GPU: weights packed once, fused kernels for decoding.

`fuse` swaps a placed model's attention, MLP, embedding and head for these, folds the norms' weights
into the matrices that read them, and has its Reducer pick a `DecodeReducer` for the passes that
decode. The loop, the plan and the function computed stay the Transformer's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.costs import reduce_bytes
from ladder.infer.cache import Cache
from ladder.infer.decode import DecodeReducer, Product, Read
from ladder.jit import DTYPES
from ladder.kernels.attention import decode_attention
from ladder.kernels.choice import embed
from ladder.kernels.decode import MAX_ROWS, project
from ladder.kernels.norm import MAX_ADDENDS, add_rms_norm
from ladder.kernels.prefill import rotary_prompt, swiglu
from ladder.models.config import ModelConfig
from ladder.models.layers import (
    MLP,
    Attention,
    Embedding,
    RMSNorm,
    local,
    rotary_tables,
    vocabulary_start,
)
from ladder.models.reducer import Norm, Reducer, add_norm
from ladder.models.transformer import Transformer
from ladder.parallel.reducers import PushReducer
from ladder.parallel.sharded import ShardedReducer, sharded_refusal

# Up to these sizes of a partial the landing's kernel does the copying. A plan that blocks loses no
# SM to it. Tokens up to which kernels, not memory operations, make ranks meet.
DIRECT_BYTES, DIRECT_BYTES_BLOCKING = 8 * 2**20, 16 * 2**20
SMALL_PROMPTS = 16384

Lend = Callable[[tuple[int, int, int], Tensor], Tensor | None]  # Reducer.buffer of this pass


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed: our kernel for the few rows of decoding."""
    if len(x) > MAX_ROWS:
        return F.linear(x, weight)
    y = project(x, weight)
    assert y is not None
    return y


def partial_of(x: Tensor, weight: Tensor, lend: Lend) -> Tensor:
    """x [B, S, K] times weight [D, K] transposed, written where the reducer wants it."""
    # A single place is what a prefill ends with, on another reducer.
    out = lend((x.shape[0], x.shape[1], weight.shape[0]), x) if x.shape[1] > 1 else None
    if out is None:
        return F.linear(x, weight)
    torch.mm(x.flatten(0, 1), weight.t(), out=out.flatten(0, 1))
    return out


class FusedAttention(nn.Module):
    """`Attention` with one packed matrix (and bias, perhaps) for queries, keys and values.

    A single token per sequence (decoding) needs no mask; longer inputs are prompts from position 0
    on, through torch's attention. gain: the norm's weight, folded into the packed matrix.
    """

    def __init__(
        self, attention: Attention, gain: Tensor, table: Tensor, arrived: Tensor, lend: Lend
    ) -> None:
        super().__init__()
        weights = [local(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        index = attention.k_proj.held_heads()
        key, value = (w.unflatten(0, (-1, attention.head_dim))[index] for w in weights[1:])
        self.heads = weights[0].shape[0] // attention.head_dim
        self.kv_heads = len(index)
        packed = torch.cat((weights[0], key.flatten(0, 1), value.flatten(0, 1)))
        self.packed = fold(packed, gain)
        self.bias: Tensor | None = None
        if attention.q_proj.bias is not None:
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            biases = [local(p.bias).unflatten(0, (-1, attention.head_dim)) for p in projections]
            self.bias = torch.cat((biases[0], biases[1][index], biases[2][index])).flatten()
        self.gains: tuple[Tensor, Tensor] | None = None
        self.eps = 0.0
        if isinstance(attention.q_norm, RMSNorm):
            self.gains = _gain(attention.q_norm), _gain(attention.k_norm)
            self.eps = attention.q_norm.eps
        self.output = local(attention.o_proj.weight).contiguous()
        self.layer, self.head_dim, self.table = attention.layer, attention.head_dim, table
        self.arrived, self.lend = arrived, lend

    def forward(
        self, x: Tensor | Read, tables: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor | Product:
        assert mask is None, "fused attention knows what to see from the cache's positions"
        if isinstance(x, Read):
            return Product(self._attend(x.project(self.packed), cache), self.output)
        if x.shape[1] > 1:
            return self._prompt(x, cache)
        return linear(self._attend(linear(x[:, 0], self.packed), cache), self.output).unsqueeze(1)

    def _attend(self, packed: Tensor, cache: Cache) -> Tensor:
        return decode_attention(
            packed, self.table, cache.positions[:, 0], cache.keys[self.layer],
            cache.values[self.layer], self.heads, self.head_dim**-0.5, self.arrived, self.bias,
            self.gains, self.eps,
        )  # fmt: skip

    def _prompt(self, x: Tensor, cache: Cache) -> Tensor:
        q, k, v = rotary_prompt(
            F.linear(x, self.packed, self.bias), self.table, cache.keys[self.layer],
            cache.values[self.layer], self.heads, self.kv_heads, self.gains, self.eps,
        )  # fmt: skip
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return partial_of(out.transpose(1, 2).flatten(2), self.output, self.lend)


class FusedMLP(nn.Module):
    """`MLP` with one packed matrix for gate and up, and their product in the same kernel."""

    def __init__(self, mlp: MLP, gain: Tensor, lend: Lend) -> None:
        super().__init__()
        weights = local(mlp.gate_proj.weight), local(mlp.up_proj.weight)
        self.packed = fold(torch.cat(weights), gain)
        self.down = local(mlp.down_proj.weight).contiguous()
        self.lend = lend

    def forward(self, x: Tensor | Read) -> Tensor | Product:
        if isinstance(x, Read):
            return Product(x.project(*self.packed.chunk(2)), self.down)
        inner = swiglu(F.linear(x, self.packed).flatten(0, 1))
        return partial_of(inner.view(*x.shape[:-1], -1), self.down, self.lend)


class FusedEmbedding(nn.Module):
    """`Embedding` in one kernel."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.first = vocabulary_start(embedding.vocab_size, embedding.ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = embed(tokens.flatten(), local(self.weight), self.first)
        return rows.unflatten(0, tokens.shape)


class FusedHead(nn.Module):
    """The output projection: x [B, S, D] -> logits [B, S, V_local]."""

    def __init__(self, weight: Tensor, gain: Tensor | None) -> None:
        super().__init__()
        self.weight = weight.contiguous() if gain is None else fold(weight, gain)

    def forward(self, x: Tensor | Read) -> Tensor:
        if isinstance(x, Read):
            return x.project(self.weight).unsqueeze(1)
        return linear(x.flatten(0, 1), self.weight).view(*x.shape[:-1], -1)


def fold(weight: Tensor, gain: Tensor) -> Tensor:
    """`weight` [N, D] for inputs that were normed without `gain` [D]."""
    return (weight.float() * gain.float()).to(weight.dtype)


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
    """Whether `fuse` knows this model.

    No virtual ranks, no biases of outputs or MLPs, no adapters, weights of a type that the kernels
    know and compute in.
    """
    config, stored = model.config, model.model.embed_tokens.weight.dtype
    unknown = config.attention_bias or config.mlp_bias or model.adapted or stored not in DTYPES
    return model.reducer.ranks.held == 1 and not unknown and model.compute_dtype in (None, stored)


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
        return table  # the fused kernels know the positions

    model.rotary = look_up
    base, plan = model.reducer, model.config.plan
    base.add_norm = fused_add_norm
    shards: dict[str, ShardedReducer] = {}  # by transport
    if isinstance(base, PushReducer) and sharded_refusal(plan, base.ranks) is None:
        for transport in ("direct", "copy-kernels", "copy"):
            shards[transport] = ShardedReducer(base.ranks, base.group, plan, transport)
            shards[transport].add_norm = fused_add_norm
    itemsize = local(model.model.embed_tokens.weight).element_size()
    token_bytes = reduce_bytes(model.config, 1, itemsize)
    direct_bytes = DIRECT_BYTES_BLOCKING if all(plan.blocking) else DIRECT_BYTES

    def prompts(tokens: int) -> Reducer:
        """What was fastest on 4 H200s, for 1 to 64 prompts of 1024 (benchmarks/prefill.py)."""
        if not isinstance(base, PushReducer) or not shards:
            return base
        size = tokens * token_bytes
        transport = "copy-kernels" if tokens <= SMALL_PROMPTS else "copy"
        transport = "direct" if size <= direct_bytes else transport
        base.note(size, f"sharded by tokens, {transport}")
        return shards[transport]

    def lend(shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
        return base.pick(torch.Size(shape[:2])).buffer(shape, like)

    # Attention runs on one stream: all layers may count arrivals in the same place.
    arrived = torch.zeros(2**16, dtype=torch.int32, device=device)
    for layer in model.model.layers:
        first = layer.input_layernorm
        second = getattr(layer, "post_attention_layernorm", first)  # `parallel` has one norm
        layer.self_attn = FusedAttention(layer.self_attn, _gain(first), table, arrived, lend)
        layer.mlp = FusedMLP(layer.mlp, _gain(second), lend)
        for norm in (first, second):
            norm.weight.fill_(1.0)
    model.model.embed_tokens = FusedEmbedding(model.model.embed_tokens)
    averages = model.config.plan.final_mean  # of normed streams: with the weight
    gain = None if averages else _gain(model.model.norm)
    model.lm_head = FusedHead(local(model.lm_head.weight), gain)
    if not averages:
        model.model.norm.weight.fill_(1.0)
    decode = DecodeReducer(base, plan)

    def pick(shape: torch.Size) -> Reducer:
        if shape[1] == 1 and shape[0] <= MAX_ROWS:
            decode.start()
            return decode
        return prompts(shape.numel()) if shape[1] > 1 else base

    base.picker = pick


def _gain(norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return local(norm.weight).flatten().clone()
