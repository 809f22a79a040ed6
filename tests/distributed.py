"""Real ranks for the tests: pools of processes with one gloo group each, started once a session.

    def summed(rank: int, world_size: int, value: float) -> float:   # at a module's top level
        total = torch.tensor(value + rank)
        dist.all_reduce(total)
        return total.item()

    def test_sum(pools: Pools) -> None:
        assert pools(2).run(summed, 1.0) == [3.0, 3.0]

`pools(world_size)` gives the pool of that many processes, started when it is first asked for.
`Pool.run(function, *args, limit=PATIENCE)` calls function(rank, world_size, *args) on every rank
and returns the results by rank. Function, arguments and results are pickled, so the function is a
module's, not a closure. If a rank raises, RankError carries the first one's traceback; if one dies
or the limit passes, RankError says which, and where each of the others stood. After any of these
the pool is ended, for its group may be out of step, and the next `run` starts a new one: nothing
hangs, and no test sees what another left behind.

In a worker: `tp_mesh(tp)` is the mesh of this rank's TP group and `mesh(dp, tp)` that of both
dimensions, each built once per process. torch runs with one thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# What ranks and commands of tests import, once; first what must be imported before any kernel.
PRELOAD = [
    "torch", "tests.interpreter", "pytest", "torch._dynamo", "ladder.train.loop",
    "ladder.infer.command", "tests.distributed",
]  # fmt: skip
PATIENCE = 300.0  # seconds until something counts as hung, on a machine that may be busy
GRACE = 2.0  # seconds for the other ranks to report after the first has failed


class RankError(AssertionError):
    """A call failed on a rank; the message is that rank's traceback, or what became of it."""


@functools.cache
def mesh(dp: int, tp: int) -> DeviceMesh:
    """The mesh (dp, tp) over all ranks of this worker's pool."""
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def tp_mesh(tp: int) -> DeviceMesh:
    """The one-dimensional mesh of this rank's TP group; the other ranks form further groups."""
    return mesh(dist.get_world_size() // tp, tp)["tp"]


def _work(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    """A worker: answers calls until its pipe closes."""
    torch.set_num_threads(1)
    if "lo" in [name for _, name in socket.if_nameindex()]:
        # gloo listens on the machine's own address otherwise, which a container may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stacks = (Path(folder) / f"stack{rank}").open("w")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PATIENCE),
    )
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, args, limit = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit * 0.9, file=stacks)
        try:
            answer = (True, function(rank, world_size, *args))
        except BaseException:  # every failure is the test's to see
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        # A model that trains by fused operators allows any order for its group, which lives on.
        if choice := sys.modules.get("ladder.ops.choice"):
            choice.any_order_groups.clear()
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except OSError:  # another rank failed first, and nobody listens
            return


class Pool:
    """`world_size` processes that share one gloo group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, limit: float = PATIENCE) -> list[Any]:
        """function(rank, world_size, *args) of every rank, by rank; limit in seconds."""
        if not self._workers:
            self._start()
        call = pickle.dumps((function, args, limit))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        return self._collect(limit, getattr(function, "__name__", "call"))

    def _start(self) -> None:
        # One process imports torch, then forks each worker, which therefore starts at once and
        # with nothing of pytest's or the tests' state.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ladder-ranks-")
        for rank in range(self.world_size):
            ours, theirs = server.Pipe()
            worker = server.Process(
                target=_work,
                args=(rank, self.world_size, self._folder.name, theirs),
                name=f"rank {rank} of {self.world_size}",
                daemon=True,
            )
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        self._collect(PATIENCE, "start")

    def _collect(self, limit: float, what: str) -> list[Any]:
        """One answer of each rank; on the first failure ends the pool and raises RankError."""
        answers: dict[int, Any] = {}
        failures: list[str] = []
        end = time.monotonic() + limit
        while len(answers) < self.world_size:
            waiting = [pipe for r, pipe in enumerate(self._pipes) if r not in answers]
            ready = wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                if not failures:
                    silent = [r for r in range(self.world_size) if r not in answers]
                    failures.append(
                        f"no answer from rank {', '.join(map(str, silent))} of "
                        f"{self.world_size} to {what!r} within {limit:g} s\n{self._stacks()}"
                    )
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._workers[rank].join(1.0)
                    good, answer = False, f"died with exit code {self._workers[rank].exitcode}"
                answers[rank] = answer
                if not good:
                    failures.append(f"rank {rank} of {self.world_size}, {what!r}: {answer}")
                    end = min(end, time.monotonic() + GRACE)
        if failures:
            self.close()
            # A peer that lost its connection fails too: what came first is the cause.
            raise RankError(failures[0] + _others(failures[1:]))
        return [answers[rank] for rank in range(self.world_size)]

    def _stacks(self) -> str:
        """Where each rank stood shortly before the limit, as far as it was written down."""
        texts = []
        for rank in range(self.world_size):
            with contextlib.suppress(OSError):
                assert self._folder is not None
                text = (Path(self._folder.name) / f"stack{rank}").read_text()
                texts.append(f"rank {rank} stood at:\n{text}" if text else "")
        return "\n".join(texts)

    def close(self) -> None:
        """End the processes of this pool; a later `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for worker in self._workers:
            worker.join(0.5)
            if worker.is_alive():
                worker.kill()
            worker.join()
        self._workers, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _others(failures: list[str]) -> str:
    last = [failure.strip().splitlines()[-1] for failure in failures]
    return "".join(f"\nalso: {line}" for line in last)


class Pools:
    """The session's pools by world size; `pools(4)` is that of 4 processes."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world_size: int) -> Pool:
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
