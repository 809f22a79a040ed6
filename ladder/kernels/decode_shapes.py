"""How the products of a decode step are cut into programs (`ladder.kernels.decode`)."""

from __future__ import annotations

from typing import NamedTuple

from ladder.costs import MULTIPROCESSORS
from ladder.kernels.limits import MAX_ROWS

# More rows are multiplied on tensor cores, and so are two rows of some products (`SHAPES_BESIDE`).
# For weights in 8 bits see `_by_vectors`.
MAX_VECTOR_ROWS = 2
# Steps of a product on tensor cores whose weights are brought into L2 before its wait. This saved 1
# to 4 % of a layer at 4, 16 and 64 rows (benchmarks/results/README.md), with shorter steps for 4
# and 16.
EARLY = 2
# The most rows, padded, for which a tile reads before its loop what its end needs: else every
# product ends a read later. Steps of 24 and 32 sequences in fp8 take 3 and 2 % less time with it;
# steps of 64 took 1 % longer, for want of registers.
MOST_AHEAD = 32
# For 33 to 64 rows beside other kernels, products with so many outputs have tiles of 64 outputs
# (`_wide`). Alone they need all SMs; other sizes were not measured.
MIDDLE = range(4096, 32 * MULTIPROCESSORS + 1)
# Rows for which O and down in 8 bits leave room beside them for other programs.
FEW_ROWS = 3, 4
FEW = 2048  # products of fewer outputs need cuts of their own to use the whole memory bandwidth
# Outputs of a product with 64 rows of its weight for each SM, such as a head's.
MANY = 64 * MULTIPROCESSORS
SYSTEM_SHARED = 1024  # bytes of shared memory that the system takes for each program


class Cut(NamedTuple):
    """How a product is cut."""

    padded: int  # rows of x
    block: int  # rows of the weight in a tile
    step: int  # columns
    warps: int
    stages: int  # 0: no tensor cores, and a program has `block` rows
    parts: int = 1  # of a step: see `ladder.kernels.tiles`
    swapped: bool = False  # the weight is the product's first operand
    shares: int = 1  # programs that share the columns of a tile


# Cuts of products of one and two rows in 16 bits, by (rows, outputs, inputs, gated): those of an 8B
# at TP 2, 4 and 8, a 70B at TP 4, a 3B at TP 2 and a 2B class at TP 4. In whole steps they are the
# fastest, or within 0.3 % of it. That depends on what runs beside them, so they follow no rule.
SHAPES_ALONE = {
    (1, 3072, 1536, False): Cut(1, 4, 1024, 4, 0),
    (1, 4096, 1024, False): Cut(1, 4, 1024, 2, 0),
    (1, 4096, 2048, False): Cut(1, 4, 2048, 4, 0),
    (1, 8192, 2048, False): Cut(1, 4, 1024, 2, 0),
    (2, 4096, 3584, False): Cut(2, 2, 1024, 2, 0),
}
SHAPES_BESIDE = {
    (1, 1024, 2304, False): Cut(1, 1, 1024, 4, 0),
    (1, 1536, 4096, False): Cut(1, 1, 2048, 4, 0),
    (1, 1792, 4096, True): Cut(1, 1, 1024, 2, 0),
    (1, 2304, 2048, False): Cut(1, 4, 1024, 4, 0),
    (1, 2560, 8192, False): Cut(1, 1, 4096, 4, 0),
    (1, 3072, 1536, False): Cut(1, 2, 1024, 2, 0),
    (1, 4096, 1024, False): Cut(1, 2, 1024, 2, 0),
    (2, 2048, 2304, True): Cut(2, 2, 512, 2, 0),
    (2, 2304, 2048, False): Cut(2, 4, 1024, 4, 0),
    (2, 2560, 3072, False): Cut(2, 1, 1024, 2, 0),
    (2, 3584, 4096, True): Cut(2, 2, 1024, 4, 0),
    (2, 4096, 1024, False): Cut(16, 64, 128, 4, 5, swapped=True),
    (2, 4096, 3584, False): Cut(16, 64, 128, 4, 7, swapped=True),
}


