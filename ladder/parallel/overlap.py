"""Whether prompts and training steps of a model run by fused operators without being asked to.

They do if the operators' table names what overlaps for all products of a layer, and of training
for those of its gradients, too. Where it does not, exchanges would block in the order of the ranks
or beside NCCL's copies, which takes longer than what runs otherwise. For prompts the dispatch table
also says from which size they were faster so (`Prefill.fused`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.costs import GRAPHED_PROMPT_TOKENS, product_shapes, reduce_bytes
from ladder.models.config import ModelConfig
from ladder.parallel.dispatch import load_dispatch

if TYPE_CHECKING:  # what predictions ask here needs no torch
    import torch
    import torch.distributed as dist

    from ladder.comm.capture import Mode

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
LANDING = "matmul_reduce_scatter_add_rms_norm"
GATHER_BACKWARD, SCATTER_BACKWARD = "all_gather_matmul_backward", "matmul_reduce_scatter_backward"
ALONE = {GATHER_BACKWARD: SCATTER, SCATTER_BACKWARD: GATHER}  # what exchanges in them
FIRST, LAST = ("qkv", "gate-up"), ("output", "down")  # the products of a sublayer


class Overlap:
    """Says of a pass's tokens whether all products of its layers have an operator that overlaps.

    config: of a model whose matrices have `dtype`, without biases of outputs and MLPs. gpu: the
    name of the GPU. ranks: of the group. group: whose calls it is about, on this machine, by what
    `ladder.ops` picks for them; None: what the table names, for any machine. training: of steps,
    forward and backward, whose sums may be in any order; otherwise of prompts.
    """

    def __init__(
        self, config: ModelConfig, gpu: str, ranks: int, dtype: torch.dtype,
        group: dist.ProcessGroup | None = None, training: bool = False,
    ) -> None:  # fmt: skip
        shapes = product_shapes(config, ranks)
        last = SCATTER if training else LANDING
        found = [(GATHER, *shapes[part]) for part in FIRST]
        found += [(last, *shapes[part]) for part in LAST]
        if training:  # a gradient's product is by the transposed matrix, and its operator the other
            found += [(GATHER_BACKWARD, *shapes[part][::-1]) for part in FIRST]
            found += [(SCATTER_BACKWARD, *shapes[part][::-1]) for part in LAST]
        self.products = tuple(found)
        self.gpu, self.ranks, self.dtype, self.group = gpu, ranks, dtype, group
        self.training = training

    def __call__(self, tokens: int, mode: Mode) -> bool:
        """mode: of the calls, see `ladder.comm.capture`."""
        from ladder.ops import choice, registry  # late: 0.1 s, for prompts that are large enough

        rows = -(-tokens // self.ranks) * self.ranks  # what is missing is padded
        here = self.group is not None
        any_order = self.training or (here and choice.allows_any_order(self.group))

        def serial(op: str, *sizes: int) -> bool:
            call = registry.call_of(op, self.gpu, self.dtype, self.ranks, sizes, any_order, mode)
            picked = choice.choose(call).implementation if here else choice.listed(call)[0]
            return picked in registry.SERIAL

        for op, *sizes in self.products:
            # Gradients one by one are by an exchange of their own.
            ways = (op, ALONE[op]) if op in ALONE else (op,)
            if all(serial(each, rows, *sizes) for each in ways):
                return False
        return True


def prompt_mode(tokens: int) -> Mode:
    """How the engine runs a prompt of so many tokens, unless its graphs are off or all in use."""
    return "captured" if tokens <= GRAPHED_PROMPT_TOKENS else "eager"


def slot_bytes(config: ModelConfig, gpu: str, ranks: int, tokens: int, asked: bool = False) -> int:
    """The most memory of each rank that the operators of a prompt of so many tokens keep.

    Two sets of slots for gathers and two for scatters, each of all rows in bfloat16 and up to a
    quarter larger (`ladder.ops.workspace`). asked: for reducer=fused; otherwise 0 where the
    dispatch table lets no such prompt run by operators.
    """
    if ranks == 1 or not (asked or all(config.plan.blocking)):
        return 0
    partial = reduce_bytes(config, tokens, 2)
    return 5 * partial if asked or 0 < load_dispatch(gpu, ranks).prefill.fused <= partial else 0
