"""Exchanges inside of products (`ladder.ops`): what they take beside the product.

The operators' table picks the implementation of each call. One that does not overlap takes the
backend's exchange after or before the product, whole; one that does what its schedule takes beyond
the product alone, executed on all ranks (`ladder.perf.operators`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ladder.models.errors import UserError
from ladder.parallel.overlap import ALONE, GATHER, LANDING, SCATTER
from ladder.perf.machine import Machine

if TYPE_CHECKING:
    from ladder.comm.capture import Mode

OPERATORS = {
    "all-gather": GATHER,
    "reduce-scatter": SCATTER,
    "all-reduce": "matmul_all_reduce",
    "landing": LANDING,  # of rows that are scattered, with the scatter
}
EXCHANGES = {op: kind for kind, op in OPERATORS.items()}
GRADIENTS = {EXCHANGES[alone]: op for op, alone in ALONE.items()}  # by the exchange in them
# Of the backend's exchange, the median of benchmarks/results/2026-11-22-ops-h200x2.jsonl:
# all-reduces that add in the order of the ranks.
STAGED = {"matmul_all_reduce": 1.47}


class Inside:
    """What exchanges inside of products take on so many of a machine's GPUs."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        from ladder.perf.operators.predict import Predictor  # slow to import, and needed by few

        self.predictor, self.machine, self.ranks = Predictor(machine), machine, ranks

    def __call__(
        self, kind: str, sizes: tuple[int, int, int], any_order: bool, backend_us: float,
        mode: Mode, back: bool = False,
    ) -> float:  # fmt: skip
        """Microseconds beside the product; backend_us: of the backend's exchange.

        kind: a key of OPERATORS. sizes: of the product, as the table has them: m, n, k. mode: in
        which the table is asked; what the host takes is not in the time, since it is ahead. back:
        the product and that of the matrix's gradient.
        """
        from ladder.ops.registry import SERIAL  # slow to import, and needed by few

        op = (GRADIENTS if back else OPERATORS)[kind]
        name, options = picked(op, self.machine.gpu, self.ranks, sizes, any_order, mode)
        if name in SERIAL and back:  # one by one, the first by an operator of its own
            return self(kind, sizes, any_order, backend_us, mode)
        if name in SERIAL:
            return (STAGED.get(op, 1.0) if name == "staged" else 1.0) * backend_us
        from ladder.bench.ops.points import BY_COLUMNS, OpPoint, Variant

        m, n, k = sizes
        n, k = (n * self.ranks, k) if op in BY_COLUMNS else (n, k * self.ranks)
        point = OpPoint(op, "", m, n, k, self.ranks, "bfloat16")
        return max(0.0, self.predictor(point, Variant(name, options)).ect_us)


@functools.lru_cache(maxsize=256)
def picked(
    op: str, gpu: str, ranks: int, sizes: tuple[int, int, int], any_order: bool, mode: Mode
) -> tuple[str, tuple[tuple[str, object], ...]]:
    """The implementation of a call by the operators' table, and its options."""
    import torch  # as all of these slow to import, and needed by few

    from ladder.ops import choice, registry

    call = registry.call_of(op, gpu, torch.bfloat16, ranks, sizes, any_order, mode)
    name, options = choice.listed(call)
    return name, tuple(sorted(options.items()))


def check_weights(weights: str) -> None:
    """Raise UserError for matrices that fused operators do not multiply by."""
    if weights != "bf16":
        raise UserError(
            f"--reducers fused with --weights={weights}: fused operators multiply by matrices of "
            f"16 bits; leave one of them out"
        )
