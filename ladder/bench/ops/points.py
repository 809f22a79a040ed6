"""The points of `ladder bench ops`: operators, shapes and numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ladder.config import configs_folder, model_config, parse_json
from ladder.costs import product_shapes
from ladder.models.errors import UserError, unknown
from ladder.operator_names import (
    GATHER,
    GATHER_BACKWARD,
    LANDING,
    REDUCE,
    REDUCE_LANDING,
    REDUCE_LINEAR,
    SCATTER,
    SCATTER_BACKWARD,
)
from ladder.ops.registry import DTYPES, OPERATORS, Implementation, check_values

COLUMNS = (GATHER,)  # operators whose matrix is split by columns
BY_COLUMNS = (*COLUMNS, SCATTER_BACKWARD)  # a gradient's matrix is the transposed one
ROWS = (SCATTER, REDUCE, REDUCE_LINEAR, LANDING, REDUCE_LANDING)
BAGS, EXPERTS = "embedding_bag_all_to_all", "matmul_all_to_all"
SEND, BACK = "all_to_all_rows", "return_rows"  # move rows to their experts, and back
OF_EXPERTS = (EXPERTS, SEND, BACK)
OPS = (*COLUMNS, *ROWS, GATHER_BACKWARD, SCATTER_BACKWARD, BAGS, *OF_EXPERTS)
SCATTERED = (GATHER, SCATTER, LANDING, GATHER_BACKWARD, SCATTER_BACKWARD)
FEW = REDUCE_LINEAR  # for so few rows that its all-reduce is one message
FEW_ROWS = (1, 8, 64)
PRODUCT_ROWS = (64, 512, 1024, 2048, 4096, 8192)  # m of FLUX's figures 11 to 14
# Options that may be faster for some shapes, by implementation: what --tune tries.
TRIES: dict[str, tuple[dict[str, Any], ...]] = {
    "chunked": (  # only sums have blocks
        {"streams": 2}, {"blocks": 2}, {"blocks": 4}, {"blocks": 2, "ratio": 2},
        {"blocks": 2, "ratio": 2, "streams": 2}, {"blocks": 3, "ratio": 2, "streams": 2},
        {"push": True}, {"blocks": 2, "push": True}, {"blocks": 2, "ratio": 2, "push": True},
        {"pairs": True}, {"pairs": True, "streams": 2},
        {"blocks": 3, "ratio": 2, "push": True},
        {"whole": True}, {"whole": True, "pairs": True}, {"whole": True, "streams": 2},
        {"whole": True, "pairs": True, "streams": 2},
    ),
    "blocked": (
        {"blocks": 2}, {"blocks": 3}, {"blocks": 5}, {"blocks": 6}, {"blocks": 8, "ratio": 1},
        {"blocks": 3, "streams": 1},
    ),
    "ring": (
        {"streams": 2}, {"blocks": 4}, {"blocks": 3, "ratio": 2, "streams": 2},
        {"blocks": 4, "streams": 2},
    ),
    "waiting": (
        {"stages": 3}, {"tile": "256x128x64"}, {"tile": "128x128x64"}, {"group_m": 16},
    ),
    "tracked": (
        {"group_m": 16}, {"pieces": 2}, {"stages": 3}, {"tile": "256x128x64"},
        {"tile": "256x128x64", "pieces": 2}, {"tile": "128x128x64"},
    ),
    "summing": (
        {"pieces": 1}, {"pieces": 8}, {"group_m": 16}, {"stages": 3},
        {"tile": "256x128x64", "stages": 3}, {"tile": "128x128x64"},
    ),
    # For sums; for bags, as in the fused operators' paper (order, occupancy); for experts.
    "pushed": (
        {"shots": 2},
        {"order": "remote"}, {"order": "oblivious"}, {"programs": 528}, {"programs": 1056},
        {"programs": 1584}, {"lent": True},
        {"stages": 3}, {"tile": "128x128x64"},
    ),
}  # fmt: skip
TOKENS = (1024, 4096)  # tokens per rank, for mixtures of experts
BATCHES = (512, 1024, 2048)  # samples over all ranks, for embedding bags
DIM, TABLE_ROWS = 256, 10_000
TABLES, POOLING = (256,), (10, 30, 70)  # tables per rank, rows per bag
TURNS = 2  # timed turns of a way in each round, after one that aligns the ranks
MANY, FEW_CALLS = 20, 4  # calls in a turn of small and large products on a GPU
LARGE = 1e11  # floating-point operations from which a product is large
FLOATS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Matrix:
    """A weight [k, n] before it is split, and its operators. name: "" if its shape has one."""

    name: str
    n: int
    k: int
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Experts:
    """The second matrices [k, n] of all experts; a token goes to `top` of them."""

    n: int
    k: int
    experts: int
    top: int


# Besides these, every name in configs/models is a shape, with the model's four products. With the
# suffix BACKWARD it has the products of their gradients.
BACKWARD = ":backward"
SHAPES: dict[str, tuple[Matrix | Experts, ...]] = {
    "flux-gpt3": (Matrix("", 49152, 12288, COLUMNS), Matrix("", 12288, 49152, ROWS)),
    "flux-llama2-70b": (Matrix("", 57344, 8192, COLUMNS), Matrix("", 8192, 28672, ROWS)),
    "gemv": tuple(Matrix(f"{n}", n, 8192, (FEW,)) for n in (8192, 16384, 32768, 65536)),
    "tutel": (Experts(2048, 2048, 8, 2),),  # Tutel's example: two experts on each of four GPUs
    "mixtral-8x7b": (Experts(4096, 14336, 8, 2),),
    "qwen3-30b-a3b": (Experts(2048, 768, 128, 8),),
    "deepseek-v3": (Experts(7168, 2048, 256, 8),),
    "dlrm": (),
}


@dataclass(frozen=True)
class OpPoint:
    """One call of an operator.

    m, n, k: rows, columns and depth of the whole product, before it is split over the ranks. For
    experts, m counts the rows on each rank, and `experts` those on all ranks. For bags, m counts
    the samples on all ranks, n the columns of a result, k the columns of a table, `tables` the
    tables on each rank, and `pooling` the rows per bag.
    """

    op: str
    shape: str
    m: int
    n: int
    k: int
    ranks: int
    dtype: str
    experts: int = 0
    tables: int = 0
    pooling: int = 0

    def __str__(self) -> str:
        sizes = f"m {self.m}, n {self.n}, k {self.k}"
        if self.op == BAGS:
            sizes = f"batch {self.m}, {self.tables} tables a rank, pooling {self.pooling}"
        return f"{self.op}, {self.shape}, {sizes}, {self.dtype}, {self.ranks} ranks"


@dataclass(frozen=True)
class Variant:
    """An implementation that the user asked for, with its options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        said = ",".join(f"{key}={_said(value)}" for key, value in self.options)
        return f"{self.name}:{said}" if said else self.name


