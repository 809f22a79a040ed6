"""Processes: starting them, joining them, and saying what went wrong once.

A command runs as one process, as several that `run` starts (`--nproc`), or as a rank of torchrun
or of a script that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as it does.

torch, which takes seconds to import, is imported where it is used: commands that need none of it
begin at once, and so does the process that starts ranks where they cannot be its forks.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ladder.models.errors import UserError, brief
from ladder.parallel import environment
from ladder.parallel.environment import RENDEZVOUS

if TYPE_CHECKING:
    import torch

ORDERLY = "left"  # beside it, with the rank: a file that says that the rank ends as it should
CLOSED = "closed"  # beside it: nobody reads what the processes write any more
FAILURE = "failure"  # beside it: an exit code, and what the first rank that failed has to say
PATIENCE = 3.0  # seconds from asking a rank to end to killing it
GRACE = 1.0  # seconds in which a rank's death may be noticed after the errors that follow from it
ERROR_KEY, CODE_KEY = "ladder/errors", "ladder/code"
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
ENCODING: Any = {"encoding": "utf-8", "errors": "surrogatepass"}

_told: Path | None = None  # in a process that `run` started: the folder in which it looks


def _joined() -> Any:
    """torch.distributed if this process has joined the others; one without torch has not."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def world_size() -> int:
    dist = _joined()
    return dist.get_world_size() if dist else environment.number("WORLD_SIZE", 1)


def rank() -> int:
    dist = _joined()
    return dist.get_rank() if dist else environment.number("RANK", 0)


def check_nproc(nproc: int) -> None:
    """Raise UserError unless so many processes can be started."""
    if nproc < 1:
        raise UserError(f"--nproc={nproc} must be 1 or more")
    if nproc > (most := environment.most_processes()):
        raise UserError(f"--nproc={nproc} is too many for this machine; give {most} or fewer")


def run(
    command: Callable[..., int],
    arguments: tuple[Any, ...],
    nproc: int = 1,
    modules: Sequence[str] = ("torch",),
) -> int:
    """Run `command(*arguments)` on every rank and return the exit code.

    nproc: processes to start here; 1 runs it in this process (a rank of torchrun, perhaps). A
    UserError becomes one line on standard error, once for all ranks, and exit code 2. When one
    rank fails the others are ended; when one is killed, an error names it. modules: what the ranks
    need, imported once for all of them where they can be forks.
    """
    check_nproc(nproc)
    if nproc == 1:
        return _guarded(command, arguments)
    if world_size() > 1:
        raise UserError(
            f"--nproc={nproc} under torchrun (WORLD_SIZE={world_size()}): leave --nproc out"
        )
    context: Any = multiprocessing.get_context("fork" if _may_fork() else "spawn")
    if context.get_start_method() == "fork":
        for name in modules:
            import_module(name)
    # Not a TemporaryDirectory: that is removed at the exit of any process that is a fork of ours.
    folder = tempfile.mkdtemp(prefix="ladder-")
    ranks: list[BaseProcess] = []
    before = None
    try:
        for index in range(nproc):
            details = (index, nproc, folder, os.getpid(), command, arguments)
            process = context.Process(target=_child, args=details)
            process.start()
            ranks.append(process)
        before = _pass_on(signal.SIGTERM, ranks)
        return _watch(ranks, Path(folder))
    finally:  # an interrupt of this process alone must not leave them running
        _end(ranks)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _may_fork() -> bool:
    """Whether ranks may be forks of this process, which start at once and share its imports.

    A fork has none of its parent's threads, and cannot use its CUDA context or process group. A
    process that has not even imported torch has none of them, and importing starts none. Beyond
    Linux, libraries of the system break in forks.
    """
    return (
        sys.platform == "linux"
        and "torch" not in sys.modules
        and threading.active_count() == 1  # not in a notebook
    )


def _pass_on(number: signal.Signals, ranks: Sequence[BaseProcess]) -> Any:
    """Hand a signal on to the ranks, whose business it is; returns the handler that there was.

    None where there is nothing to restore: only the main thread may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    return signal.signal(number, hand_on)


def _watch(ranks: Sequence[BaseProcess], folder: Path) -> int:
    """Wait until all ranks have left, or one has failed; returns the exit code.

    A rank that was killed, or left without a word, is named, and nothing else is said: the others
    may only know that they lost it, or wait for it inside a GPU kernel, where nothing but their end
    stops them. So it is with one that found its output closed.
    """
    left: dict[int, int] = {}  # exit codes
    orderly: set[int] = set()
    limit: float | None = None
    while len(left) < len(ranks) and len(orderly) == len(left):
        waiting = [process.sentinel for n, process in enumerate(ranks) if n not in left]
        if not wait(waiting, limit):
            break
        # Who dies lets go of the others before it can be reaped, and they may end first: so all
        # whose end has begun are looked at.
        ready = wait([process.sentinel for process in ranks], timeout=0)
        for n, process in enumerate(ranks):
            if n not in left and process.sentinel in ready:
                process.join()
                left[n] = process.exitcode or 0
                if (folder / f"{ORDERLY}{n}").exists():
                    orderly.add(n)
        if (folder / CLOSED).exists():
            return 0
        if any(left.values()):
            limit = GRACE
    code, message = _failure(folder)
    if code != 2:  # a mistake follows from no death
        for n, end in left.items():
            # Libraries abort where they lose another rank: that follows from what failed there.
            if end < 0 and not (message and -end == signal.SIGABRT):
                name = signal.Signals(-end).name if -end in set(signal.Signals) else "unknown"
                print(f"error: rank {n} was killed by signal {-end} ({name})", file=sys.stderr)
                return 1
        for n, end in left.items():
            if end >= 0 and n not in orderly:
                print(f"error: rank {n} ended with exit code {end} and no message", file=sys.stderr)
                return end or 1
    sys.stderr.write(message)
    return code or next((end for end in left.values() if end), 0)


def _failure(folder: Path) -> tuple[int, str]:
    """The exit code of the first rank that failed, and what it has to say; 0 where none has."""
    with suppress(FileNotFoundError):
        code, _, message = (folder / FAILURE).read_bytes().decode(**ENCODING).partition("\n")
        return int(code), message
    return 0, ""


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End the ranks that still run: politely, then not."""
    for process in ranks:
        if process.is_alive():
            process.terminate()
    end = time.monotonic() + PATIENCE
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(PATIENCE)


