"""The same model for inference on a GPU: weights packed once, fused kernels for decoding.

`fuse` makes it from a model that is on its device: it replaces attention, MLP, embedding and head,
folds the norms' weights into the matrices that read them, and sets a Runtime that decodes with a
`DecodeReducer` (virtual ranks with their own reducer). The loop, the plan and the function computed
stay the Transformer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.comm.capture import Mode
from ladder.comm.capture import mode as current_mode
from ladder.costs import reduce_bytes
from ladder.infer.cache import Cache
from ladder.infer.halves import halve_attention, halve_swiglu
from ladder.infer.packing import held_part, matrices_of, pack
from ladder.infer.refusals import shape_refusals
from ladder.jit import DTYPES, device_name
from ladder.kernels import decode_shapes
from ladder.kernels.attention import decode_attention
from ladder.kernels.choice import embed
from ladder.kernels.limits import MAX_ADDENDS
from ladder.kernels.norm import add_rms_norm
from ladder.kernels.prefill import rotary_prompt
from ladder.models.config import ModelConfig
from ladder.models.eight_bits import BLOCK
from ladder.models.errors import UserError
from ladder.models.forward_pass import Norm, add_norm
from ladder.models.layers import (
    Embedding,
    ParallelLinear,
    RMSNorm,
    local,
    rotary_tables,
    vocabulary_start,
)
from ladder.models.plan import Plan
from ladder.models.quantised import cuts_blocks, matrices
from ladder.models.reducer import Reducer
from ladder.models.runtime import PassFactory
from ladder.models.sublayers import MLP, Attention, Context, Sublayer
from ladder.models.transformer import Parts, Transformer
from ladder.parallel.choose import Choice, choose_decode, choose_prefill
from ladder.parallel.decode import DecodePass, DecodeReducer
from ladder.parallel.dispatch import PREFILL_TRANSPORTS
from ladder.parallel.overlap import Overlap
from ladder.parallel.prefill import FusedPrefill, FusedPrompts, fused_passes
from ladder.parallel.reducers import AsyncReducer, PushReducer
from ladder.parallel.refusals import sharded_refusal
from ladder.parallel.sharded import ShardedReducer

COUNTERS = 2**16  # of decode attention: one for each sequence and head of keys and values


class FusedAttention(Sublayer):
    """`Attention` with one packed matrix (and an optional bias) for queries, keys and values, for
    each rank that the process holds.

    A single token per sequence is a decode step and needs no mask; longer inputs are prompts that
    start at position 0 and use torch's attention. folded: the norm's weight of each held rank, for
    its packed matrix. table: the rotary table of all positions. arrived: the attention
    kernel's counters. halves: in decode steps the output's product takes its input in float16.
    """

    def __init__(
        self, config: ModelConfig, attention: Attention, folded: Sequence[Tensor], table: Tensor,
        arrived: Tensor, halves: bool,
    ) -> None:  # fmt: skip
        super().__init__(config, attention.layer)
        self.held, head_dim = len(folded), attention.head_dim
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads = len(held_part(attention.q_proj, "weight", 0)) // head_dim
        self.kv_heads = len(held_part(attention.k_proj, "weight", 0)) // head_dim
        self.qkv = pack(projections, folded)
        self.bias: Tensor | None = None  # [C], or [R, C]
        if attention.q_proj.bias is not None:
            biases = [
                torch.cat([held_part(each, "bias", r) for each in projections])
                for r in range(self.held)
            ]
            self.bias = torch.stack(biases) if self.held > 1 else biases[0]
        self.gains: tuple[Tensor, Tensor] | None = None
        self.eps = 0.0
        if isinstance(attention.q_norm, RMSNorm):
            self.gains = _gain(attention.q_norm), _gain(attention.k_norm)
            self.eps = attention.q_norm.eps
        self.output = pack([attention.o_proj])
        self.head_dim, self.table, self.arrived = head_dim, table, arrived
        self.halves, self.eight_bits = halves, attention.q_proj.scales is not None
        if halves:
            own = [None] * self.held if self.bias is None else self.bias.view(self.held, -1)
            parts = matrices_of(self.qkv), folded, own, matrices_of(self.output)
            for qkv, gain, bias, output in zip(*parts, strict=True):
                halve_attention(qkv, gain, bias, self.kv_heads * head_dim, output)

    def compute(self, x: Any, context: Context) -> Any:
        assert context.mask is None, "fused attention knows what to see from the cache's positions"
        cache = context.cache
        assert isinstance(cache, Cache)
        (packed,) = context.operators.column(x, (self.qkv,))
        bias = self.bias
        if self.held > 1:  # the kernels take all ranks' rows as sequences
            if bias is not None:
                packed, bias = packed.add_(bias[:, None, None]), None
            packed = packed.flatten(0, 1)
        if packed.shape[1] == 1:
            beside = isinstance(context.operators, DecodePass) and context.operators.beside
            out = self._decode(packed[:, 0], bias, cache, beside).unsqueeze(1)
        else:
            out = self._prompt(packed, bias, cache)
        if self.held > 1:
            out = out.unflatten(0, (self.held, -1))
        return context.operators.row(self.wanted(out, context), self.output)

    def _decode(self, packed: Tensor, bias: Tensor | None, cache: Cache, beside: bool) -> Tensor:
        half = self.halves and decode_shapes.by_halves(len(packed) // self.held)  # as products ask
        return decode_attention(
            packed, self.table, cache.positions[:, 0], cache.keys[self.layer],
            cache.values[self.layer], self.heads, self.head_dim**-0.5, self.arrived, bias,
            self.gains, self.eps, cache.layer_exponents(self.layer),
            gives=torch.float16 if half else None, beside=beside, eight_bits=self.eight_bits,
        )  # fmt: skip

    def _prompt(self, packed: Tensor, bias: Tensor | None, cache: Cache) -> Tensor:
        if bias is not None:
            packed = packed.add_(bias)
        q, k, v = rotary_prompt(
            packed, self.table, cache.keys[self.layer], cache.values[self.layer], self.heads,
            self.kv_heads, self.gains, self.eps, cache.layer_exponents(self.layer),
        )  # fmt: skip
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return out.transpose(1, 2).flatten(2)


class FusedMLP(Sublayer):
    """`MLP` with one packed matrix for gate and up, whose kernel also computes their product."""

    def __init__(
        self, config: ModelConfig, mlp: MLP, folded: Sequence[Tensor], halves: bool
    ) -> None:
        super().__init__(config, mlp.layer)
        self.gate_up = pack([mlp.gate_proj, mlp.up_proj], folded, gated=True)
        self.down = pack([mlp.down_proj])
        if halves:
            parts = matrices_of(self.gate_up), folded, matrices_of(self.down)
            for gate_up, gain, down in zip(*parts, strict=True):
                halve_swiglu(gate_up, gain, down)

    def compute(self, x: Any, context: Context) -> Any:
        (inner,) = context.operators.column(x, (self.gate_up,))
        return context.operators.row(inner, self.down)


class FusedEmbedding(nn.Module):
    """`Embedding` in one kernel."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight, self.vocab_size = embedding.weight, embedding.vocab_size
        self.first = vocabulary_start(embedding.vocab_size, embedding.ranks)
        self.parameter_specs = embedding.parameter_specs

    def forward(self, tokens: Tensor) -> Tensor:
        rows = embed(tokens.flatten(), local(self.weight), self.first, self.vocab_size)
        return rows.unflatten(0, tokens.shape)