def point_of(record: Mapping[str, Any]) -> OpPoint:
    """The OpPoint in a record's `point`, which has more fields. Raises KeyError or TypeError."""
    return OpPoint(**{each.name: record[each.name] for each in fields(OpPoint)})


def sizes_of(point: OpPoint) -> tuple[int, ...]:
    """The sizes of a point's operator as the registry has them: those of one rank's product."""
    m, n, k, ranks = point.m, point.n, point.k, point.ranks
    if point.op in BY_COLUMNS:
        return m, n // ranks, k
    if point.op == BAGS:
        return m, ranks * point.tables, k
    if point.op == EXPERTS:
        return m // ranks, n, k, point.experts // ranks
    return (m // ranks, n) if point.op in OF_EXPERTS else (m, n, k // ranks)


def product_of(point: OpPoint) -> OpPoint:
    """The point without its shape's name: two models may have the same product."""
    return replace(point, shape="")


def calls_of(point: OpPoint) -> int:
    """The number of calls in a turn on a GPU."""
    flops = 2 * point.m * point.n * point.k / point.ranks
    return FEW_CALLS if flops > LARGE or point.tables else MANY


def models() -> list[str]:
    return sorted(path.stem for path in (configs_folder() / "models").glob("*.yaml"))


def matrices(shape: str) -> tuple[Matrix | Experts, ...]:
    """The matrices of a shape; () for embedding bags."""
    if shape in SHAPES:
        return SHAPES[shape]
    name, backward, _ = shape.partition(BACKWARD)
    if backward:
        return tuple(_transposed(matrix) for matrix in matrices(name))
    config = model_config(shape)
    shapes = product_shapes(config)
    return (
        Matrix("qkv", *shapes["qkv"], COLUMNS), Matrix("o", *shapes["output"], ROWS),
        Matrix("gate-up", *shapes["gate-up"], COLUMNS), Matrix("down", *shapes["down"], ROWS),
    )  # fmt: skip


def _transposed(matrix: Matrix | Experts) -> Matrix:
    """The matrix of a gradient's product, with the adjoint operators.

    The adjoint of a gather is a scatter, and of a scatter a gather, each alone and with the
    matrix's gradient. The adjoint of an all-reduce leaves no communication inside a product.
    """
    assert isinstance(matrix, Matrix)
    ops = (SCATTER, GATHER_BACKWARD) if matrix.ops == COLUMNS else BY_COLUMNS
    return Matrix(matrix.name, matrix.k, matrix.n, ops)


def check_options(options: Any) -> None:
    """Raise UserError for a wrong value of an option, whatever the machine."""
    for op in options.ops or ():
        if op not in OPS:
            raise unknown("--ops", op, OPS)
    for shape in options.shapes or ():
        if shape not in SHAPES and shape.removesuffix(BACKWARD) not in models():
            raise unknown("--shapes", shape, [*SHAPES, *models()])
    for name in ("m", "tables", "pooling"):
        for value in getattr(options, name) or ():
            if value < 1:
                raise UserError(f"--{name}={value} must be 1 or more")
    for name in ("tables", "pooling"):
        value = getattr(options, name)
        if value is not None and "dlrm" not in (options.shapes or ()):
            said = " ".join(map(str, value))
            raise UserError(f"--{name}={said} is of embedding bags; add --shapes dlrm")
    if options.dtype is not None and options.dtype not in FLOATS:
        raise unknown("--dtype", options.dtype, FLOATS)
    if options.tune and options.implementations:
        raise UserError("--tune with --implementations: leave one of the two out")
    variants(options.implementations, options.ops or OPS)
    if options.budget is not None and not options.budget > 0:
        raise UserError(f"--budget={options.budget} must be above 0 minutes")


def variants(
    words: Sequence[str] | None, ops: Sequence[str], tune: bool = False
) -> list[Variant] | None:
    """The implementations that `words` name, as NAME or NAME:key=value,...; None: all there are.

    tune: without words, returns all implementations of `ops`, also with the options in TRIES.
    """
    if words is not None:
        return [_variant(word, ops) for word in words]
    if not tune:
        return None
    names = dict.fromkeys(name for op in ops for name in OPERATORS[op].implementations)
    return [
        Variant(name, tuple(options.items()))
        for name in names
        for options in ({}, *TRIES.get(name, ()))
    ]


def _variant(word: str, ops: Sequence[str]) -> Variant:
    name, _, rest = word.partition(":")
    found = [OPERATORS[op].implementations for op in ops]
    if not any(name in each for each in found):
        raise unknown("--implementations", name, dict.fromkeys(n for each in found for n in each))
    known = {key for each in found if name in each for key in each[name].options}
    options = []
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in known or not value:
            wanted = ", ".join(f"{each}=VALUE" for each in sorted(known)) or "none"
            raise UserError(f"--implementations={word}: {part!r} is no option; {name} has {wanted}")
        option = _option(value)
        for each in found:
            if name in each:
                check_values(f"--implementations={word}", each[name], {key: option})
        options.append((key, option))
    return Variant(name, tuple(options))


def recorded(way: str, op: str) -> Variant | None:
    """The Variant of a record's `way`; None if the implementation or an option no longer exists."""
    try:
        (found,) = variants([way], [op]) or []
    except UserError:
        return None
    return found


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _option(text: str) -> Any:
    """The value of an option: a number or a boolean, as in tables or, with capitals, in older
    records; else the text."""
    try:
        value = parse_json({"True": "true", "False": "false"}.get(text, text))
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def accepts(implementation: Implementation, variant: Variant) -> bool:
    return {key for key, _ in variant.options} <= set(implementation.options)


def expand(options: Any, ranks: int, cpu: bool) -> tuple[list[OpPoint], list[str]]:
    """The points of the options, and a line for each that cannot run on so many ranks.

    On a CPU the default shape is the tiny model's, and the default dtype float32.
    """
    shapes = options.shapes or (["tiny"] if cpu else ["flux-gpt3"])
    found: dict[OpPoint, str | None] = {}
    for shape in shapes:
        for point in _of_shape(shape, options, ranks, cpu):
            found[point] = _refusal(point)
    left_out = [f"{point}: {why}" for point, why in found.items() if why]
    points = [point for point, why in found.items() if not why]
    if not points:
        if not left_out:
            raise UserError(f"no case is left: --shapes {' '.join(shapes)} has none of --ops")
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise UserError(f"no case is left: {left_out[0]}{more}")
    return points, left_out


def _of_shape(shape: str, options: Any, ranks: int, cpu: bool) -> list[OpPoint]:
    ops = options.ops or OPS
    dtype = options.dtype or ("float32" if cpu else "bfloat16")
    points = []
    for matrix in matrices(shape):
        name, n, k = shape, matrix.n, matrix.k
        if isinstance(matrix, Experts):
            for op in OF_EXPERTS if options.ops is None else [op for op in OF_EXPERTS if op in ops]:
                for m in options.m or TOKENS:
                    rows = m * matrix.top
                    points.append(OpPoint(op, name, rows, n, k, ranks, dtype, matrix.experts))
            continue
        name = f"{shape} {matrix.name}".rstrip()
        for op in matrix.ops if options.ops is None else [op for op in matrix.ops if op in ops]:
            for m in options.m or rows_of(op):
                points.append(OpPoint(op, name, m, n, k, ranks, dtype))
    if shape == "dlrm" and BAGS in ops:
        dtype = options.dtype or "float32"
        points += [
            OpPoint(BAGS, shape, m, ranks * tables * DIM, DIM, ranks, dtype, 0, tables, pooling)
            for m in options.m or BATCHES
            for tables in options.tables or TABLES
            for pooling in options.pooling or POOLING
        ]
    return points


def rows_of(op: str) -> tuple[int, ...]:
    """The default values of m; operators that scatter no rows also have those of decoding."""
    if op == FEW:
        return FEW_ROWS
    return PRODUCT_ROWS if op in SCATTERED else tuple(sorted({*FEW_ROWS, *PRODUCT_ROWS}))


def _refusal(point: OpPoint) -> str | None:
    """Why so many ranks cannot share the call, with the remedy."""
    split = {"n": point.n} if point.op in BY_COLUMNS else {"k": point.k}
    if point.op in (BAGS, *OF_EXPERTS):
        split = {"experts": point.experts}
    if point.op in (*SCATTERED, BAGS, *OF_EXPERTS):
        split["m"] = point.m
    for name, size in split.items():
        if size % point.ranks:
            return (
                f"{point.ranks} ranks do not divide {name} {size}; give other ranks or another --m"
            )
    if point.op in OF_EXPERTS and point.m * point.ranks % point.experts:
        return (
            f"{point.experts} experts do not share {point.m} rows a rank evenly; give another --m"
        )
    return None
