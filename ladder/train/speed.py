"""The speed of a run: tokens per second, the share of waiting for data, memory and MFU."""

from __future__ import annotations

import time

import torch

from ladder.costs import training_flops_per_token
from ladder.models.config import ModelConfig
from ladder.parallel import launch
from ladder.train.efficiency import peak_flops
from ladder.train.prefetch import Prefetcher


class Speed:
    """Tokens per second, in total and per rank, and the share of the host's time spent waiting."""

    def __init__(self, tokens_per_step: int, batches: Prefetcher, step: int) -> None:
        self.tokens_per_step, self.batches = tokens_per_step, batches
        self.begin(step)

    def begin(self, step: int) -> None:
        """Start counting now, after `step` steps."""
        self.step, self.since, self.waited = step, time.perf_counter(), self.batches.waited

    def up_to(self, step: int) -> dict[str, float]:
        """The figures of the steps since the last call; starts counting anew."""
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
    """The peak memory of this rank in GiB, and the MFU if the GPU's peak is known; {} on a CPU.

    memory_reserved_gib: the memory that the allocator reserved, which determines what fits. It is
    more than memory_gib: memory that another CUDA stream used is free only when that stream is
    done with it.
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