def power_of_2(rows: int) -> int:
    """The least power of two that is not below `rows`; without Triton, as predictions run."""
    return 1 << (rows - 1).bit_length()


def by_pieces(rows: int) -> bool:
    """Whether a product of so many rows with a weight in 8 bits takes its input in pieces. With
    pieces of e4m3, a step of one sequence took 6 % longer."""
    return rows > 1


def by_halves(rows: int) -> bool:
    """Whether products of so many rows with a weight in 8 bits take inputs without pieces in
    float16, the outputs of attention and SwiGLU (`ladder.infer.halves`). Not measured: one row."""
    return 1 < rows <= MAX_ROWS


def blocks(
    rows: int, outputs: int, size: int, gated: bool, itemsize: int, eight_bits: bool = False,
    pieces: bool = False, half: bool = False, beside: bool = False, scaled: int = 0,
    shared: bool = False,
) -> Cut:  # fmt: skip
    """The cut of a product of x [rows, size] and a weight [outputs, size], or two if `gated`.

    itemsize: bytes of an element of x. eight_bits: the weight is stored in 8 bits. pieces: x is
    also given in pieces (`ladder.kernels.pieces`). half: x is in float16, and the weight in 8 bits.
    beside: other kernels run at the same time. scaled: the columns that share a scale; 0: a row's.
    shared: programs may share the columns of a tile.

    Chosen by measurements of chains and whole steps on an H200 (benchmarks/results/README.md).
    """
    found = _by_rows(rows, outputs, size, gated, itemsize, eight_bits, pieces, half, beside)
    if scaled and found.stages:
        found = _with_scales(found, outputs, size, gated, itemsize, pieces, half, scaled)
    if shared and not gated and itemsize == 2:
        if pieces:
            return _in_shares(found, outputs, size, beside, scaled)
        if found.padded == 64 and outputs < FEW and size > 1024 and not (beside or eight_bits):
            return Cut(64, 32, 128, 4, 6, shares=2)  # steps of `standard`: 0 to 3 % less
    return found


