"""Whether a model's prompts and training steps run by fused operators by default.

They do if the operators' table names an overlapping implementation for every product of a layer,
and in training also for those of its gradients. With any other implementation the exchange would
block, which takes longer than the reducers without fused operators. For prompts the dispatch table
also has the size from which fused operators were faster (`Prefill.fused`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.costs import GRAPHED_PROMPT_TOKENS, product_shapes, reduce_bytes
from ladder.models.config import ModelConfig
from ladder.operator_names import GATHER, GATHER_BACKWARD, LANDING, SCATTER, SCATTER_BACKWARD
from ladder.parallel.dispatch import load_dispatch

if TYPE_CHECKING:  # what predictions ask here needs no torch
    import torch
    import torch.distributed as dist

    from ladder.comm.capture import Mode

ALONE = {GATHER_BACKWARD: SCATTER, SCATTER_BACKWARD: GATHER}  # their exchange, one by one
FIRST, LAST = ("qkv", "gate-up"), ("output", "down")  # the products of a sublayer


class Overlap:
    """For a pass's number of tokens: whether an operator that overlaps exists for all its products.

    config: of a model whose matrices have `dtype`; its output projections and MLPs have no biases.
    gpu: the name of the GPU. ranks: the size of the group. group: ask for this group on this
    machine, by what `ladder.ops` picks; None: ask the table alone, for any machine. training: ask
    for training passes, forward and backward, whose sums may be in any order; otherwise for
    prompts.
    """

    def __init__(
        self, config: ModelConfig, gpu: str, ranks: int, dtype: torch.dtype,
        group: dist.ProcessGroup | None = None, training: bool = False,
    ) -> None:  # fmt: skip
        shapes = product_shapes(config, ranks)
        last = SCATTER if training else LANDING
        found = [(GATHER, *shapes[part]) for part in FIRST]
        found += [(last, *shapes[part]) for part in LAST]
        if training:  # a gradient's product is by the transposed matrix, its operator the other one
            found += [(GATHER_BACKWARD, *shapes[part][::-1]) for part in FIRST]
            found += [(SCATTER_BACKWARD, *shapes[part][::-1]) for part in LAST]
        self.products = tuple(found)
        self.gpu, self.ranks, self.dtype, self.group = gpu, ranks, dtype, group
        self.training = training

    def __call__(self, tokens: int, mode: Mode) -> bool:
        """mode: the mode of the calls, see `ladder.comm.capture`."""
        from ladder.ops import choice, registry  # late: 0.1 s, for prompts that are large enough

        rows = -(-tokens // self.ranks) * self.ranks  # padded to a multiple of the ranks
        here = self.group is not None
        any_order = self.training or (here and choice.allows_any_order(self.group))

        def serial(op: str, *sizes: int) -> bool:
            call = registry.call_of(op, self.gpu, self.dtype, self.ranks, sizes, any_order, mode)
            picked = choice.choose(call).implementation if here else choice.listed(call)[0]
            return picked in registry.SERIAL

        for op, *sizes in self.products:
            # Gradients may also be computed one by one, by operators with an exchange each.
            ways = (op, ALONE[op]) if op in ALONE else (op,)
            if all(serial(each, rows, *sizes) for each in ways):
                return False
        return True


def prompt_mode(tokens: int) -> Mode:
    """How the engine runs a prompt of so many tokens, unless its graphs are off or all in use."""
    return "captured" if tokens <= GRAPHED_PROMPT_TOKENS else "eager"


def slot_bytes(config: ModelConfig, gpu: str, ranks: int, tokens: int, asked: bool = False) -> int:
    """The most bytes that fused operators keep on each rank for a prompt of `tokens` tokens.

    They keep two sets of slots for gathers and two for scatters. A set holds all rows in bfloat16,
    and may be up to a quarter larger (`ladder.ops.workspace`). asked: the user chose reducer=fused;
    otherwise 0 where the dispatch table lets no such prompt run by operators.
    """
    if ranks == 1 or not (asked or all(config.plan.blocking)):
        return 0
    partial = reduce_bytes(config, tokens, 2)
    return 5 * partial if asked or 0 < load_dispatch(gpu, ranks).prefill.fused <= partial else 0
