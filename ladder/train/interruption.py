"""SIGTERM, as SLURM sends it to a job that it preempts: a wish to stop, not a death."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.parallel import launch


class Interruption:
    """Within `with`, SIGTERM is noted and ends nothing. In the main thread alone: elsewhere Python
    lets nobody handle signals, and SIGTERM does what it did."""

    def __init__(self) -> None:
        self.noted = False

    def __enter__(self) -> Interruption:
        self.handles = threading.current_thread() is threading.main_thread()
        if self.handles:
            self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.handles:
            signal.signal(signal.SIGTERM, self.before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True

    def on_any_rank(self, device: torch.device) -> Tensor:
        """[1], above 0 where a rank has been told to stop: on the device, and not waited for.

        All ranks must ask, and hear the same.
        """
        noted = torch.full((1,), float(self.noted), device=device)  # no copy, which would wait
        if launch.world_size() > 1:
            dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return noted
