"""The modules that hold parameters, each on the shards of the ranks that a process holds.

Shapes: B sequences, S tokens, D hidden_size, R held ranks (Ranks.held). If R > 1, every hidden
state has a leading dimension: x is [R, B, S, D]. Weights have Hugging Face's names, layouts and
full shapes; a process holds its rows (or columns) of them, of which virtual ranks are views.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.models.config import ModelConfig
from ladder.models.parameters import Initialisation, ParameterSpec
from ladder.models.ranks import Ranks
from ladder.models.rotary import rotary_frequencies
from ladder.models.storage import dequantise, near


def local(parameter: Any) -> Tensor:
    """This process's shard: the parameter itself, or a DTensor's local part (differentiably)."""
    # Not by type: that needs torch.distributed, which some builds lack.
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard


class ParallelLinear(nn.Linear):
    """A matrix that is split over the ranks; the column and row parallel ones are below.

    It is an nn.Linear so that adapters (PEFT's LoRA) find it; these support only one rank.
    scales: the scales of a weight that is stored in 8 bits (see ladder.models.quantised), or None.
    rounds: whether each token of a prompt is rounded to fp8 before it is multiplied.
    """

    rounds = False

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_parameter("scales", None)
        self.ranks = Ranks()

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """This process's shard of the weight, in `dtype`."""
        if self.scales is None:
            return local(self.weight).to(dtype)
        return dequantise(local(self.weight), local(self.scales), dtype)

    def inputs(self, x: Tensor) -> Tensor:
        """x [..., S, in] as the product reads it: with `rounds`, prompts are rounded to fp8."""
        return near(x, "fp8") if self.rounds and x.shape[-2] > 1 else x

    def product(self, x: Tensor, out: Tensor) -> Tensor:
        """x [B, S, in] times this process's shard, without a bias, written to `out` [B, S, out]."""
        weight = self.matrix(x.dtype)
        torch.mm(self.inputs(x).flatten(0, 1), weight.t(), out=out.flatten(0, 1))
        return out

    def reset_parameters(self) -> None:
        """Do nothing: Transformer.initialise knows how deep the model is."""

    def held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """The matrix [out, in] that this process multiplies by, and the bias if there is one."""
        bias = None if self.bias is None else local(self.bias).to(dtype)
        return self.matrix(dtype), bias


class ColumnParallelLinear(ParallelLinear):
    """Split by output: x [(R,) B, S, in] -> this process's outputs, [(R,) B, S, out / T]."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {
            "weight": ParameterSpec(Initialisation.NORMAL, decay=True, split=0, reads_norm=True),
            "scales": ParameterSpec(Initialisation.ONES, decay=False, split=0),
            "bias": ParameterSpec(Initialisation.ZEROS, decay=False, split=0),
        }

    def forward(self, x: Tensor) -> Tensor:
        return self.columns(self.inputs(x), *self.held(x.dtype))

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.ranks.held == 1:
            return F.linear(x, weight, bias)
        weight = weight.unflatten(0, (self.ranks.held, -1))
        y = torch.einsum("rbsd,rod->rbso", x, weight)
        return y if bias is None else y + bias.view(self.ranks.held, 1, 1, -1)


class RowParallelLinear(ParallelLinear):
    """Split by input: x [(R,) B, S, in / T] -> each rank's partial, [(R,) B, S, out].

    The bias, if any, is added once, by rank 0.
    """

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        blocks = self.scales is not None and self.scales.dim() == 2  # of columns
        return {
            "weight": ParameterSpec(Initialisation.RESIDUAL, decay=True, split=1),
            "scales": ParameterSpec(Initialisation.ONES, decay=False, split=1 if blocks else None),
            "bias": ParameterSpec(Initialisation.ZEROS, decay=False, split=None),
        }

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held(x.dtype)
        x = self.inputs(x)
        # Other ranks multiply the bias by 0, so that every rank has a gradient to sum.
        bias = None if bias is None else bias * (self.ranks.first == 0)
        if self.ranks.held == 1:
            y = F.linear(x, weight)
            return y if bias is None else y + bias
        weight = weight.unflatten(1, (self.ranks.held, -1))
        y = torch.einsum("rbsi,dri->rbsd", x, weight)
        return y if bias is None else torch.cat((y[:1] + bias, y[1:]))


class KVParallelLinear(ColumnParallelLinear):
    """A column parallel matrix whose outputs are key or value heads, possibly fewer than ranks.

    Rank t of T uses heads t * H / T onwards. If the processes do not divide the heads, each holds
    all heads; otherwise each holds its own.
    """

    def __init__(self, inputs: int, heads: int, head_dim: int, bias: bool) -> None:
        super().__init__(inputs, heads * head_dim, bias)
        self.heads, self.head_dim = heads, head_dim

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        specs = super().parameter_specs()
        return {name: replace(spec, heads=self.heads) for name, spec in specs.items()}

    def held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().held(dtype)
        index = self.held_heads()
        if index != list(range(weight.shape[0] // self.head_dim)):
            weight = self.pick(weight, index)
            bias = None if bias is None else self.pick(bias, index)
        return weight, bias

    def pick(self, value: Tensor, index: list[int]) -> Tensor:
        """The heads of `index`, in its order. A CUDA graph cannot record indexing by a list."""
        heads = value.unflatten(0, (-1, self.head_dim))
        return torch.cat([heads[i] for i in index])

    def held_heads(self) -> list[int]:
        """The heads of the held ranks, in order, numbered from the first stored head."""
        ranks = self.ranks
        each = max(1, self.heads // ranks.degree)
        held = range(ranks.first, ranks.first + ranks.held)
        heads = [t * self.heads // ranks.degree + i for t in held for i in range(each)]
        stored_from = (
            0 if self.heads % ranks.processes else ranks.process * self.heads // ranks.processes
        )
        return [head - stored_from for head in heads]


class RMSNorm(nn.Module):
    """Root-mean-square norm; with `per_rank` a weight for each of T ranks, [T, D]."""

    def __init__(self, size: int, eps: float, per_rank: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((per_rank, size) if per_rank else size))
        self.eps = eps

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        split = 0 if self.weight.dim() == 2 else None  # per rank, or shared
        return {"weight": ParameterSpec(Initialisation.ONES, decay=False, split=split)}

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).to(x.dtype)
        if weight.dim() == 2:
            weight = weight[:, None, None, :] if x.dim() == 4 else weight[0]
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x, weight.shape[-1:], None, self.eps) * weight


class Embedding(nn.Embedding):
    """Token embedding, split by vocabulary over the processes: tokens [B, S] -> partial [B, S, D].

    A token of another process gives zeros; the sum over the processes is the embedding. A token
    outside the vocabulary gives NaN; torch's own lookup would make the GPU unusable. It is an
    nn.Embedding so that adapters find it.
    """

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__(vocab_size, size)
        self.vocab_size = vocab_size
        self.ranks = Ranks()

    def reset_parameters(self) -> None:
        """Do nothing, as a ParallelLinear."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec(Initialisation.EMBEDDING, decay=True, split=0)}

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        if self.ranks.processes == 1:
            return F.embedding(tokens, weight)
        first = vocabulary_start(self.vocab_size, self.ranks)
        inside = (tokens >= first) & (tokens < first + weight.shape[0])
        rows = F.embedding((tokens - first).where(inside, 0), weight)
        unknown = (tokens < 0) | (tokens >= self.vocab_size)
        return rows * inside.to(rows.dtype).masked_fill(unknown, torch.nan).unsqueeze(-1)


def vocabulary_start(vocab_size: int, ranks: Ranks) -> int:
    """The first row of the vocabulary that this process holds: equal chunks, the last shorter."""
    return ranks.process * math.ceil(vocab_size / ranks.processes)


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin for `positions` [B or 1, S]: [2, B or 1, 1, S, head_dim], computed in float32."""
    frequency, factor = rotary_frequencies(config, positions.device)
    angle = positions[:, None, :, None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return torch.stack((angle.cos() * factor, angle.sin() * factor)).to(dtype)


def rotate(x: Tensor, tables: Tensor) -> Tensor:
    """Apply rotary embedding to x [B, heads, S, head_dim], halves paired as Hugging Face does."""
    left, right = x.chunk(2, dim=-1)
    return x * tables[0] + torch.cat((-right, left), dim=-1) * tables[1]
