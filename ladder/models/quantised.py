"""Matrices in 8 bits for inference: stored values, and a scale for each output row or block of it.

    weight[n, k] = stored[n, k] * scale[n], after the norm's weight was folded into the columns

fp8: e4m3 (3 bits of mantissa, at most 448). The scale is the least power of two for which the row
fits, so that stored * scale is exact in bfloat16: every path multiplies by the same numbers.
fp8-block: the same, with a scale for each 128 columns of a row, scale[n, k // 128]. Since such a
scale is one row's, rows can be split over ranks and packed in any order; the last block of a row
may be shorter. int8: -127 to 127; the scale is the row's largest magnitude / 127. Rows and blocks
of zeros have the scale 1. The result is the same on every device.

Scales are float32, or for blocks the exponent of a float32: scale = 2^(byte - 127).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.models.errors import UserError
from ladder.models.layers import ParallelLinear, RMSNorm, RowParallelLinear, local
from ladder.models.storage import (
    BLOCK,
    QUANTISED,
    ROUNDING,
    divided,
    exponents,
    pieces,
    scale_dtype,
    scale_shape,
    scales_of,
    widened,
)
from ladder.models.transformer import Transformer


def quantise(
    weight: Tensor, kind: str, name: str, gain: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] as (stored [N, K], scales as `scale_shape` says), on its device.

    kind: a name in QUANTISED. gain: [K], a norm's weight to fold in, in float32. Raises UserError,
    with the parameter's `name`, if a value is not finite.
    """
    stored = weight.new_empty(weight.shape, dtype=QUANTISED[kind])
    scales = weight.new_empty(scale_shape(kind, weight.shape), dtype=scale_dtype(kind))
    for rows in pieces(*weight.shape):
        exact = weight[rows].float()
        if gain is not None:
            exact = exact * gain.float()
        largest = _largest(exact, kind)
        if not largest.isfinite().all():  # the largest of a row with a NaN is NaN
            folded = "" if gain is None else ", times the weight of its norm,"
            raise UserError(
                f"{name}{folded} holds NaN or infinities, and cannot be stored in {kind}; repair "
                f"the model, or leave --weights out"
            )
        found = scales_of(largest, kind)
        scales[rows] = found if found.dim() == 1 else exponents(found)
        stored[rows] = divided(exact, widened(scales[rows], exact.shape[1]), kind)
    return stored, scales


