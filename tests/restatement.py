"""The architectures once more, written from the equations and not from `ladder`.

Sources: Ladder Residual (Equations 1 and 2, Algorithm 1, sections 4.2 and 5), PaLM's parallel
block, and DESIGN.md's paragraph on Delayed Tensor Parallelism. One process, no communication
library, any float dtype, and as plain as it can be: attention loops over heads, an all-reduce is a
`sum` over a Python list with one entry per rank. Nothing of `ladder` is imported. A wrong lag, a
reduce too many, a mis-scaled partial or a wrong split in the package cannot be repeated here by
sharing code with it.

Weights are a state dict with Hugging Face Llama's names and full shapes; a norm that reads
residuals which differ between ranks has a weight [T, D]. Rank t of T owns the query heads
[t H/T, (t+1) H/T) and the same share of the MLP's columns; query head h reads KV head h KV // H.
Norms are computed in float32 or wider, rotary angles in float32, the rest in the weights' dtype.

One file, so that an equation and all that it is computed by are read in one place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


# The pieces: norm, rotary embedding, one rank's attention, one rank's MLP


def rms_norm(x: Tensor, weight: Tensor, rank: int, eps: float) -> Tensor:
    """x / rms(x) * weight; row `rank` of a weight that each rank has for itself."""
    if weight.dim() == 2:
        weight = weight[rank]
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotary_frequencies(config: Any) -> Tensor:
    """theta ** (-2 i / head_dim), with Llama 3's stretching of the low ones."""
    dim = config.head_dim
    exponent = torch.arange(0, dim, 2).float() / dim
    freqs = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs
    out = []
    old = scaling.original_max_position_embeddings
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        if wavelength < old / scaling.high_freq_factor:
            out.append(freq)
        elif wavelength > old / scaling.low_freq_factor:
            out.append(freq / scaling.factor)
        else:
            smooth = (old / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            out.append((1 - smooth) * freq / scaling.factor + smooth * freq)
    return torch.stack(out)


def rotate(x: Tensor, config: Any) -> Tensor:
    """Rotary embedding of one head, [B, S, head_dim]: dimension i pairs with i + head_dim / 2."""
    positions = torch.arange(x.shape[1]).float()
    angles = positions[:, None] * rotary_frequencies(config)[None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_partial(
    weights: Weights, config: Any, layer: int, x: Tensor, rank: int, ranks: int
) -> Tensor:
    """The partial output of layer `layer`'s attention on rank `rank` of `ranks`."""
    prefix = f"model.layers.{layer}.self_attn."
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def project(name: str, head: int) -> Tensor:
        rows = slice(head * dim, (head + 1) * dim)
        y = x @ weights[prefix + name + ".weight"][rows].T
        bias = weights.get(prefix + name + ".bias")
        return y if bias is None else y + bias[rows]

    def head_norm(name: str, y: Tensor) -> Tensor:
        weight = weights.get(prefix + name + ".weight")
        return y if weight is None else rms_norm(y, weight, rank, config.norm_eps)

    length = x.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    total = torch.zeros_like(x)
    for head in range(rank * heads // ranks, (rank + 1) * heads // ranks):
        kv = head * kv_heads // heads
        query = rotate(head_norm("q_norm", project("q_proj", head)), config)
        key = rotate(head_norm("k_norm", project("k_proj", kv)), config)
        value = project("v_proj", kv)
        scores = query @ key.transpose(1, 2) / math.sqrt(dim)
        mixed = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
        columns = slice(head * dim, (head + 1) * dim)
        total = total + mixed @ weights[prefix + "o_proj.weight"][:, columns].T
    bias = weights.get(prefix + "o_proj.bias")
    return total + bias if bias is not None and rank == 0 else total


def mlp_partial(
    weights: Weights, config: Any, layer: int, x: Tensor, rank: int, ranks: int
) -> Tensor:
    """The partial output of layer `layer`'s MLP on rank `rank` of `ranks`."""
    prefix = f"model.layers.{layer}.mlp."
    width = config.intermediate_size // ranks
    mine = slice(rank * width, (rank + 1) * width)

    def project(name: str) -> Tensor:
        y = x @ weights[prefix + name + ".weight"][mine].T
        bias = weights.get(prefix + name + ".bias")
        return y if bias is None else y + bias[mine]

    gate, up = project("gate_proj"), project("up_proj")
    out = (gate * torch.sigmoid(gate) * up) @ weights[prefix + "down_proj.weight"][:, mine].T
    bias = weights.get(prefix + "down_proj.bias")
    return out + bias if bias is not None and rank == 0 else out


class Run:
    """One forward pass: the sublayers of a model as functions of one rank's residual."""

    def __init__(self, weights: Weights, config: Any, tokens: Tensor, ranks: int) -> None:
        self.weights, self.config, self.T = weights, config, ranks
        self.embedding = weights["model.embed_tokens.weight"][tokens]

    def _norm(self, name: str, x: Tensor, rank: int) -> Tensor:
        return rms_norm(x, self.weights[name], rank, self.config.norm_eps)

    def attention(self, layer: int, x: Tensor, rank: int) -> Tensor:
        """One rank's partial; norm included."""
        normed = self._norm(f"model.layers.{layer}.input_layernorm.weight", x, rank)
        return attention_partial(self.weights, self.config, layer, normed, rank, self.T)

    def mlp(self, layer: int, x: Tensor, rank: int) -> Tensor:
        """One rank's partial; norm included."""
        normed = self._norm(f"model.layers.{layer}.post_attention_layernorm.weight", x, rank)
        return mlp_partial(self.weights, self.config, layer, normed, rank, self.T)

    def both(self, layer: int, x: Tensor, rank: int) -> Tensor:
        """One rank's partial of attention plus MLP behind one norm."""
        normed = self._norm(f"model.layers.{layer}.input_layernorm.weight", x, rank)
        args = (self.weights, self.config, layer, normed, rank, self.T)
        return attention_partial(*args) + mlp_partial(*args)

    def all_reduce(self, sublayer: Callable[..., Tensor], layer: int, x: Tensor) -> Tensor:
        """AllReduce of the partials of a sublayer whose input is the same on every rank."""
        return sum_of([sublayer(layer, x, rank) for rank in range(self.T)])

    def head(self, residuals: list[Tensor]) -> Tensor:
        """Final norm on each rank, mean over the ranks, head."""
        normed = [self._norm("model.norm.weight", x, rank) for rank, x in enumerate(residuals)]
        weight = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return (sum_of(normed) / len(normed)) @ weight.T


def sum_of(tensors: list[Tensor]) -> Tensor:
    """The sum over a list with an entry per rank."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


# The named architectures, each from its own equation


def standard(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """Equation 1: x_i = AllReduce(h_i(x_{i-1})) + x_{i-1}."""
    run = Run(weights, config, tokens, ranks)
    x = run.embedding
    for layer in range(config.num_layers):
        x = run.all_reduce(run.attention, layer, x) + x
        x = run.all_reduce(run.mlp, layer, x) + x
    return run.head([x])


def parallel(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """PaLM, section 2: y = x + MLP(norm(x)) + Attention(norm(x)), with one norm."""
    run = Run(weights, config, tokens, ranks)
    x = run.embedding
    for layer in range(config.num_layers):
        x = x + run.all_reduce(run.both, layer, x)
    return run.head([x])


def hybrid(
    weights: Weights, config: Any, tokens: Tensor, ranks: int, first_ladder_layer: int
) -> Tensor:
    """Equation 1 below `first_ladder_layer`, Algorithm 1 from it on (section 4.2).

    The first ladder layer is handed the last standard MLP's output as its prev_mlp_out, so its
    attention reads a residual without it, as in the paper's converted models.
    """
    run = Run(weights, config, tokens, ranks)
    residual = run.embedding
    prev_attn_out = torch.zeros_like(residual)
    prev_mlp_out = torch.zeros_like(residual)
    for layer in range(first_ladder_layer):
        residual = residual + prev_mlp_out
        residual = residual + run.all_reduce(run.attention, layer, residual)
        prev_mlp_out = run.all_reduce(run.mlp, layer, residual)
    for layer in range(first_ladder_layer, config.num_layers):
        residual = residual + prev_attn_out
        attn_out = run.all_reduce(run.attention, layer, residual)
        residual = residual + prev_mlp_out
        mlp_out = run.all_reduce(run.mlp, layer, residual)
        prev_attn_out, prev_mlp_out = attn_out, mlp_out
    return run.head([residual + prev_attn_out + prev_mlp_out])


def ladder(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """Algorithm 1, line by line, in every layer; what is in flight at the end lands."""
    run = Run(weights, config, tokens, ranks)

    def layer_function(
        layer: int, residual: Tensor, prev_attn_out: Tensor, prev_mlp_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        residual = residual + prev_attn_out  # line 3
        attn_out = run.all_reduce(run.attention, layer, residual)  # lines 5 and 6
        residual = residual + prev_mlp_out  # line 9
        mlp_out = run.all_reduce(run.mlp, layer, residual)  # lines 11 and 12
        return residual, attn_out, mlp_out

    zero = torch.zeros_like(run.embedding)
    residual, attn_out, mlp_out = run.embedding, zero, zero
    for layer in range(config.num_layers):
        residual, attn_out, mlp_out = layer_function(layer, residual, attn_out, mlp_out)
    return run.head([residual + attn_out + mlp_out])


def ladder_equation_2(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """Equation 2: x_i = AllReduce(h_i(x_{i-2})) + x_{i-1}, where x before the first is x_0."""
    run = Run(weights, config, tokens, ranks)
    x = {-1: run.embedding, 0: run.embedding}
    for i in range(1, 2 * config.num_layers + 1):
        sublayer = run.attention if i % 2 else run.mlp
        x[i] = run.all_reduce(sublayer, (i - 1) // 2, x[i - 2]) + x[i - 1]
    return run.head([x[2 * config.num_layers]])


def desync(weights: Weights, config: Any, tokens: Tensor, ranks: int, every: int) -> Tensor:
    """Section 5: of each `every` all-reduces only the last is kept, and the model's last.

    Where it is kept, the residuals of all ranks become their mean plus the sum of the partials.
    """
    run = Run(weights, config, tokens, ranks)
    residuals = [run.embedding] * ranks
    count = 2 * config.num_layers
    for n in range(count):
        sublayer = run.mlp if n % 2 else run.attention
        partials = [sublayer(n // 2, residuals[rank], rank) for rank in range(ranks)]
        if (n + 1) % every == 0 or n + 1 == count:
            summed = sum_of([p + x / ranks for p, x in zip(partials, residuals, strict=True)])
            residuals = [summed] * ranks
        else:
            residuals = [x + p for p, x in zip(partials, residuals, strict=True)]
    return run.head(residuals)


def accumulate(weights: Weights, config: Any, tokens: Tensor, ranks: int, every: int) -> Tensor:
    """One all-reduce for each `every` sublayers, and the model's last, of their plain partials.

    B + (sum over the group and the ranks of o_m^q) is the residual after it. Until then each rank
    reads B + sqrt(T) times its own partials of the group.
    """
    run = Run(weights, config, tokens, ranks)
    shared, group = run.embedding, list[list[Tensor]]()
    count = 2 * config.num_layers
    for n in range(count):
        sublayer = run.mlp if n % 2 else run.attention
        reads = [shared] * ranks
        for partials in group:
            reads = [x + math.sqrt(ranks) * p for p, x in zip(partials, reads, strict=True)]
        group.append([sublayer(n // 2, reads[rank], rank) for rank in range(ranks)])
        if len(group) == every or n + 1 == count:
            shared = shared + sum_of([sum_of(partials) for partials in group])
            group = []
    return run.head([shared])


def accumulate_late(
    weights: Weights, config: Any, tokens: Tensor, ranks: int, every: int, lag: int
) -> Tensor:
    """`accumulate`, but each group's sum is read `lag` sublayers late, but for the final norm.

    Sublayer n of rank r reads E + (sum over groups that ended before sublayer n - lag, and over all
    ranks q, of o_m^q) + sqrt(T) (sum over all other sublayers m < n of o_m^r).
    """
    run = Run(weights, config, tokens, ranks)
    count = 2 * config.num_layers
    partials: list[list[Tensor]] = []
    for n in range(count):
        ended = max(0, (n - lag) // every * every)
        sublayer = run.mlp if n % 2 else run.attention
        shared = sum_of([run.embedding, *(sum_of(each) for each in partials[:ended])])
        own = [
            [math.sqrt(ranks) * each[rank] for each in partials[ended:]] for rank in range(ranks)
        ]
        partials.append(
            [sublayer(n // 2, sum_of([shared, *own[rank]]), rank) for rank in range(ranks)]
        )
    return run.head([sum_of([run.embedding, *map(sum_of, partials)])])


def delayed(weights: Weights, config: Any, tokens: Tensor, ranks: int, delay: int) -> Tensor:
    """DTP-d, as DESIGN.md puts it.

    X_r <- X_r + s_n o_n^r + (sum over q != r of o_{n-d}^q, from n = d on), s_n = sqrt(T) where
    n < d or n >= N - d, else 1.
    """
    run = Run(weights, config, tokens, ranks)
    residuals = [run.embedding] * ranks
    count = 2 * config.num_layers
    partials: list[list[Tensor]] = []
    for n in range(count):
        sublayer = run.mlp if n % 2 else run.attention
        partials.append([sublayer(n // 2, residuals[rank], rank) for rank in range(ranks)])
        scale = math.sqrt(ranks) if n < delay or n >= count - delay else 1.0
        for rank in range(ranks):
            residuals[rank] = residuals[rank] + scale * partials[n][rank]
            if n >= delay:
                for peer in range(ranks):
                    if peer != rank:
                        residuals[rank] = residuals[rank] + partials[n - delay][peer]
    return run.head(residuals)


def no_reduce(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """Equation 1 without its AllReduce, as rank 0 computes it.

    No rank hears of another, so there is no mean over the ranks at the end either.
    """
    run = Run(weights, config, tokens, ranks)
    x = run.embedding
    for layer in range(config.num_layers):
        x = x + run.attention(layer, x, 0)
        x = x + run.mlp(layer, x, 0)
    return run.head([x])


# Any list of records


def landed_before(records: Any) -> list[tuple[int, int, int]]:
    """For each sublayer, and for the final norm: (start, own, peers).

    The residual that it reads is the one that stands before output `start` (the embedding, or what
    the last `residual` reduce left), plus this rank's outputs start..own-1 and the peers' outputs
    start..peers-1. What has landed never leaves again, so own and peers never fall.
    """
    out = []
    start = own = peers = 0
    for n, record in enumerate(records):
        own = max(own, n - record.own_lag)
        peers = max(peers, n - record.peer_lag)
        out.append((start, own, peers))
        if record.reduce == "residual":
            start = own = peers = n + 1
    out.append((start, len(records), len(records)))
    return out


def reduced_by(records: Any) -> dict[int, int]:
    """For each sublayer of an `accumulated` reduce's group: the sublayer that reduces it."""
    found = {}
    for last, record in enumerate(records):
        if record.reduce == "accumulated":
            found[last] = first = last
            while first and records[first - 1].reduce == "none":
                first -= 1
                found[first] = last
    return found


def from_records(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """Any plan: the input of sublayer n is summed anew from the list of all outputs so far."""
    run = Run(weights, config, tokens, ranks)
    records = config.plan.sublayers
    groups = reduced_by(records)
    # outputs[n][rank]: the partial. base[rank]: the embedding, or the last residual reduce's sum.
    outputs: list[list[Tensor]] = []
    base = [run.embedding] * ranks

    def read(start: int, own: int, peers: int, rank: int) -> Tensor:
        x = base[rank]
        for m in range(start, len(outputs)):
            if m in groups and groups[m] < peers:  # the sum over the ranks, own part included
                x = x + sum_of(outputs[m])
                continue
            if m < own:
                x = x + records[m].own_scale * outputs[m][rank]
            if m < peers and records[m].reduce == "output":
                for peer in range(ranks):
                    if peer != rank:
                        x = x + outputs[m][peer]
        return x

    marks = landed_before(records)
    layer = {"attention": 0, "mlp": 0}
    for n, record in enumerate(records):
        residuals = [read(*marks[n], rank) for rank in range(ranks)]
        if record.kind == "attention":
            sublayer, index = run.attention, layer["attention"]
        elif record.kind == "mlp":
            sublayer, index = run.mlp, layer["mlp"]
        else:
            sublayer, index = run.both, layer["attention"]
        for kind in record.kind.split("+"):
            layer[kind] += 1
        outputs.append([sublayer(index, residuals[rank], rank) for rank in range(ranks)])
        if record.reduce == "residual":
            pairs = zip(outputs[n], residuals, strict=True)
            summed = sum_of([record.own_scale * p + x / ranks for p, x in pairs])
            base = [summed] * ranks
    residuals = [read(*marks[-1], rank) for rank in range(ranks)]
    if all(record.reduce == "none" for record in records):
        residuals = residuals[:1]  # see no_reduce
    return run.head(residuals)


def named(name: str, config: Any) -> Callable[..., Tensor] | None:
    """The function written for the preset called `name`, or None where there is none."""
    simple = {"standard": standard, "parallel": parallel, "ladder": ladder, "none": no_reduce}
    if name in simple:
        return simple[name]
    if match := re.fullmatch(r"desync-(\d+)x", name):
        return lambda *args: desync(*args, int(match[1]))
    if match := re.fullmatch(r"accumulate-(\d+)x", name):
        return lambda *args: accumulate(*args, int(match[1]))
    if match := re.fullmatch(r"accumulate-(\d+)x-lag(\d+)", name):
        return lambda *args: accumulate_late(*args, int(match[1]), int(match[2]))
    if match := re.fullmatch(r"dtp-(\d+)", name):
        return lambda *args: delayed(*args, int(match[1]))
    if name == "hybrid":
        return lambda *args: hybrid(*args, config.num_layers // 2)
    if match := re.fullmatch(rf"ladder@(\d+)-{config.num_layers - 1}", name):
        return lambda *args: hybrid(*args, int(match[1]))
    return None


def logits(weights: Weights, config: Any, tokens: Tensor, ranks: int) -> Tensor:
    """The logits [B, S, V] of a model with T = `ranks`, from the records of `config.plan`."""
    return from_records(weights, config, tokens, ranks)
