"""SIGTERM, which SLURM sends to preempted jobs, as a request to stop training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.parallel import launch
from ladder.train.step import to_host


class Interruption:
    """Inside a `with`, SIGTERM is recorded and does not end the process.

    SIGTERM is also blocked, since child processes inherit that. Otherwise a signal to the whole
    process group, as SLURM sends it, would end the compilers that torch.compile has started, and
    with them the step. A thread that began earlier does not block SIGTERM; if it receives the
    signal, Python runs the handler in the main thread. What this costs: torch ends its compilers
    by SIGTERM, too, so that leaving in the middle of a compile waits for it.

    This works in the main thread only. In other threads Python allows no signal handlers, so
    SIGTERM keeps its effect.
    """

    def __init__(self) -> None:
        self.handles = self._handled = False

    @property
    def noted(self) -> bool:
        """Whether SIGTERM was received."""
        return self._handled or (self.handles and signal.SIGTERM in signal.sigpending())

    def __enter__(self) -> Interruption:
        self.handles = threading.current_thread() is threading.main_thread()
        if self.handles:
            self.before = signal.signal(signal.SIGTERM, self._note)
            self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.handles:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)  # a pending one is handled here
            signal.signal(signal.SIGTERM, self.before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._handled = True

    def on_any_rank(self, device: torch.device) -> Tensor:
        """Whether any rank has received SIGTERM: [1] on the device, above 0 if so; no host wait.

        A collective: all ranks must call it, and get the same result.
        """
        noted = torch.full((1,), float(self.noted), device=device)  # no copy, which would wait
        if launch.world_size() > 1:
            dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        return noted

    def between(self, device: torch.device) -> Iterator[bool]:
        """Yields, before each piece of a long work, whether any rank was told to stop.

        An item has the answer that was asked for at the item before, so that the device is not idle
        while the host waits for it. Each item is a collective, and is the same on all ranks.
        """
        told = to_host(self.on_any_rank(device))
        yield False
        while True:
            before, told = told, to_host(self.on_any_rank(device))
            yield before() != [0]
