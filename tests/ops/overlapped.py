"""Calls of overlapped products: the implementations, their arguments, and exact operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ladder.kernels.prefill import land_rows_reference
from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
from ladder.ops.blocks import Blocks
from ladder.ops.gradients import BACKWARD
from ladder.ops.products import transposed_product
from ladder.ops.registry import OPERATORS
from tests.ops.everyone import in_order

IMPLEMENTATIONS = {
    "all_gather_matmul": ("chunked", "waiting"),
    "matmul_reduce_scatter": ("chunked", "tracked", "summing", "ring"),
    "matmul_all_reduce": ("chunked", "summing", "ring"),
    "matmul_reduce_scatter_add_rms_norm": ("chunked", "tracked"),
    "matmul_all_reduce_add_rms_norm": ("chunked",),
    GATHER_BACKWARD: ("chunked",),
    SCATTER_BACKWARD: ("chunked",),
}
OF_SHARDS = ("all_gather_matmul", SCATTER_BACKWARD)  # A is a rank's rows alone
WHOLE = ("matmul_all_reduce", "matmul_all_reduce_add_rms_norm")  # of any number of rows
EPS = 1e-3
TILE: dict[str, Any] = {"tile": "16x32x16", "stages": 2}
BLOCKS: list[dict[str, Any]] = [{"blocks": 2}, {"blocks": 3, "ratio": 2, "streams": 2}]
# A kernel that waits for other ranks, which have to be processes of their own.
PUSHES: list[dict[str, Any]] = [{"push": True}, {"blocks": 3, "streams": 2, "push": True}]
# So does the one of its last block.
BLOCKED: list[dict[str, Any]] = [
    {"blocks": 3, "streams": 2}, {"blocks": 1, "streams": 1},
    {"blocks": 2, "ratio": 1, "streams": 1},
]  # fmt: skip
EVERY = [(op, name) for op, names in IMPLEMENTATIONS.items() for name in names]
IN_BLOCKS = [("matmul_all_reduce", "blocked")]
FEW_ROWS = [
    ("linear_all_reduce", "pushed"), ("linear_all_reduce", "pushing"),
    ("matmul_all_reduce", "pushed"), ("matmul_reduce_scatter", "pushed"),
    ("all_gather_matmul", "pushed"), ("matmul_reduce_scatter_add_rms_norm", "pushed"),
    ("matmul_all_reduce_add_rms_norm", "pushed"),
]  # fmt: skip


def run_of(op: str, name: str) -> Callable[..., Any]:
    return OPERATORS[op].implementations[name].run


def operands(
    world: int, call: int, rows: int, n: int, dtype: torch.dtype, k: int = 24
) -> list[tuple[Tensor, Tensor]]:
    """(A, B) of each rank: rows of A have one element, a power of two, so products are exact.

    What ranks add to an element differs in size, so that sums depend on their order.
    """
    found = []
    for rank in range(world):
        source = torch.Generator().manual_seed(1000 * call + 10 * rank + rows)
        A = torch.zeros(rows, k)
        at = torch.randint(k, (rows, 1), generator=source)
        A.scatter_(1, at, 2.0 ** torch.randint(-3, 4, (rows, 1), generator=source))
        found.append((A.to(dtype), of_many_sizes(k, n, generator=source).to(dtype)))
    return found


def of_many_sizes(*shape: int, **made: Any) -> Tensor:
    """Numbers of which float16 has the products with 2^-3, too: none is near 0."""
    found = torch.randn(shape, **made) * 3 ** torch.randn(shape, **made)
    return found.sign() * found.abs().clamp(min=2.0**-10)


def lands(op: str) -> bool:
    return op.endswith("add_rms_norm")


def landing(rows: int, B: Tensor) -> tuple[Tensor, Tensor]:
    """A residual of so many rows, the same on all ranks, and a norm's weight."""
    source = torch.Generator(device=B.device).manual_seed(rows)
    made = {"generator": source, "device": B.device}
    residual, weight = torch.randn(rows, B.shape[1], **made), torch.randn(B.shape[1], **made)
    return residual.to(B.dtype), weight.to(B.dtype)


def ring_sums(
    partials: list[Tensor], owners: list[int], scale: float = 1.0, addend: Tensor | None = None
) -> Tensor:
    """The sum of [m, n] of all ranks as `ring` adds it, rounded after each rank.

    owners: of each row; the addition begins with the rank behind it. addend: of every rank.
    """
    world, whole = len(partials), torch.stack(partials)
    owner = torch.tensor(owners, device=whole.device)
    rows = torch.arange(len(owners), device=whole.device)
    more = torch.zeros_like(whole[0]) if addend is None else addend
    total = more + whole[(owner + 1) % world, rows]
    for step in range(2, world + 1):
        added = (total + more).float() + whole[(owner + step) % world, rows].float()
        total = (added * (scale if step == world else 1.0)).to(total.dtype)
    return total


