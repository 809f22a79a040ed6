"""Prefetching of a run's batches by a thread, in the order of the steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from ladder.data.batches import Batches
from ladder.models.documents import starts_of
from ladder.train.config import TrainConfig

DEPTH = 2  # batches


class MicroBatch(NamedTuple):
    """The input of one forward pass: tokens and targets, both int64 [micro-batch, seq_len].

    documents: the starts of documents (see `document_starts`); None: they are not kept apart.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None


class Batch(NamedTuple):
    """This rank's share of one step: the numbers of its windows, and its micro-batches.

    targets: the number of targets of the whole step / the number of data-parallel ranks.
    """

    windows: list[int]
    parts: list[MicroBatch]
    targets: float


def read_batch(
    windows: Batches, config: TrainConfig, step: int, rank: int, ranks: int, micro: int, end: int
) -> Batch:
    """The batch of data-parallel rank `rank` of `ranks`, in parts of `micro` sequences.

    end: the end-of-text token.
    """
    drawn = windows.order(step, config.batch_size, config.seed, rank, ranks)
    tokens, targets = windows.read(drawn)
    begins = windows.begins(drawn, tokens, end if config.mask_documents else None)
    parts = [
        MicroBatch(
            tokens[at : at + micro],
            targets[at : at + micro],
            None if begins is None else starts_of(begins[at : at + micro]),
        )
        for at in range(0, len(drawn), micro)
    ]
    # Every rank counts the targets of all ranks, which needs no communication.
    whole = drawn if ranks == 1 else windows.order(step, config.batch_size, config.seed)
    return Batch(drawn, parts, windows.targets(whole) / ranks)


class Prefetcher:
    """An iterator over batches, which a thread reads ahead of training. Use it inside a `with`.

    It returns read(step) for each of `steps`, with the parts on `device`. One thread reads in
    order, up to DEPTH batches ahead, so the result does not depend on timing. An error of `read` is
    raised when that batch is requested. The thread ends with the `with`.

    waited: the seconds so far in which training waited for batches and their copies.
    """

    def __init__(self, read: Callable[[int], Batch], steps: range, device: torch.device) -> None:
        self.read, self.device, self.waited = read, device, 0.0
        self.steps: Iterator[int] = iter(steps)
        self.coming: deque[Future[Batch]] = deque()

    def __enter__(self) -> Prefetcher:
        if self.device.type == "cuda":  # otherwise its pinned memory may belong to another GPU
            device = (self.device,)
            self.pool = ThreadPoolExecutor(1, "batches", torch.cuda.set_device, device)
        else:
            self.pool = ThreadPoolExecutor(1, "batches")
        for _ in range(DEPTH):
            self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Batch:
        if not self.coming:
            raise StopIteration
        begun = time.perf_counter()
        batch = self.coming.popleft().result()
        self._start()
        parts = [
            # torch's allocator keeps pinned memory until the copy from it is finished.
            MicroBatch(*(None if x is None else x.to(self.device, non_blocking=True) for x in part))
            for part in batch.parts
        ]
        self.waited += time.perf_counter() - begun
        return batch._replace(parts=parts)

    def _start(self) -> None:
        if (step := next(self.steps, None)) is not None:
            self.coming.append(self.pool.submit(self._fetch, step))

    def _fetch(self, step: int) -> Batch:
        batch = self.read(step)
        if self.device.type != "cuda":
            return batch
        parts = [
            MicroBatch(*(None if x is None else x.pin_memory() for x in p)) for p in batch.parts
        ]
        return batch._replace(parts=parts)