def _in_shares(found: Cut, outputs: int, size: int, beside: bool, scaled: int) -> Cut:
    """`found` for QKV of pieces of 17 and more rows. Each of its few tiles reads all of the input,
    at the rate of one SM. So up to four programs share the columns of a tile, if there is an SM for
    each; beside other kernels two, but of very few tiles."""
    tiles, steps = -(-outputs // 64), -(-size // 256)
    if found.padded < 32 or (found.padded == 32 and (outputs >= FEW or scaled)):
        return found  # not measured, or not faster
    if scaled and beside:
        return found  # 1.6 % faster, but steps of two blocks spill registers
    few = tiles <= 12 if beside else 4 * tiles <= MULTIPROCESSORS
    shares = 4 if few else 2 if 2 * tiles <= MULTIPROCESSORS else 1
    shares = min(shares, steps)
    shares = -(-steps // -(-steps // shares))  # none is empty
    step = scaled or 256
    return found if shares == 1 else Cut(found.padded, 64, step, 4, 4, shares=shares)


def _with_scales(
    found: Cut, outputs: int, size: int, gated: bool, itemsize: int, pieces: bool, half: bool,
    scaled: int,
) -> Cut:  # fmt: skip
    """`found`, in steps whose parts have one scale each; of pieces, one or two."""
    few, short, padded = outputs < FEW, size <= 1024, found.padded
    if pieces and padded <= 32:
        if gated:
            return Cut(padded, 32, 2 * scaled, 4, 4 if padded == 32 else 5)
        return Cut(padded, 32, 4 * scaled, 4, 4, 2) if few else found
    if half and padded == 16 and not (few or gated or outputs >= MANY):
        return Cut(padded, 32, 4 * scaled, 4, 3 if short else 4, 4)
    # Steps of several parts do not fit where rows or their elements are many.
    parts = 1 if padded > 32 or itemsize == 4 else found.parts
    stages = found.stages * found.step // (scaled * parts)  # as many bytes are in flight
    if half and short and padded == 32 and found.swapped:
        stages = 5
    return found._replace(step=scaled * parts, parts=parts, stages=stages)


def _by_rows(
    rows: int, outputs: int, size: int, gated: bool, itemsize: int, eight_bits: bool,
    pieces: bool, half: bool, beside: bool,
) -> Cut:  # fmt: skip
    """`blocks` of weights without scales, or with one for each row."""
    # Few outputs: smaller blocks or longer steps.
    few, short = outputs < FEW, gated or size <= 1024
    many = outputs >= MANY and not gated
    if pieces:
        return _tiles_of_pieces(max(8, power_of_2(rows)), outputs, size, gated, beside)
    narrow = eight_bits and itemsize == 2  # tiles of float32 in parts spill registers
    if _by_vectors(rows, few, gated, short, narrow):
        plain = itemsize == 2 and not eight_bits
        special = (SHAPES_BESIDE if beside else SHAPES_ALONE) if plain else {}
        key = rows, outputs, size, gated
        return special.get(key) or _vectors(*key, eight_bits, beside)
    padded = max(16, power_of_2(rows))
    wide = beside and itemsize == 2 and not (few or gated or many) and (half or not eight_bits)
    if wide and (found := _wide(rows, padded, outputs, size, half)):
        return found
    if narrow:
        found = _tiles_of_8_bits(padded, few, short, gated, many)
        if half and padded <= 32 and not (few or gated or many):
            found = _tiles_of_halves(rows, padded, outputs, size, beside)
    elif many:
        found = Cut(padded, 64, 128, 4, 5)
    elif gated and padded <= 32:
        # Fewer stages leave room for programs of the kernels beside.
        little = beside and itemsize == 2 and rows > 8 and size <= 4096
        little = little and (padded == 32 or outputs > 16 * MULTIPROCESSORS)
        found = Cut(padded, 32, 128, 4, 4 if little else 6, swapped=True)
    elif padded == 16 and short:
        found = Cut(padded, 32, 128, 4, 4)
    elif padded == 16:
        found = Cut(padded, 16, 512, 4, 6, 4) if few else Cut(padded, 32, 512, 4, 4)
        # Half of the last step may be padding; with float32, longer steps in parts spill registers.
        if size % 512 or itemsize == 4:
            found = found._replace(step=256, stages=8 if few else 6)
    elif padded == 32:
        found = Cut(padded, 16, 512, 4, 4) if few else Cut(padded, 32, 256, 4, 5)
        if few and not short and size % 512 == 0 and itemsize == 2:
            found = found._replace(parts=4)
        if short and outputs >= 4096:
            found = Cut(padded, 64, 128, 4, 6, swapped=True)
    else:
        narrowest = few and not short and not (beside and itemsize == 2)
        found = Cut(padded, 16 if narrowest else 32, 128, 4, 5 if short else 6)
    # Tensor cores multiply float32 as TF32 alone, so its products have no operands to swap.
    return found._replace(step=found.step * 2 // itemsize, swapped=found.swapped and itemsize == 2)


def _wide(rows: int, padded: int, outputs: int, size: int, half: bool) -> Cut | None:
    """Tiles of 64 outputs, whose programs read the input half as often: beside other kernels they
    need not fill the GPU. Together with fewer stages for gate and up, a ladder's steps of 3 to 32
    sequences took -1 to 8 % less time, in fp8 4 to 13 % less, and steps of 64 took 5 % less."""
    short = size <= 1024
    if padded == 64:
        return Cut(64, 64, 128, 4, 5 if short else 6, swapped=True) if outputs in MIDDLE else None
    if not half:
        return Cut(padded, 64, 128, 4, 5 if short else 7, swapped=True)
    if padded == 16:
        these = short and rows in FEW_ROWS and outputs in MIDDLE
        return Cut(16, 64, 256, 4, 3, swapped=True) if these else None
    return Cut(32, 64, 256, 4, 4 if short else 5, swapped=True)


def _by_vectors(rows: int, few: bool, gated: bool, short: bool, narrow: bool) -> bool:
    """Whether a product runs without tensor cores, apart from those of SHAPES_BESIDE."""
    if not narrow or rows == 1:
        return rows <= MAX_VECTOR_ROWS
    # Weights in 8 bits wait for conversions. For tensor cores one instruction converts two elements
    # to float16; for vectors three convert two to float32. So most products of two rows, too, are
    # faster on tensor cores.
    if rows == 2:
        return few or (short and not gated)
    return rows <= 4 and few and not (short or gated)  # QKV of int8


def _tiles_of_8_bits(padded: int, few: bool, short: bool, gated: bool, many: bool) -> Cut:
    """Tiles of 8-bit weights wait for instructions, not for bytes; in parts, a warp has fewer."""
    if many:
        if padded == 16:
            return Cut(padded, 32, 256, 4, 4)
        return Cut(padded, 64, 128, 4, 4, swapped=True)
    if padded == 16:
        if few:
            return Cut(padded, 16, 512, 4, 5, 4)
        return Cut(padded, 32, 512, 4, 3 if short else 6, 4)
    if gated:
        return Cut(padded, 32, 128, 4, 6, swapped=padded == 64)
    if few:
        return Cut(padded, 16, 512, 4, 4, 4) if padded == 32 else Cut(padded, 16, 256, 4, 3)
    return Cut(padded, 32, 256, 4, 5 if padded == 32 else 4)


def _tiles_of_halves(rows: int, padded: int, outputs: int, size: int, beside: bool) -> Cut:
    """One instruction converts two elements of the weight, so few tiles wait for conversions."""
    if padded == 16 and size > 1024 and outputs <= 32 * MULTIPROCESSORS:
        stages = 6
        if beside and 2048 < size < 4096:  # down of an 8B at TP 4; others were not measured
            # With 3 stages a program leaves room on its SM for one of gate and up. Together with
            # O's tiles of 64 (`_wide`) that takes 7.5 % off a ladder's steps of 4 sequences that
            # push to four ranks; 4 stages take 2 % off those of 16. Steps of 2 and 8 lost.
            stages = 3 if rows in FEW_ROWS else 4 if rows > 8 else 6
        return Cut(padded, 32, 512, 4, stages, 4)
    return Cut(padded, 32, 256, 4, 4 if size <= 2048 else 6)


def _tiles_of_pieces(padded: int, outputs: int, size: int, gated: bool, beside: bool) -> Cut:
    """Tensor cores multiply at least 64 rows of the weight; tiles of fewer rows fill these by
    parts. Chosen by steps of 8 layers on an H100; those beside other kernels on an H200."""
    if gated and padded == 64:
        # Two programs on an SM where some SMs have two; or room for a program of another kernel.
        return Cut(padded, 32, 128, 4, 4 if beside or outputs > 32 * MULTIPROCESSORS else 8)
    if gated:  # two programs on an SM, or more stages
        return Cut(padded, 32, 256, 4, 4 if outputs > 32 * MULTIPROCESSORS else 6)
    if outputs >= MANY and padded == 64:
        # Two groups of 4 warps read the input half as often: 6 to 10 us less of an 8B's steps.
        return Cut(padded, 128, 128, 8, 5)
    if outputs >= MANY or padded == 64:
        return Cut(padded, 64, 256, 4, 4)
    if outputs >= FEW:
        return Cut(padded, 64, 256, 4, 6)
    if beside and padded <= 16 and size % 512 == 0:  # a ladder's steps of 4 to 16: 2 to 4 % less
        return Cut(padded, 32, 512, 4, 6, 2)
    return Cut(padded, 32, 512, 4, 4, 2) if padded == 16 else Cut(padded, 32, 256, 4, 8, 2)


def _vectors(
    rows: int, outputs: int, size: int, gated: bool, eight_bits: bool, beside: bool
) -> Cut:
    """Programs whose threads multiply and add. How many loads are in flight depends on how many
    loads of later steps the compiler moves ahead, so the fastest cut follows no rule of sizes."""
    if eight_bits:
        return _vectors_of_8_bits(power_of_2(rows), outputs, size, gated, beside)
    return (_one_row if rows == 1 else _two_rows)(outputs, size, gated)


def _vectors_of_8_bits(padded: int, outputs: int, size: int, gated: bool, beside: bool) -> Cut:
    if padded > 1:
        if size > 1024:
            return Cut(padded, padded, 2048, 4, 0)
        return Cut(padded, 2, 1024, 4, 0) if gated else Cut(padded, 2, 512, 2, 0)
    if gated:
        return Cut(1, 1, 1024, 2 if beside and outputs <= 4096 else 4, 0)
    if size <= 1024:
        return Cut(1, 2 if size <= 512 else 4, 512, 2, 0)
    if size <= 2048:
        return Cut(1, 4, 1024, 2 if outputs > 4096 else 4, 0)
    if size > 8192 or (size > 4096 and outputs == 4096):
        return Cut(1, 4, 1024, 4, 0)
    if outputs > 4096:
        return Cut(1, 2, 2048, 1, 0)
    return Cut(1, 2, 1024, 4, 0) if outputs < 4096 else Cut(1, 4, 2048, 2, 0)


def _two_rows(outputs: int, size: int, gated: bool) -> Cut:
    if gated:
        return Cut(2, 1, 1024, 4 if size > 4096 else 2, 0)
    if size <= 1024:
        return Cut(2, 2, 512, 2, 0)
    if size == 4096 and outputs >= 4096:
        return Cut(2, 4, 1024, 4 if outputs == 4096 else 2, 0)
    if 4096 < size <= 8192 and size % 4096:
        return Cut(2, 4, 1024, 4, 0)
    return Cut(2, 2, 2048, 4, 0)


def _one_row(outputs: int, size: int, gated: bool) -> Cut:
    if gated:
        if size == 4096:
            return Cut(1, 1, 2048, 4, 0)
        return Cut(1, 2, 1024, 2 if 2048 < size <= 3072 else 4, 0)
    if size <= 512:
        return Cut(1, 4, 512, 2, 0)
    if size <= 1024:
        return Cut(1, 4, 1024, 4, 0)
    # Few outputs: more programs. With 3072 columns, a step of 4096 would be a quarter padding.
    if size <= 2048 or (size <= 3072 and outputs >= FEW):
        return Cut(1, 2 if outputs < 4096 else 4, 1024, 4, 0)
    if size > 3072 and size % 4096:  # some of the last step of 4096 would be padding
        return Cut(1, 4, 1024, 2 if size > 8192 else 4, 0)
    if size > 4096:
        return Cut(1, 2, 4096, 8, 0)
    if outputs < 1024:
        return Cut(1, 1, 2048, 4, 0)
    if FEW <= outputs < 6144:
        return Cut(1, 2, 1024, 4, 0) if outputs < 4096 else Cut(1, 4, 2048, 4, 0)
    return Cut(1, 2, 4096, 4, 0)


def rows_each(outputs: int, block: int, gated: bool) -> int:
    """The rows of the weight that each program of a product has, in a tile of `block` rows.

    In a gated product they are as few as possible without more programs on the fullest SM, so that
    all SMs have about as much work: 3584 rows are 128 programs of 28, not 112 of 32. The number is
    a multiple of 4, for stores of 8 bytes. Other products gained nothing by this, and have all rows
    of a tile.
    """
    if not gated:
        return block
    on_an_sm = -(-outputs // (block * MULTIPROCESSORS))
    return min(block, -(-outputs // (on_an_sm * MULTIPROCESSORS * 4)) * 4)


def fitting(stages: int, stage_bytes: int, shared_bytes: int) -> int:
    """The number of stages, at most `stages`, that fit in an SM's shared memory, of
    `shared_bytes`."""
    return max(2, min(stages, (shared_bytes - SYSTEM_SHARED) // stage_bytes))
