"""The names of `torch.ops.ladder`'s products that exchange rows, for all that asks about them.

`ladder.ops` defines the operators (docs/operators.md). This module imports nothing: predictions ask
by name, and need no torch.
"""

GATHER = "all_gather_matmul"
SCATTER = "matmul_reduce_scatter"
REDUCE = "matmul_all_reduce"
REDUCE_LINEAR = "linear_all_reduce"
LANDING = "matmul_reduce_scatter_add_rms_norm"
REDUCE_LANDING = "matmul_all_reduce_add_rms_norm"
GATHER_BACKWARD = "all_gather_matmul_backward"
SCATTER_BACKWARD = "matmul_reduce_scatter_backward"
