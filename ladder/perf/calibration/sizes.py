"""The sizes to measure, and what a part is: the measurement of one curve or of some values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ladder.kernels.decode_shapes import by_halves, by_pieces
from ladder.kernels.pieces import Pieces, new_pieces, split_reference
from ladder.models.quantised import quantise
from ladder.models.storage import QUANTISED
from ladder.parallel.matrix import Matrix
from ladder.perf.calibration.timing import Work

Point = tuple[float, float]
HELD = 2 * 10**8  # bytes that calls in turns touch, several times a GPU's L2 cache
MOST_COPIES = 128


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. calls: how many calls of a short piece of work are one turn."""

    dtype: torch.dtype
    calls: int
    copies: tuple[int, ...]  # bytes
    rows: tuple[int, ...]  # of products of a decode step
    hidden: int
    outputs: tuple[int, ...]
    outputs_in_8_bits: tuple[int, ...]
    matrix_rows: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]  # outputs, inputs
    head_dim: int
    keys: tuple[int, ...]
    heads: tuple[int, ...]  # KV heads of all sequences
    prompts: tuple[int, ...]  # tokens
    landing_hidden: tuple[int, ...]
    messages: tuple[int, ...]  # bytes
    exchanges: tuple[int, ...]  # bytes, of rows of `hidden`
    square: int  # of the product whose rate counts
    together: Together


@dataclass(frozen=True)
class Together:
    """The sizes of work that runs at once. product: rows, outputs and inputs of a product as in a
    prompt. message, copied, landed: bytes of an all-reduce, of a copy to a peer and of an exchange
    beside it. steps: rows of decode products, whose weights have `outputs` outputs, and of the
    messages beside them. hides: outputs of decode products of which two take longer than an
    all-reduce. calls: of a short piece of work in a turn."""

    product: tuple[int, int, int]
    message: int
    copied: int
    landed: int
    steps: tuple[int, ...]
    outputs: int
    hides: int
    calls: int


GPU = Sizes(
    torch.bfloat16,
    20,
    tuple(2**n for n in range(14, 30, 2)),  # larger ones run at another rate in a graph
    (1, 2, 4, 16, 32, 64),
    4096,
    (128, 512, 2048, 8192, 28672),
    (512, 2048, 8192, 28672),
    (128, 512, 2048, 8192),
    tuple((outputs, inputs) for outputs in (1024, 4096, 16384) for inputs in (1024, 4096, 8192)),
    128,
    (256, 1024, 4096, 32768),
    (2, 8, 32, 128, 512),
    (1024, 2048, 4096, 8192),
    (4096, 8192),
    tuple(2**n for n in range(13, 27)),
    tuple(2**n for n in range(20, 28)),
    8192,
    Together((1024, 8192, 4096), 2**27, 2**24, 2**23, (1, 8, 64), 2048, 8192, 80),
)
CPU = Sizes(
    torch.float32,
    2,
    (4096, 16384),
    (1, 4),
    32,
    (16, 64),
    (64,),
    (8, 32),
    ((16, 32), (32, 16)),
    8,
    (8, 16),
    (2, 4),
    (8, 16),
    (32, 64),
    (1024, 4096),
    (512,),
    64,
    Together((16, 32, 32), 4096, 4096, 4096, (1, 4), 16, 16, 2),
)


@dataclass(frozen=True)
class Part:
    """One measurement, which all ranks run. name, where: of the curve; or a name for some values.

    run: returns the points of the curve, or a dict from names in VALUES to numbers.
    """

    name: str
    where: dict[str, float | str]
    run: Callable[[], Any]

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.where.items())])


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype) * 0.05


def copies_of(nbytes: int, device: torch.device) -> int:
    """How many pieces of `nbytes` bytes make HELD bytes, within limits."""
    if device.type != "cuda":
        return 2
    return max(2, min(MOST_COPIES, -(-HELD // nbytes)))


def pairs(
    sizes: Sizes, rows: int, outputs: int, device: torch.device, weights: str = "bf16"
) -> list[Work]:
    """Pairs of a decode step's products: one from `hidden` to `outputs`, then one back. Together
    their weights are larger than the L2 cache.

    weights: how they are stored, in `dtype` for bf16, or as a name in EIGHT_BITS. Inputs are then
    those of an engine's products: the first is in pieces and the second in float16.
    """
    itemsize = sizes.dtype.itemsize if weights == "bf16" else 1
    x = random(rows, sizes.hidden, dtype=sizes.dtype, device=device)
    split = None
    if weights != "bf16" and by_pieces(rows):
        split = new_pieces(x, QUANTISED[weights])
        split_reference(x, split)
    made: list[Work] = []
    for _ in range(-(-copies_of(outputs * sizes.hidden * itemsize, device) // 2)):
        first, second = (
            _matrix(random(*shape, dtype=sizes.dtype, device=device), weights)
            for shape in ((outputs, sizes.hidden), (sizes.hidden, outputs))
        )
        if weights != "bf16" and by_halves(rows):
            first.gives, second.gives = torch.float16, sizes.dtype
        made.append(partial(_pair, x, split, first, second))
    return made


def _matrix(weight: Tensor, weights: str) -> Matrix:
    if weights == "bf16":
        return Matrix(weight)
    stored, scales = quantise(weight, weights, "weight")
    return Matrix(stored, scales=scales)


def _pair(x: Tensor, split: Pieces | None, first: Matrix, second: Matrix) -> Tensor:
    inner = first.project(x, pieces=split)
    assert inner is not None
    out = second.project(inner)
    assert out is not None
    return out