def fused_add_norm(
    residual: Tensor, addends: list[tuple[Tensor, float]], norm: Norm
) -> tuple[Tensor, Tensor]:
    """`ladder.models.forward_pass.add_norm` as one kernel."""
    size = residual.shape[-1]
    if not isinstance(norm, RMSNorm) or len(addends) > MAX_ADDENDS:
        return add_norm(residual, addends, norm)
    weight = local(norm.weight).to(residual.dtype)
    assert weight.dim() == 1 or len(weight) == len(residual), "a weight for each virtual rank"
    # A sum has the rows of one rank, which are added to the residual of each virtual rank.
    pairs = [(value.reshape(-1, size).contiguous(), factor) for value, factor in addends]
    rows = residual.reshape(-1, size).contiguous()  # virtual ranks share a residual at first
    landed, normed = add_rms_norm(rows, pairs, weight, norm.eps)
    return landed.view(residual.shape), normed.view(residual.shape)


def fuse_refusal(model: Transformer) -> str:
    """Why `fuse` does not support this model, or nothing."""
    config, stored = model.config, model.model.embed_tokens.weight.dtype
    computes, held = model.runtime.compute_dtype, model.reducer.ranks.held
    cut = any(cuts_blocks(matrix, held) for _, matrix in matrices(model))
    found = {
        **dict.fromkeys(shape_refusals(config), True),
        f"{held} virtual ranks whose inputs are no multiples of a block's {BLOCK}": cut,
        "adapters": model.adapted,
        f"weights in {stored}": stored not in DTYPES,
        f"computing in {computes} with weights in {stored}": computes not in (None, stored),
    }
    return ", ".join(reason for reason, here in found.items() if here)


