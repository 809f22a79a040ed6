"""Packed matrices: the rows of several matrices as one, with norms folded in, per held rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ladder.models.layers import KVParallelLinear, ParallelLinear, local
from ladder.models.storage import pieces
from ladder.parallel.matrix import Matrix, RankMatrices

Packed = Matrix | RankMatrices


def matrices_of(packed: Packed) -> Sequence[Matrix]:
    """The matrix of each rank that the process holds."""
    return packed.parts if isinstance(packed, RankMatrices) else [packed]


def pack(
    matrices: Sequence[ParallelLinear], gains: Sequence[Tensor] = (), gated: bool = False
) -> Packed:
    """The rows of all `matrices` as one matrix for each held rank.

    gains: a norm's weight [D] for each held rank, to fold in. Matrices in 8 bits ignore it: the
    weight is folded in already, or the norm keeps it (see `norms_of` in ladder.models.quantised).
    gated: the matrices are the gate and up matrices of SwiGLU.
    """

    def rows(name: str, rank: int) -> Tensor:
        values = [held_part(matrix, name, rank) for matrix in matrices]
        if len(values) == 1:
            return values[0]
        return torch.cat([_bits(value) for value in values]).view(values[0].dtype)

    def matrix(rank: int) -> Matrix:
        if matrices[0].scales is None:
            whole = rows("weight", rank)
            return Matrix(fold(whole, gains[rank]) if gains else whole, gated)
        return Matrix(rows("weight", rank), gated, rows("scales", rank), matrices[0].rounds)

    held = matrices[0].ranks.held
    return matrix(0) if held == 1 else RankMatrices(matrix(rank) for rank in range(held))


def held_part(matrix: ParallelLinear, name: str, rank: int) -> Tensor:
    """The part of a matrix's weight, scales or bias of the process's held rank number `rank`."""
    value, held = local(getattr(matrix, name)), matrix.ranks.held
    if isinstance(matrix, KVParallelLinear):
        index = matrix.held_heads()
        own = index[rank * len(index) // held : (rank + 1) * len(index) // held]
        return matrix.pick(_bits(value), own).view(value.dtype)
    split = matrix.parameter_specs()[name].split
    return value if held == 1 or split is None else value.chunk(held, split)[rank]


def _bits(value: Tensor) -> Tensor:
    """The tensor, as uint8 if it is e4m3, which torch stores but cannot concatenate."""
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value


def fold(weight: Tensor, gain: Tensor) -> Tensor:
    """`weight` [N, D] times `gain` [D], for inputs that were normed without it."""
    folded = torch.empty_like(weight)
    for some in pieces(*weight.shape):  # a whole head in float32 would be gigabytes
        folded[some] = weight[some].float() * gain.float()
    return folded
