"""A pool of processes that returns results in the order of the work."""

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
    """Each item with `work(item)`, computed by `workers` processes; 1: by this process.

    This process draws `items` as they are needed, a few more than there are workers. Close the
    iterator to end the workers; they also end when this process ends, in whatever way. Raises the
    exception of the first item for which `work` fails; UserError if a worker is killed.
    """
    if workers == 1:
        for item in items:
            yield item, work(item)
        return
    context = multiprocessing.get_context("spawn")  # a fork would lose this process's threads
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin, (theirs, workers, work))
    running: deque[tuple[T, Future[R]]] = deque()
    failure: Exception | None = None  # raised by `items`; results before it are yielded first
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
            f"one of workers={workers} processes was killed, perhaps for lack of memory; use fewer"
        ) from error
    finally:
        ours.close()  # ends the workers, even in the middle of an item
        pool.shutdown(cancel_futures=True)
        theirs.close()


_work: Callable[[Any], Any]  # set in each worker


def _begin(lifeline: Connection, workers: int, work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # The tokenizers library reads this when it first tokenises.
    os.environ["RAYON_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))

    def watch() -> None:
        lifeline.poll(None)  # until the parent closes the other end or ends
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do(item: Any) -> Any:
    return _work(item)
