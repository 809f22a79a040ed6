"""Ranks: start processes, join them to a process group, and report an error once for all.

A command runs as one process, as several that `run` starts (`--nproc`), or as a rank of torchrun
or of a script that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as it does.

torch, which takes seconds to import, is imported where it is used: commands without it start at
once, and so does a launcher whose ranks cannot be its forks.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ladder.models.errors import UserError, brief
from ladder.parallel import environment, printing
from ladder.parallel.environment import RENDEZVOUS

if TYPE_CHECKING:
    import torch

# Files by which ranks tell their launcher how they ended.
ORDERLY = "left"  # with the rank in the name: the rank ended in an orderly way
CLOSED = "closed"  # the reader of the output has left
FAILURE = "failure"  # exit code and message of the first rank that failed
PATIENCE = 3.0  # seconds from asking a rank to end to killing it
GRACE = 1.0  # seconds in which a rank's death, or the others' errors, may follow a first error
ERROR_KEY, CODE_KEY, LEFT_KEY = "ladder/errors", "ladder/code", "ladder/left"
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent dies
ENCODING: Any = {"encoding": "utf-8", "errors": "surrogatepass"}

_report_folder: Path | None = None  # in a process that `run` started: the folder of these files


def _joined() -> Any:
    """torch.distributed if this process has joined a process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def world_size() -> int:
    dist = _joined()
    return dist.get_world_size() if dist else environment.whole_number("WORLD_SIZE", 1)


def rank() -> int:
    dist = _joined()
    return dist.get_rank() if dist else environment.whole_number("RANK", 0)


def check_nproc(nproc: int) -> None:
    """Raise UserError unless this machine can start `nproc` processes."""
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

    nproc: processes to start; 1 runs the command in this process (a rank of torchrun, perhaps). A
    UserError becomes one line on standard error, once for all ranks, and exit code 2. When a rank
    fails, the others are ended; when one is killed, an error names it. modules: the modules that
    the ranks need; where ranks can be forks, they are imported once for all.
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
    # Not a TemporaryDirectory: any fork that exits would remove it.
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
        return _watch(ranks, Path(folder), remedy(*arguments))
    finally:  # an interrupt of this process alone must not leave them running
        _end(ranks)
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


def _may_fork() -> bool:
    """Whether ranks may be forks of this process: they start at once and share its imports.

    A fork lacks its parent's threads, and cannot use its CUDA context or process group. A process
    that has not imported torch has none of these, and the import creates none. On other systems
    than Linux, system libraries break in forks.
    """
    return (
        sys.platform == "linux"
        and "torch" not in sys.modules
        and threading.active_count() == 1  # not in a notebook
    )


def _pass_on(number: signal.Signals, ranks: Sequence[BaseProcess]) -> Any:
    """Forward a signal to the ranks; returns the handler that was replaced.

    None if there is none to restore: only the main thread may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None

    def hand_on(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    return signal.signal(number, hand_on)


def remedy(*arguments: Any) -> str:
    """Advice for a run that was cut off, if the command has --resume; else an empty string."""
    here = any(hasattr(each, "resume") for each in arguments)
    return "; --resume continues from the last checkpoint, if one was written" if here else ""


def _watch(ranks: Sequence[BaseProcess], folder: Path, advice: str = "") -> int:
    """Wait until all ranks have ended, or one has failed; returns the exit code.

    A rank that was killed, or ended without a message, is the only one named: the others can only
    report that they lost it, or hang in a GPU kernel that waits for it. advice: ends its error
    line.
    """
    left: dict[int, int] = {}  # exit codes
    orderly: set[int] = set()
    limit: float | None = None
    while len(left) < len(ranks) and len(orderly) == len(left):
        waiting = [process.sentinel for n, process in enumerate(ranks) if n not in left]
        if not wait(waiting, limit):
            break
        # A dying rank closes its connections before it can be reaped, so others may end first:
        # look at every rank that has begun to end.
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
    if code != 2:  # a user's mistake is no consequence of a rank's death
        for n, end in left.items():
            # Libraries abort when they lose another rank: the cause is that rank's failure.
            if end < 0 and not (message and -end == signal.SIGABRT):
                name = signal.Signals(-end).name if -end in set(signal.Signals) else "unknown"
                what = f"was killed by signal {-end} ({name})"
                print(f"error: rank {n} {what}{advice}", file=sys.stderr)
                return 1
        for n, end in left.items():
            if end >= 0 and n not in orderly:
                what = f"ended with exit code {end} and no message"
                print(f"error: rank {n} {what}{advice}", file=sys.stderr)
                return end or 1
    sys.stderr.write(message)
    return code or next((end for end in left.values() if end), 0)


def _failure(folder: Path) -> tuple[int, str]:
    """The exit code and message of the first rank that failed; code 0 if none has."""
    with suppress(FileNotFoundError):
        code, _, message = (folder / FAILURE).read_bytes().decode(**ENCODING).partition("\n")
        return int(code), message
    return 0, ""


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End the ranks that still run: terminate them, then kill any that remain."""
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
    global _report_folder
    _report_folder = Path(folder)
    os.environ |= {
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(nproc),
        RENDEZVOUS: str(Path(folder) / "store"),
    }
    try:
        code = _guarded(command, arguments)
    except KeyboardInterrupt:  # the launcher reports it
        return
    _note(f"{ORDERLY}{index}")
    sys.exit(code)


