"""One training step, launched asynchronously.

The result of a step is read while the device computes the next one. So the host, which needs time
to launch thousands of kernels, is one step ahead, and the device never waits for it. For the same
reason the device itself checks that a step's loss and gradient norm are finite: from the first step
on in which one is not, no step changes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ladder.models.plan import Plan
from ladder.models.transformer import Transformer
from ladder.parallel.data import data_parallel, reduce_gradients, sum_over_data
from ladder.parallel.sharding import sum_shared_gradients
from ladder.train.objective import Objective, cross_entropy
from ladder.train.optim import clip_gradients, skip_from_here_on
from ladder.train.prefetch import Batch


@dataclass(frozen=True)
class Outcome:
    """The result of a step.

    own_loss: this rank's part of the loss. norm: the norm of all gradients before clipping. sums:
    the objective's sums over all ranks, the loss first.
    """

    own_loss: float
    norm: float
    sums: list[float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.sums[0])


def to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy `values` [n] to the host; returns a function that waits for the copy."""
    if not values.is_cuda:
        return values.tolist
    copy = values.to("cpu", non_blocking=True)  # to page-locked memory
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        found: list[float] = copy.tolist()
        return found

    return read


def take_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    mesh: DeviceMesh | None,
    grad_clip: float,
    objective: Objective = cross_entropy,
    plan: Plan | None = None,
) -> Callable[[], Outcome]:
    """Launch forward, backward, clipping to norm `grad_clip`, and the optimiser's step.

    plan: the plan in force; None: the model's own.

    Returns a function that waits for the step and returns its outcome.
    """
    own = backward(model, batch, objective, plan)
    sums = sum_over_data(own.clone(), mesh) / data_parallel(mesh)[0]
    if mesh is not None:
        sum_shared_gradients(model)
    norm = clip_gradients(model, grad_clip, mesh)
    skip_from_here_on(optimizer, ~(norm.isfinite() & sums[0].isfinite()))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    read = to_host(torch.cat((torch.stack((own[0], norm)), sums)))

    def outcome() -> Outcome:
        own_loss, norm, *sums = read()
        return Outcome(own_loss, norm, sums)

    return outcome


def backward(
    model: Transformer,
    batch: Batch,
    objective: Objective = cross_entropy,
    plan: Plan | None = None,
) -> Tensor:
    """Accumulate the gradients of this rank's part of the loss; returns its part of the sums.

    The mean over the data-parallel ranks is the mean over all targets of the step, even if ranks
    have different numbers of targets.
    """
    total = torch.zeros(1, device=batch.parts[0].tokens.device)
    for n, part in enumerate(batch.parts, 1):
        reduce_gradients(model, now=n == len(batch.parts))
        sums = objective(model, part, plan) / batch.targets
        sums[0].backward()
        total = total + sums.detach()
    return total