def ring_owners(op: str, rows: int, world: int, options: dict[str, Any]) -> list[int]:
    """The rank that ends the sum of each row."""
    if op not in WHOLE:
        return [row * world // rows for row in range(rows)]
    count = options.get("blocks", 2)
    cut, found = Blocks(rows, world, count, options.get("ratio", 1)), [-1] * rows
    for block in range(count):
        for owner in range(world):
            part = cut.part(block, owner)
            found[part] = [owner] * (part.stop - part.start)
    assert -1 not in found
    return found


def read_by(B: Tensor, rows: int) -> Tensor:
    """What products read whose matrix is B transposed: whole numbers, so that sums are exact."""
    return landing(rows, B)[0].round()


def arguments(op: str, A: Tensor, B: Tensor, other: bool, world: int = 1) -> tuple[Any, ...]:
    """world: the ranks that share the rows of the sum. other: an average, or with an addend."""
    if lands(op):
        scattered = op not in WHOLE
        residual, weight = landing(len(A) // world if scattered else len(A), B)
        return (A, B, residual, weight, EPS, *((0,) if scattered else ()))
    if op == "all_gather_matmul":
        return A, [B, B[:, :5]], 0, True
    if op == GATHER_BACKWARD:  # of A @ B, where A is the gradient
        return read_by(B, len(A)), [B.t()], [A], 0
    if op == SCATTER_BACKWARD:  # of x @ B^T, where A is the gradient of a rank's rows
        return A, read_by(B, world * len(A)), B.t(), 0
    if op == "matmul_reduce_scatter":
        return A, B, "avg" if other else "sum", 0
    if op == "linear_all_reduce":
        return A, B.t()
    return (A, B, landing(len(A), B)[0]) if other else (A, B)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    first, second = result
    return [first, second] if isinstance(second, Tensor) else [first, *second]


def check_same(
    op: str, what: object, found: list[Tensor], wanted: list[Tensor], averaged: bool = False
) -> None:
    """Bit for bit, without NaN; a norm, whose mean may be added in another order, almost.

    averaged: by `ring`, whose products scale on the way, each of torch's in its own way.
    """
    for n, (out, exact) in enumerate(zip(found, wanted, strict=True)):
        if op in BACKWARD and n == 1:  # it has the matrix's layout
            assert out.stride() == exact.stride(), what
        else:
            assert out.is_contiguous(), what
        close = 1e-2 if averaged or (lands(op) and n == 1) else 0.0
        torch.testing.assert_close(
            out, exact, rtol=close, atol=0, msg=lambda text: f"{what} {text}"
        )


def added_gradients(inputs: list[Any], rank: int, options: dict[str, Any]) -> list[Tensor]:
    """Of the matrix rounded after each rank's rows, the own ones first, or after those of two."""
    world, B = len(inputs), inputs[rank][1]
    grads = [A for A, _ in inputs]
    x = read_by(B, world * len(grads[0])).split(len(grads[0]))
    peers = [(rank + step) % world for step in range(1, world)]
    parts = [[rank], *([q] for q in peers)]
    if options.get("pairs"):
        kept = [q for q in peers if q ^ 1 in peers and q ^ 1 < world]
        parts = [[rank], *([q, q + 1] if q in kept else [q]
                           for q in peers if q not in kept or q % 2 == 0)]  # fmt: skip
    found: Tensor | None = None
    for each in parts:
        of_rows, rows = torch.cat([grads[q] for q in each]).t(), torch.cat([x[q] for q in each])
        found = of_rows @ rows if found is None else torch.addmm(found, of_rows, rows)
    assert found is not None
    as_matrix = found.t() if B.is_contiguous() else found.t().contiguous()
    return [torch.cat(grads) @ B, as_matrix]


def options_of(op: str, name: str) -> list[dict[str, Any]]:
    if (op, name) == ("matmul_all_reduce", "chunked"):
        return BLOCKS + PUSHES
    if name == "ring" or (op in WHOLE and name == "chunked"):
        return BLOCKS
    if (op, name) == ("matmul_reduce_scatter", "chunked"):
        return [{}, *BLOCKS, {"streams": 2}, {"pairs": True}, {"streams": 2, "pairs": True}]
    if op == SCATTER_BACKWARD:
        every = [{}, {"streams": 2}, {"pairs": True}, {"streams": 2, "pairs": True}]
        return [*every, *({"whole": True, **each} for each in every)]
    if name == "chunked":
        return [{}, {"streams": 2}]
    if name == "blocked":
        return BLOCKED
    if name == "pushed":
        return [{}, {"shots": 2}] if op.endswith("all_reduce") else [{}]
    pieces = {**TILE, "pieces": 2, "group_m": 1}
    return [{"waiting": TILE, "tracked": pieces, "summing": pieces}.get(name, {})]


def expected(
    op: str, name: str, options: dict[str, Any], inputs: list[Any], rank: int, other: bool
) -> list[Tensor]:
    """The exact results: see `operands`; other: see `arguments`."""
    world = len(inputs)
    if op == "all_gather_matmul":
        whole = torch.cat([A for A, _ in inputs])
        return [whole, *(whole @ B for B in (inputs[rank][1], inputs[rank][1][:, :5]))]
    if op == SCATTER_BACKWARD:
        return added_gradients(inputs, rank, options)
    averaged = other and op not in (*WHOLE, *BACKWARD)
    addend = None
    if other and op == "matmul_all_reduce":
        (addend,) = arguments(op, *inputs[rank], other)[2:]
    partials = [A @ B for A, B in inputs]
    if name == "ring":
        owners = ring_owners(op, len(partials[0]), world, options)
        total = ring_sums(partials, owners, 1 / world if averaged else 1.0, addend)
        return [total if op in WHOLE else total.chunk(world)[rank]]
    if addend is not None:
        partials = [torch.addmm(addend, A, B) for A, B in inputs]
    if op not in WHOLE:
        partials = [each.chunk(world)[rank] for each in partials]
    if lands(op):
        residual, weight = landing(len(partials[0]), inputs[rank][1])
        return list(land_rows_reference(partials, residual, weight, EPS))
    total = in_order(partials)
    if op == GATHER_BACKWARD:
        A, B = inputs[rank]
        x = read_by(B, len(A))
        return [total.to(A.dtype), transposed_product(x, A, B.t())]
    return [(total / world if averaged else total).to(inputs[0][0].dtype)]