def can_fuse(model: Transformer) -> bool:
    """Whether `fuse` supports this model."""
    return not fuse_refusal(model)


class InferenceTransformer(Transformer):
    """A Transformer made by `fuse`."""

    def refuse_batch(self, batch: int) -> None:
        """Raise UserError for more sequences than a decode step's attention has counters."""
        attention = self.model.layers[0].self_attn
        most = COUNTERS // (attention.held * attention.kv_heads)
        if batch > most:
            raise UserError(
                f"a batch of {batch} is above the {most} sequences that this model's fused kernels "
                f"decode at once; split it, or load the model for an engine with fused=False"
            )


@torch.no_grad()
def fuse(model: Transformer) -> InferenceTransformer:
    """The fused model, for inference only; `model` is empty afterwards and refuses to run.

    Each original matrix is freed when it is packed, so that the weights are in memory once.
    """
    assert can_fuse(model)
    config, plan, base = model.config, model.config.plan, model.reducer
    weight = local(model.model.embed_tokens.weight)
    table = _rotary_table(config, weight.device)
    # No two layers' attention run at once (`Plan.beside`), so they can share these counters.
    arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=weight.device)
    layers = list(model.model.layers)
    splits = _pieces_of(layers[0].mlp.gate_proj, weight)
    halves = splits is not None
    overlaps: Overlap | None = None
    if isinstance(base, PushReducer) and layers[0].self_attn.q_proj.scales is None:
        where = device_name(weight.device), base.ranks.processes
        overlaps = Overlap(config, *where, weight.dtype, base.group)

    def gains(norm: nn.Module) -> list[Tensor]:
        """The norm's weight for each held rank: the shared one, or the rank's own."""
        gain = _gain(norm)
        return list(gain) if gain.dim() == 2 else [gain] * base.ranks.held

    def mixer(config: ModelConfig, layer: int) -> Sublayer:
        attention, norm = layers[layer].self_attn, layers[layer].input_layernorm
        packed = FusedAttention(config, attention, gains(norm), table, arrived, halves)
        return _take(attention, packed)

    def feed_forward(config: ModelConfig, layer: int) -> Sublayer:
        first = layers[layer].input_layernorm  # `parallel` has one norm
        norm = getattr(layers[layer], "post_attention_layernorm", first)
        return _take(layers[layer].mlp, FusedMLP(config, layers[layer].mlp, gains(norm), halves))

    def head(config: ModelConfig) -> nn.Module:
        # The final mean averages the ranks' normed residuals, so their norm keeps its weight.
        # Without a final mean, the head reads the first rank if ranks differ to the end.
        return pack([model.lm_head], [] if plan.final_mean else gains(model.model.norm)[:1])

    embedding = FusedEmbedding(model.model.embed_tokens)
    parts = Parts(mixer, feed_forward, lambda config: embedding, head)
    fused = InferenceTransformer(config, parts)
    read = dict(model.named_modules())
    for name, norm in fused.named_modules():
        if isinstance(norm, RMSNorm):
            gain = _gain(read[name])
            kept = plan.final_mean and norm is fused.model.norm
            # Matrices in 8 bits have no norm of several ranks folded in.
            kept |= gain.dim() == 2 and model.lm_head.scales is not None
            whole = gain if kept else torch.ones(gain.shape[-1:]).to(weight)
            norm.weight = nn.Parameter(whole, requires_grad=False)
    runtime = replace(
        model.runtime,
        rotary=lambda config, positions, dtype: table,  # the fused kernels index it by position
        add_norm=fused_add_norm,
        pick=PassReducers(
            base,
            plan,
            reduce_bytes(config, 1, weight.element_size()),
            isinstance(model.runtime.pick, FusedPrompts),
            overlaps,
            splits,
        ),
    )
    fused.use(runtime)
    model.lm_head.to_empty(device="meta")  # a tied one is another parameter than the embedding's
    model.use(replace(model.runtime, pick=_refuse))
    return fused.eval()


