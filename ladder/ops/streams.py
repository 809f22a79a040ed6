"""The CUDA streams that the steps of a schedule name."""

from __future__ import annotations

from typing import Any

import torch

from ladder.comm import driver
from ladder.ops.steps import Stream


class CudaStreams:
    """The current stream, and the others that schedules name, each made on first use."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream | None = None) -> None:
        """main: in place of the current stream."""
        self.device = device
        self.now = main or torch.cuda.current_stream(device)
        self.by_name: dict[Stream, torch.cuda.Stream] = {"main": self.now}
        self.events: dict[str, torch.cuda.Event] = {}

    def begin(self) -> None:
        self.callers = torch.cuda.current_device()  # which `enter` may change

    def end(self) -> None:
        """The current stream and device are the caller's again."""
        self.enter("main")
        if self.callers != self.device.index:
            torch.cuda.set_device(self.callers)

    def enter(self, stream: Stream) -> None:
        """Make this stream and its device current: what follows is enqueued on it."""
        if stream not in self.by_name:
            self.by_name[stream] = torch.cuda.Stream(self.device)
        self.now = self.by_name[stream]
        torch.cuda.set_stream(self.now)  # a context of torch's would ask for the current one first

    def record(self, event: str) -> None:
        self.events.setdefault(event, torch.cuda.Event()).record(self.now)

    def follow(self, event: str) -> None:
        self.now.wait_event(self.events[event])

    def enqueue(self, words: Any) -> None:
        driver.enqueue(words, self.now.cuda_stream)
