"""One training step, launched and not waited for.

What became of a step is read later, while the device computes the next one: so the host, which
takes its time to launch thousands of kernels, is a step ahead, and the device never waits for it.
That a step's numbers are finite is therefore looked at on the device as well: from the first step
that is not, no step changes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ladder.models.transformer import Transformer
from ladder.parallel.data import data_parallel, reduce_gradients, sum_over_data
from ladder.parallel.sharding import sum_shared_gradients
from ladder.train.objective import Objective, cross_entropy
from ladder.train.optim import clip_gradients, skip_from_here_on
from ladder.train.prefetch import Batch


@dataclass(frozen=True)
class Outcome:
    """What a step came to: this rank's part of the loss, the norm of all gradients before they were
    clipped, and the objective's sums, of all ranks, the loss first."""

    own_loss: float
    norm: float
    sums: list[float]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.sums[0])


def to_host(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy values [n] to the host; what is returned waits for them, when it is called."""
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
) -> Callable[[], Outcome]:
    """Forward, backward, gradients clipped to norm `grad_clip`, and the optimiser's step.

    Returns what waits for the step, when it is called, and tells its outcome.
    """
    own = backward(model, batch, objective)
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


def backward(model: Transformer, batch: Batch, objective: Objective = cross_entropy) -> Tensor:
    """Accumulate the gradients of this rank's part of the loss; returns its part of the sums.

    The mean over the data-parallel ranks is the mean over all targets of the step, of which the
    ranks may have more or fewer.
    """
    total = torch.zeros(1, device=batch.parts[0].tokens.device)
    for n, part in enumerate(batch.parts, 1):
        reduce_gradients(model, now=n == len(batch.parts))
        sums = objective(model, part) / batch.targets
        sums[0].backward()
        total = total + sums.detach()
    return total
