"""AdamW, its schedule, and what happens to gradients between backward and step."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor
from ladder.train.config import TrainConfig


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only (embeddings too; not norms or biases)."""
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "norm" not in name
        (decayed if is_matrix else rest).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step 0, 1, ...: linear warm-up to lr, cosine to min_lr at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Average every gradient over the data-parallel `group`: one all-reduce per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        assert parameter.grad is not None
        by_dtype[parameter.grad.dtype].append(local_tensor(parameter.grad))
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


@torch.no_grad()
def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients so that their norm over the whole mesh is at most `limit`.

    Returns the norm before. One collective for each kind of placement.
    """
    by_placement: dict[object, list[Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        by_placement[grad.placements if isinstance(grad, DTensor) else None].append(grad)
    norms = [nn.utils.get_total_norm(grads) for grads in by_placement.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    scale = (limit / (total + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        local_tensor(parameter.grad).mul_(scale)
    return float(total)