def _note(name: str) -> None:
    """Create an empty file for `run`, if it has started this process."""
    if _report_folder is not None:
        (_report_folder / name).touch()


def _guarded(command: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    try:
        printing.replace_unknown()
        code = command(*arguments)
        printing.flush()
        if dist := _joined():
            dist.barrier()  # the others may still need this rank, or its store
    except UserError as error:
        said = f"error: {brief(str(error))}"
        return _fail(2, "\n".join([said, *getattr(error, "__notes__", ()), ""]))
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        printing.discard()
        _note(CLOSED)
        return _fail(0, "")
    except Exception as error:
        return _fail(*printing.told(error))
    if _joined():
        atexit._run_exitfuncs()  # `_leave` skips these; torch's compile workers end by them
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End this process, a rank of a group, at once.

    An ordinary exit destroys the group's threads in an order that sometimes aborts the process
    ("terminate called without an active exception") after all its work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _note(f"{ORDERLY}{rank()}")
    os._exit(code)


def _fail(code: int, message: str) -> int:
    """Print the message, unless another rank failed first, which is then the cause of this failure.

    In a process that `run` started, the message goes to a file: the launcher prints it, unless a
    rank has died. A rank of a group ends here, with the exit code of the first failure.
    """
    dist = _joined()
    if _report_folder is not None:
        own = _report_folder / f"{FAILURE}{rank()}"
        own.write_bytes(f"{code}\n{message}".encode(**ENCODING))
        with suppress(FileExistsError):  # another was first
            os.link(own, _report_folder / FAILURE)  # appears whole, or not at all
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
        left, end = store.add(LEFT_KEY, 1), time.monotonic() + GRACE
        # Rank 0 may hold the store. It leaves last: torch logs pages where the store is gone.
        while rank() == 0 and left < world_size() and time.monotonic() < end:
            time.sleep(0.01)
            left = store.add(LEFT_KEY, 0)
    except dist.DistError:
        pass  # the rank that held the store is gone: it failed first, and has printed why
    _leave(code)


def join(device: str = "auto") -> torch.device:
    """Join the other processes, if there are any, and return this one's device.

    device: `cpu`, `cuda`, or `auto` (cuda if there is a GPU). Groups use NCCL on GPUs and gloo on
    CPUs. Raises UserError if there is no such device, if the environment variables of the group are
    wrong, and if the ranks cannot connect.
    """
    import torch
    import torch.distributed as dist

    if _report_folder is not None:  # one of several that share this machine
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size()))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device={device} must be auto, cpu or cuda")
    if not dist.is_initialized():
        environment.check_environment()
    local = environment.whole_number("LOCAL_RANK", 0)
    chosen = torch.device(device)
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"--device=cuda needs a GPU for local rank {local} and this machine has "
                f"{torch.cuda.device_count()}; use fewer processes, or --device cpu"
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
        if device == "cpu":
            dist.barrier()  # gloo prints errors of its own where a rank leaves while others connect
    return chosen


def from_first(value: Any) -> Any:
    """Rank 0's value, on every rank: other machines may lack the files that it comes from."""
    values = [value]
    if world_size() > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(values, 0)
    return values[0]


def on_first(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 only: its result there, None on the other ranks.

    If it raises UserError, every rank does.
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