def _child(
    index: int, nproc: int, folder: str, launcher: int, command: Callable, arguments: tuple
) -> None:
    if sys.platform == "linux":  # a launcher that is killed must not leave its ranks running
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as jobs in the background do
        number = signal.SIGTERM if ignored else signal.SIGINT
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != launcher:
            return
    global _told
    _told = Path(folder)
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(nproc),
        RENDEZVOUS: str(Path(folder) / "store"),
    }
    try:
        code = _guarded(command, arguments)
    except KeyboardInterrupt:  # the launcher says so
        return
    _note(f"{ORDERLY}{index}")
    sys.exit(code)


def _note(name: str) -> None:
    """Tell `run`, by an empty file, if it has started this process."""
    if _told is not None:
        (_told / name).touch()


def _guarded(command: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    try:
        code = command(*arguments)
        if dist := _joined():
            dist.barrier()  # the others may still need this rank, or its store
    except UserError as error:
        said = f"error: {brief(str(error))}"
        return _fail(2, "\n".join([said, *getattr(error, "__notes__", ()), ""]))
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _note(CLOSED)
        return _fail(0, "")
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # any option's
            path = brief(str(error.filename), 100)
            return _fail(2, f"error: the path {path!r} is too long; give a shorter one\n")
        return _fail(1, traceback.format_exc())
    if _joined():
        atexit._run_exitfuncs()  # `_leave` does not, and torch's compile workers end so
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End this process, a rank of a group, at once.

    An ordinary exit destroys the group's threads in an order that now and then aborts the process
    ("terminate called without an active exception"), after all its work has been done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _note(f"{ORDERLY}{rank()}")
    os._exit(code)


def _fail(code: int, message: str) -> int:
    """Write the message, unless another rank failed first (the rest only follows from that).

    In a process that `run` started it is left for it to write, unless a rank has died. A rank of a
    group leaves the process here, with the first failure's code.
    """
    dist = _joined()
    if _told is not None:
        own = _told / f"{FAILURE}{rank()}"
        own.write_bytes(f"{code}\n{message}".encode(**ENCODING))
        with suppress(FileExistsError):  # another was first
            os.link(own, _told / FAILURE)  # whole, or not at all
        if dist:
            _leave(code)
        return code
    if not dist:
        sys.stderr.write(message)
        return code
    store = dist.distributed_c10d._get_default_store()
    try:
        if store.add(ERROR_KEY, 1) == 1:
            sys.stderr.write(message)
            store.set(CODE_KEY, str(code))
        else:
            code = int(store.get(CODE_KEY))
    except dist.DistError:
        pass  # the rank that held the store has left: it failed first, and has said why
    _leave(code)


def join(device: str = "auto") -> torch.device:
    """Join the other processes, if there are any, and return this one's device.

    device: `cpu`, `cuda`, or `auto` (cuda where there is one). Groups use NCCL on GPUs and gloo
    on CPUs. Raises UserError where the device is not there, and where the environment does not say
    how to meet the others, or they cannot be met.
    """
    import torch
    import torch.distributed as dist

    if _told is not None:  # one of several that share this machine
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size()))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"device={device!r} must be auto, cpu or cuda")
    if not dist.is_initialized():
        environment.check()
    local = environment.number("LOCAL_RANK", 0)
    chosen = torch.device(device)
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"device=cuda needs a GPU for local rank {local} and this machine has "
                f"{torch.cuda.device_count()}; use fewer processes, or device=cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    if world_size() > 1 and not dist.is_initialized():
        file = os.environ.get(RENDEZVOUS)
        try:
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{file}" if file else "env://",
                rank=rank(),
                world_size=world_size(),
                device_id=chosen if device == "cuda" else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if file:
                raise
            raise environment.no_meeting(error) from error
    return chosen


def from_first(value: Any) -> Any:
    """Rank 0's value, on every rank: the others may lie on machines without its files."""
    values = [value]
    if world_size() > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(values, 0)
    return values[0]


def on_first(action: Callable[[], Any]) -> Any:
    """What `action` gives on rank 0, where alone it is done; elsewhere None.

    Raises UserError on every rank where it does.
    """
    found, failed = None, ""
    if rank() == 0:
        try:
            found = action()
        except UserError as error:
            failed = str(error)
    if failed := from_first(failed):
        raise UserError(failed)
    return found


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        import torch.distributed as dist

        dist.all_gather_object(values, value)
    return values


def agree(values: dict[str, Any]) -> None:
    """Raise UserError on every rank, naming the difference, unless all ranks hold equal values."""
    everyone = gathered(values)
    for other, theirs in enumerate(everyone):
        for key in sorted({*everyone[0], *theirs}):
            first, second = everyone[0].get(key), theirs.get(key)
            if first != second:
                raise UserError(
                    f"ranks disagree: {key} is {first!r} on rank 0 and {second!r} on rank {other}; "
                    f"start every rank with the same command and the same files"
                )