def _refuse(shape: torch.Size) -> PassFactory:
    raise UserError(
        "an engine has packed this model's weights, and it is empty: use the engine's `model`, "
        "load the model again, or give the engine fused=False"
    )


def _pieces_of(matrix: ParallelLinear, weight: Tensor) -> torch.dtype | None:
    """The dtype of the pieces of inputs by which decode steps multiply weights in 8 bits; None: by
    the inputs. Pieces need bfloat16 and, on a GPU, Hopper, for whose tensor cores products of
    pieces are cut."""
    hopper = not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] == 9
    fits = hopper and matrix.scales is not None and weight.dtype == torch.bfloat16
    return local(matrix.weight).dtype if fits else None


def _take(source: Sublayer, fused: Sublayer) -> Sublayer:
    """`fused`; frees the memory of `source`, whose weights `fused` has packed."""
    source.to_empty(device="meta")
    return fused


def _rotary_table(config: ModelConfig, device: torch.device) -> Tensor:
    """cos, then sin, of each position and frequency: [max_seq_len, head_dim] float32."""
    positions = torch.arange(config.max_seq_len, device=device).unsqueeze(0)
    cos, sin = rotary_tables(config, positions, torch.float32)[:, 0, 0]
    half = config.head_dim // 2
    return torch.cat((cos[:, :half], sin[:, :half]), dim=-1).contiguous()


class PassReducers:
    """The reducers of a fused model's passes: `choice` decides by the tokens' shape [B, S].

    base: the model's own reducer. token_bytes: the size of one token's partial. insists: prompts
    must run by fused operators (`FusedPrompts`). overlaps: see `Overlap`; None: no prompt runs by
    operators that overlap. splits: see `DecodeReducer`.
    """

    def __init__(
        self, base: Reducer, plan: Plan, token_bytes: int, insists: bool = False,
        overlaps: Callable[[int, Mode], bool] | None = None, splits: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.base, self.plan, self.token_bytes = base, plan, token_bytes
        self.insists, self.overlaps = insists, overlaps
        self.push = push = base if isinstance(base, PushReducer) else None
        self.makers: dict[tuple[str, str], PassFactory] = {("async", ""): base, ("push", ""): base}
        if base.ranks.held == 1:
            self.makers["decode", ""] = DecodeReducer(base, plan, splits)
        if push is not None and sharded_refusal(plan, base.ranks) is None:
            for transport in PREFILL_TRANSPORTS:
                sharded = ShardedReducer(base.ranks, push.group, plan, transport)
                self.makers["sharded", transport] = sharded
                if insists or push.dispatch.prefill.fused:
                    fused = FusedPrefill(base.ranks, push.group, plan, transport)
                    self.makers["fused", transport] = fused
        elif insists:
            transport = "" if sharded_refusal(plan, base.ranks) else "collective"
            assert isinstance(base, AsyncReducer), base
            self.makers["fused", transport] = fused_passes(base, plan)

    def choice(self, shape: torch.Size, mode: Mode | None = None) -> Choice:
        """The choice for a pass over tokens of `shape`, with its reason.

        mode: whether the pass runs in a CUDA graph; None: the mode of the current code.
        """
        table, asked = (None, "async") if self.push is None else (self.push.dispatch, "push")
        asked = "fused" if self.insists else asked
        if shape[1] == 1:
            return choose_decode(self.plan, self.base.ranks, shape[0], table, asked)
        mode, overlaps = mode or current_mode(), self.overlaps
        return choose_prefill(
            self.plan, self.base.ranks, shape, self.token_bytes, table, asked,
            overlaps=None if overlaps is None else lambda tokens: overlaps(tokens, mode),
        )  # fmt: skip

    def __call__(self, shape: torch.Size) -> PassFactory:
        choice = self.choice(shape)
        if self.push is not None and choice.transport:
            size = shape.numel() * self.token_bytes
            inside = ", in products" if choice.reducer == "fused" else ""
            self.push.note(size, f"sharded by tokens, {choice.transport}{inside}")
        return self.makers[choice.reducer, choice.transport]


def _gain(norm: nn.Module) -> Tensor:
    """A norm's weight [D]; [R, D] where each of several virtual ranks has its own."""
    assert isinstance(norm, RMSNorm)
    gain = local(norm.weight).clone()
    return gain[0] if gain.dim() == 2 and len(gain) == 1 else gain
