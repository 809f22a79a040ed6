"""Work that several processes share, with results in the order of the work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ladder.models.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    work: Callable[[T], R], items: Iterable[T], workers: int
) -> Generator[tuple[T, R], None, None]:
    """Each item with `work(item)`, done by `workers` processes; 1: by this one.

    `items` are drawn as they are needed, by this process, a few more than there are processes.
    Close the iterator to end them; they also end when this process does, however that happens.
    Raises what `work` raises, for the first item for which it does; UserError where a process dies.
    """
    if workers == 1:
        for item in items:
            yield item, work(item)
        return
    context = multiprocessing.get_context("spawn")  # this process has threads, forks would not
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin, (theirs, workers, work))
    running: deque[tuple[T, Future[R]]] = deque()
    failure: Exception | None = None  # of `items`; it waits for the results before it
    coming = iter(items)
    try:
        while True:
            while failure is None and len(running) <= 2 * workers:
                try:
                    item = next(coming)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                else:
                    running.append((item, pool.submit(_do, item)))
            if not running:
                break
            done, result = running.popleft()
            yield done, result.result()
        if failure is not None:
            raise failure
    except BrokenProcessPool as error:
        raise UserError(
            f"one of workers={workers} processes was killed, for want of memory perhaps; take fewer"
        ) from error
    finally:
        ours.close()  # which ends them, also amid an item
        pool.shutdown(cancel_futures=True)
        theirs.close()


_work: Callable[[Any], Any]  # of a worker


def _begin(lifeline: Connection, workers: int, work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act on
    # of the tokenizers library, read when it first tokenises
    os.environ["RAYON_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))

    def watch() -> None:
        lifeline.poll(None)  # until the parent closes the other end, or is no more
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do(item: Any) -> Any:
    return _work(item)
