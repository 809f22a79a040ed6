"""Packed weights of inference, and their products: decode kernels for few rows, else cuBLAS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ladder.kernels import decode_shapes
from ladder.kernels.decode import project
from ladder.kernels.eight_bits import linear
from ladder.kernels.limits import MAX_ROWS
from ladder.kernels.prefill import swiglu


class Matrix(nn.Module):
    """A weight [N, K] that is packed or has a norm's weight folded in, and its products.

    gated: the weight's rows are those of gate, then those of up, and `forward` returns SwiGLU's
    silu(gate) * up. scales: the scales of a weight that is stored in 8 bits (see
    ladder.models.quantised). The kernels read it as it is stored, or convert a piece of it at a
    time: nothing is held twice. rounds: whether prompts are rounded to fp8 and multiplied in fp8.
    gives: the dtype of a decode step's result, if it differs from the input's (see
    ladder.infer.halves).
    """

    def __init__(
        self, weight: Tensor, gated: bool = False, scales: Tensor | None = None,
        rounds: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rounds = rounds
        self.gives: torch.dtype | None = None
        self.weight, self.gated = weight.detach().contiguous(), gated
        self.scales = None if scales is None else scales.detach().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, K] -> [B, S, N], or N / 2 if gated."""
        if x.shape[1] == 1 and len(x) <= MAX_ROWS:
            y = self.project(x[:, 0])
            assert y is not None
            return y.unsqueeze(1)
        y = self.product(x)
        return swiglu(y.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.gated else y

    def product(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [B, S, K] times all rows of the weight, for many rows of x: [B, S, N], or `out`."""
        rows, into = x.flatten(0, 1), None if out is None else out.flatten(0, 1)
        if self.scales is None:
            y = torch.mm(rows, self.weight.to(x.dtype).t(), out=into)
        else:
            y = linear(rows, self.weight, self.scales, into, self.rounds and x.shape[1] > 1)
        return y.unflatten(0, x.shape[:2])

    @property
    def outputs(self) -> int:
        """The columns of `forward`'s result."""
        return len(self.weight) // (1 + self.gated)

    def given(self, x: Tensor) -> torch.dtype:
        """The dtype of `project`'s result."""
        scaled = self.scales is not None and decode_shapes.by_halves(len(x))
        return (self.gives if scaled else None) or x.dtype

    def project(self, x: Tensor, **options: Any) -> Tensor | None:
        """x [M, K] -> [M, N] by `ladder.kernels.decode.project`, with its `options`."""
        weight, up = self.weight.chunk(2) if self.gated else (self.weight, None)
        if self.scales is None:
            return project(x, weight, up, **options)
        pair = self.scales.chunk(2) if self.gated else (self.scales, None)
        return project(x, weight, up, scales=pair, gives=self.given(x), **options)


class RankMatrices(nn.Module):
    """The matrices of the virtual ranks that a process holds, each with its own input."""

    def __init__(self, parts: Iterable[Matrix]) -> None:
        super().__init__()
        self.parts: Sequence[Matrix] = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """x [R, B, S, K] -> [R, B, S, N], or N / 2 if gated."""
        first, shape = self.parts[0], x.shape[:-1]
        if shape[2] == 1 and shape[1] <= MAX_ROWS:
            y = x.new_empty(*shape, first.outputs, dtype=first.given(x[0]))
            for matrix, rows, out in zip(self.parts, x.flatten(1, 2), y.flatten(1, 2), strict=True):
                matrix.project(rows, out=out)
            return y
        y = x.new_empty(*shape, len(first.weight))
        for matrix, rows, out in zip(self.parts, x, y, strict=True):
            matrix.product(rows, out)
        return swiglu(y.flatten(0, 2)).unflatten(0, shape) if first.gated else y
