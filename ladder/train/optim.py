"""AdamW, the learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ladder.models.transformer import Transformer
from ladder.parallel.data import size_of
from ladder.parallel.sharding import local_tensor
from ladder.train.config import TrainConfig


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW, with weight decay where a parameter's spec says so (matrices and embeddings)."""
    decayed: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (decayed if model.specs[name].decay else rest).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.adam_eps, fused=True
    )
    # The flag by which torch's GradScaler makes a fused step do nothing, without a host sync.
    optimizer.found_inf = torch.zeros((), device=rest[0].device)
    return optimizer


def skip_from_here_on(optimizer: torch.optim.Optimizer, when: Tensor) -> None:
    """If `when` (a bool on the device) is true, this step and all later ones change nothing."""
    skipped: Tensor = optimizer.found_inf
    skipped.copy_(torch.maximum(skipped, when))


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of `step` (0 is the first): a linear warm-up to lr, then a cosine to min_lr.

    The last step has min_lr, unless the run has one step only: this has lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = config.steps - 1 - config.warmup_steps
    if not span:  # one step is left
        return config.min_lr if step else config.lr
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def clip_gradients(model: Transformer, limit: float, mesh: DeviceMesh | None = None) -> Tensor:
    """Scale all gradients so that their norm over the whole mesh is at most `limit`.

    Returns the norm before clipping, float32 [] on the device. Each rank sums the squares of its
    own gradients in float32. One collective over `tp` adds those of the parameters that TP splits,
    and one over `shard` adds the sums of the shards.
    """
    processes = model.reducer.ranks.processes
    grads: dict[bool, list[Tensor]] = {True: [], False: []}  # key: TP's processes share them
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[model.specs[name].shared(processes)].append(local_tensor(parameter.grad))
    shared, split = (nn.utils.get_total_norm(each).square() for each in grads.values())
    whole = shared + model.reducer.sum_(split)
    if mesh is not None and size_of(mesh, "shard") > 1:
        dist.all_reduce(whole, group=mesh.get_group("shard"))
    norm = whole.sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for each in grads.values():
        torch._foreach_mul_(each, scale)
    return norm
