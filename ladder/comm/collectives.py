"""Collectives of torch.distributed under the names of the installed version."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 renamed these two and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