def _largest(exact: Tensor, kind: str) -> Tensor:
    """The largest magnitudes of rows [N], or of their blocks [N, blocks]."""
    magnitude = exact.abs()
    if kind == "fp8-block":
        return F.pad(magnitude, (0, -exact.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).amax(2)
    return magnitude.amax(1) if exact.shape[1] else exact.new_zeros(len(exact))


def error_bound(weight: Tensor, scales: Tensor, kind: str) -> Tensor:
    """The largest error of stored * scale for each element of `weight` [N, K], in float64.

    weight: with the norm folded in. The bound includes the rounding of int8's float32 quotient.
    """
    relative, absolute = ROUNDING[kind]
    magnitude, scale = weight.double().abs(), widened(scales, weight.shape[1]).double()
    return magnitude * (relative + 2.0**-23) + scale * absolute


def matrices(model: Transformer) -> Iterator[tuple[str, ParallelLinear]]:
    """(name, matrix) for the matrices of all sublayers and the head, but not the embedding."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


def norms_of(model: Transformer) -> dict[str, str]:
    """Each matrix that reads a norm whose weight can be folded into it -> that norm, by name.

    A norm with a weight for each of several virtual ranks, and one whose results are averaged over
    the ranks, keeps its weight.
    """
    names = {module: name for name, module in model.named_modules()}
    plan, held = model.config.plan, model.reducer.ranks.held
    found: dict[str, str] = {}

    def add(matrix: str, norm: RMSNorm) -> None:
        if norm.weight.dim() == 1 or held == 1:
            found[matrix] = names[norm]

    for record, layer in zip(plan.sublayers, plan.layers, strict=True):
        block = model.model.layers[layer]
        slots = {"attention": block.self_attn, "mlp": block.mlp}
        for part in record.kind.split("+"):
            for name, _ in slots[part].named_parameters(prefix=names[slots[part]]):
                if model.specs[name].reads_norm:
                    add(name.rpartition(".")[0], block.norm(record.kind))
    if not plan.final_mean:
        add("lm_head", model.model.norm)
    return found


def refuse_sublayers(model: Transformer, kind: str) -> None:
    """Raise UserError for sublayers whose matrices this module does not know."""
    config = model.config
    if (config.mixer, config.feed_forward) != ("attention", "swiglu"):
        raise UserError(
            f"--weights={kind} with mixer={config.mixer!r}, feed_forward={config.feed_forward!r}: "
            f"only matrices of attention and swiglu can be stored so; leave it out"
        )


def held_as(model: Transformer) -> str | None:
    """The type of a model's matrices in 8 bits, a name in QUANTISED, or None."""
    dtype, scales = model.lm_head.weight.dtype, model.lm_head.scales
    if scales is None:
        return None
    return next(k for k in QUANTISED if (QUANTISED[k], scale_dtype(k)) == (dtype, scales.dtype))


def _hold(model: Transformer, name: str, stored: Tensor, scales: Tensor) -> None:
    """Make `stored` and `scales` the matrix of this name. `model.shapes` is left as it is."""
    matrix = model.get_submodule(name)
    matrix.weight = nn.Parameter(stored, requires_grad=False)
    matrix.scales = nn.Parameter(scales, requires_grad=False)


def _declare(model: Transformer, kind: str) -> None:
    """Declare the full shapes of the scales, and of a head that is no longer tied."""
    shapes: dict[str, torch.Size] = {}
    for name, _ in matrices(model):
        tied = "model.embed_tokens.weight" if f"{name}.weight" not in model.shapes else ""
        shape = model.shapes[tied or f"{name}.weight"]
        shapes |= {f"{name}.weight": shape, f"{name}.scales": scale_shape(kind, shape)}
    model.declare(shapes)


def declare_quantised(model: Transformer, kind: str) -> None:
    """Replace a whole model's matrices by empty ones in 8 bits, to be sharded and filled."""
    refuse_sublayers(model, kind)
    for name, matrix in matrices(model):
        weight = matrix.weight
        stored = torch.empty(weight.shape, dtype=QUANTISED[kind], device=weight.device)
        scales = stored.new_empty(scale_shape(kind, weight.shape), dtype=scale_dtype(kind))
        _hold(model, name, stored, scales)
    _declare(model, kind)


def round_activations(model: Transformer) -> None:
    """Round each token of a prompt to fp8 before the products of sublayers (not of the head).

    The matrices must be stored in fp8 with a scale for each row, so that the product can be one of
    fp8: ladder.kernels.eight_bits.
    """
    refuse_rounding(held_as(model))
    for name, matrix in matrices(model):
        matrix.rounds = name != "lm_head"


def refuse_rounding(kind: str | None) -> None:
    """Raise UserError unless matrices of this type have products with rounded tokens."""
    if kind != "fp8":
        raise UserError(
            f"--activations=fp8 with matrices in {kind or 'the type of activations'}: products in "
            f"fp8 need --weights fp8; give that, or leave --activations out"
        )


def refuse_cut_blocks(model: Transformer, processes: int, where: str) -> None:
    """Raise UserError if splitting a whole model's matrices over processes cuts stored blocks."""
    for name, matrix in matrices(model):
        if cuts_blocks(matrix, processes):
            raise UserError(
                f"{where}: {name}.weight has a scale for each {BLOCK} of its "
                f"{matrix.weight.shape[1]} columns, and --tp={processes} would cut a block; use "
                f"fewer ranks, or the folder that it was converted from, with --weights fp8-block"
            )


def cuts_blocks(matrix: ParallelLinear, parts: int) -> bool:
    """Whether a split of this process's columns into so many parts cuts stored blocks."""
    if not isinstance(matrix, RowParallelLinear) or matrix.scales is None or parts == 1:
        return False
    return matrix.scales.dim() == 2 and local(matrix.weight).shape[1] % (parts * BLOCK) != 0


@torch.no_grad()
def quantise_model(
    model: Transformer, kind: str, made: Callable[[str], Tensor] | None = None
) -> None:
    """Store a loaded model's matrices in 8 bits, in place, one after another.

    made: returns the weight of a given name, for matrices that are still on `meta`.

    Norms are folded into the matrices that read them, and their weights become 1. A rank computes
    the scales of its own rows. If a row is split over ranks, each rank's part has its own scale, or
    its own blocks, which begin at the part. A head that is tied to the embedding becomes a matrix
    of its own, and the embedding stays as it is. After an error the model is of no use.
    """
    refuse_sublayers(model, kind)
    norms = norms_of(model)
    for name, matrix in matrices(model):
        gain = None
        if name in norms:
            gain = local(model.get_submodule(norms[name]).weight).flatten()
        weight = local(matrix.weight)
        if made is not None and weight.is_meta:
            weight = made(f"{name}.weight")
        found = quantise(weight, kind, f"{name}.weight", gain)
        del weight  # before the next one is made
        _hold(model, name, *found)
    for norm in {*norms.values()}:
        local(model.get_submodule(norm).weight).fill_(1.0)
    _declare(model, kind)
