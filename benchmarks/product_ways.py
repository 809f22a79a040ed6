"""The ways that products.py times: how each cuts the products of a decode step into programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ladder.kernels import decode_shapes
from ladder.kernels.decode_shapes import Cut
from ladder.models.eight_bits import BLOCK


class Product(NamedTuple):
    name: str
    outputs: int
    inputs: int
    normed: bool
    gated: bool
    weights: str = "bf16"

    @property
    def bytes(self) -> int:
        """The bytes of the weights, without their scales."""
        return self.outputs * self.inputs * (1 + self.gated) * (2 if self.weights == "bf16" else 1)


class Way(NamedTuple):
    name: str
    blocks: Callable[[int, Product], Cut | None]  # None: so few rows are not cut this way
    early: int = decode_shapes.EARLY


def in_pieces(rows: int, product: Product) -> bool:
    """Whether a step multiplies this weight by pieces of its input (`ladder.kernels.pieces`)."""
    return product.normed and product.weights != "bf16" and decode_shapes.by_pieces(rows)


def in_half(rows: int, product: Product) -> bool:
    """Whether a step multiplies this weight by an input in float16 (`ladder.infer.halves`)."""
    in_8_bits = product.weights != "bf16"
    return not product.normed and in_8_bits and decode_shapes.by_halves(rows)


def today(rows: int, product: Product) -> Cut:
    return decode_shapes.blocks(
        rows, product.outputs, product.inputs, product.gated, 2, product.weights != "bf16",
        in_pieces(rows, product), in_half(rows, product),
        scaled=BLOCK if product.weights == "fp8-block" else 0, shared=product.normed,
    )  # fmt: skip


def tiles(rows: int, product: Product) -> Cut | None:
    return None if rows <= decode_shapes.MAX_VECTOR_ROWS else today(rows, product)


def lean(rows: int, product: Product) -> Cut | None:
    """At most 100 KiB of shared memory: all stages but one hold a step of x and of the weight."""
    if rows <= decode_shapes.MAX_VECTOR_ROWS:
        return None
    padded = max(16, decode_shapes.power_of_2(rows))
    block = 16 if padded < 64 and product.outputs < 2048 else 32
    step = 256 if padded == 16 and not product.gated and product.inputs > 1024 else 128
    if padded == 64:
        step = 64
    stage = (padded + block * (1 + product.gated)) * step * 2
    return Cut(padded, block, step, 4, min(8, 100 * 1024 // stage + 1))


WAYS = [
    Way("today", today),
    Way("late", tiles, 0),
    Way("lean", lean),
]


def usable(way: Way, rows: int, products: Sequence[Product]) -> bool:
    return all(way.blocks(rows, each) is not None for each in products)
