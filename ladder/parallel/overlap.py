"""Whether the prompts of a model run by fused operators without being asked to.

That is measured twice: the dispatch table says from which size a prompt by operators that overlap
was faster (`Prefill.fused`), and the operators' table which products have such operators. A prompt
whose products have none would wait for exchanges in the order of the ranks, which take longer than
the copies between products.
"""

from __future__ import annotations

import torch

from ladder.comm.capture import Mode
from ladder.costs import GRAPHED_PROMPT_TOKENS, product_shapes
from ladder.models.config import ModelConfig

OF_PRODUCTS = {
    "qkv": "all_gather_matmul", "gate-up": "all_gather_matmul",
    "output": "matmul_reduce_scatter_add_rms_norm", "down": "matmul_reduce_scatter_add_rms_norm",
}  # fmt: skip


class Overlap:
    """Says of a prompt's tokens whether all products of its layers have an operator that overlaps.

    config: of a model whose matrices have `dtype`, without biases of outputs and MLPs. gpu: the
    name of the GPU. ranks: of the group.
    """

    def __init__(
        self, config: ModelConfig, gpu: str, ranks: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        shapes = product_shapes(config, ranks)
        self.products = tuple((op, *shapes[part]) for part, op in OF_PRODUCTS.items())
        self.gpu, self.ranks, self.dtype = gpu, ranks, dtype

    def __call__(self, tokens: int) -> bool:
        from ladder.ops import choice, registry  # late: 0.1 s, for prompts that are large enough

        rows = -(-tokens // self.ranks) * self.ranks  # what is missing is padded
        for op, outputs, inputs in self.products:
            sizes, mode = (rows, outputs, inputs), prompt_mode(rows)
            call = registry.call_of(op, self.gpu, self.dtype, self.ranks, sizes, False, mode)
            if choice.listed(call)[0] in registry.SERIAL:
                return False
        return True


def prompt_mode(tokens: int) -> Mode:
    """How the engine runs a prompt of so many tokens, unless its graphs are off or all in use."""
    return "captured" if tokens <= GRAPHED_PROMPT_TOKENS else "eager"
