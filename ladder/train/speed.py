"""How fast a run is: tokens a second, the share of waiting for data, and the use of its GPUs."""

from __future__ import annotations

import time

import torch

from ladder.costs import training_flops_per_token
from ladder.models.config import ModelConfig
from ladder.parallel import launch
from ladder.train.efficiency import peak_flops
from ladder.train.prefetch import Prefetcher


class Speed:
    """Tokens a second, of all ranks and of each, and the share of the host's time that went into
    waiting for batches."""

    def __init__(self, tokens_per_step: int, batches: Prefetcher, step: int) -> None:
        self.tokens_per_step, self.batches = tokens_per_step, batches
        self.begin(step)

    def begin(self, step: int) -> None:
        """Count from now on, after so many steps."""
        self.step, self.since, self.waited = step, time.perf_counter(), self.batches.waited

    def up_to(self, step: int) -> dict[str, float]:
        """Of the steps up to this one; the next are counted from here."""
        seconds = time.perf_counter() - self.since
        rate = self.tokens_per_step * (step - self.step) / seconds
        found = {
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / launch.world_size(),
            "data_wait": (self.batches.waited - self.waited) / seconds,
        }
        self.begin(step)
        return found


def utilisation(
    config: ModelConfig, seq_len: int, speed: float, device: torch.device
) -> dict[str, float]:
    """On GPUs: the most memory so far (GiB, this rank's), and where its peak is known the MFU.

    memory_reserved_gib: with what the allocator holds beside tensors, which decides what fits: the
    memory of a tensor that another stream used is free again only when that stream is done.
    """
    if device.type != "cuda":
        return {}
    found = {
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }
    peak = peak_flops(device)
    if peak is not None:
        found["mfu"] = (
            speed * training_flops_per_token(config, seq_len) / (peak * launch.world_size())
        )
    return found
