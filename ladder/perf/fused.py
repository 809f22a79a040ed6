"""Exchanges inside of products (`ladder.ops`): what they take beyond the product.

The operators' table picks the implementation of each call. One that does not overlap takes the
whole time of the backend's exchange, before or after the product. One that overlaps takes what its
schedule, executed on all ranks (`ladder.perf.operators`), takes beyond the product alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ladder.models.errors import UserError
from ladder.operator_names import GATHER, LANDING, REDUCE, SCATTER
from ladder.parallel.overlap import ALONE
from ladder.perf.machine import Machine

if TYPE_CHECKING:
    from ladder.comm.capture import Mode

OPERATORS = {
    "all-gather": GATHER,
    "reduce-scatter": SCATTER,
    "all-reduce": REDUCE,
    "landing": LANDING,  # a scatter and the landing of the scattered rows
}
EXCHANGES = {op: kind for kind, op in OPERATORS.items()}
GRADIENTS = {EXCHANGES[alone]: op for op, alone in ALONE.items()}  # by the exchange in them
# The time of all-reduces that add in the order of the ranks, as a multiple of the backend's: the
# median of benchmarks/results/2026-11-22-ops-h200x2.jsonl.
STAGED = {REDUCE: 1.47}


class Inside:
    """The times of exchanges inside of products on `ranks` of a machine's GPUs."""

    def __init__(self, machine: Machine, ranks: int) -> None:
        from ladder.perf.operators.predict import Predictor  # slow to import, and needed by few

        self.predictor, self.machine, self.ranks = Predictor(machine), machine, ranks

    def __call__(
        self, kind: str, sizes: tuple[int, int, int], any_order: bool, backend_us: float,
        mode: Mode, back: bool = False,
    ) -> float:  # fmt: skip
        """Microseconds beyond the product. backend_us: the time of the backend's exchange.

        kind: a key of OPERATORS. sizes: m, n, k of the product, as in the table. mode: the one for
        which the table is asked. The host is ahead of the GPU: its time does not count. back:
        whether the operator also has the product of the matrix's gradient.
        """
        from ladder.ops.registry import SERIAL  # slow to import, and needed by few

        op = (GRADIENTS if back else OPERATORS)[kind]
        name, options = picked(op, self.machine.gpu, self.ranks, sizes, any_order, mode)
        if name in SERIAL and back:  # two products one by one, the first by its own operator
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
    """The implementation that the operators' table picks for a call, and its options."""
    import torch  # like the others, slow to import and rarely needed

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
