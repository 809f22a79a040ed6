"""The environment variables of torchrun, or of a script like it, for a rank."""

from __future__ import annotations

import os

from ladder.models.errors import UserError

RENDEZVOUS = "LADDER_RENDEZVOUS"  # the file through which the ranks of one `launch.run` connect
ALONE = "unset it to run as one process, or start the ranks by torchrun or --nproc"


def most_processes() -> int:
    """The largest accepted --nproc; a larger one is a typing error."""
    return max(64, 4 * (os.cpu_count() or 1))


def whole_number(name: str, default: int) -> int:
    """The value of a variable, a whole number of 0 or more. Raises UserError for anything else."""
    text = os.environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(
            f"the environment has {name}={text[:40]}, which is no whole number; {ALONE}"
        )
    return int(text)


def check_environment() -> None:
    """Raise UserError unless the environment describes a rank of a job, or none.

    A mistake would otherwise hang, or go unnoticed: two processes that both take rank 0, say.
    """
    own, world = whole_number("RANK", 0), whole_number("WORLD_SIZE", 1)
    whole_number("LOCAL_RANK", 0)
    if "WORLD_SIZE" not in os.environ and own:
        raise UserError(f"the environment has RANK={own} without WORLD_SIZE; {ALONE}")
    if own >= world:
        raise UserError(
            f"the environment has RANK={own} with WORLD_SIZE={world}; ranks count from 0, so "
            f"RANK must be below WORLD_SIZE"
        )
    if world == 1 or RENDEZVOUS in os.environ:
        return
    for name, meaning in (
        ("RANK", "this process's number, from 0"),
        ("MASTER_ADDR", "the machine of rank 0"),
        ("MASTER_PORT", "a free port there"),
    ):
        if not os.environ.get(name):
            raise UserError(
                f"the environment has WORLD_SIZE={world} without {name}; set it ({meaning}), or "
                f"unset WORLD_SIZE to run as one process"
            )
    if not 0 < whole_number("MASTER_PORT", 0) < 2**16:
        raise UserError(
            f"the environment has MASTER_PORT={os.environ['MASTER_PORT']}; give a port from 1 to "
            f"{2**16 - 1}"
        )


def no_meeting(error: Exception) -> UserError:
    """The error to raise where torch could not connect the ranks."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    reason = str(error).partition("\n")[0]
    if "EADDRINUSE" in reason:
        return UserError(
            f"MASTER_PORT={port} is in use on this machine by another process, perhaps another "
            f"job; set another port, the same on every rank"
        )
    return UserError(
        f"rank {whole_number('RANK', 0)} of {whole_number('WORLD_SIZE', 1)} did not connect to the "
        f"others at MASTER_ADDR={address}, MASTER_PORT={port} ({reason}); give every rank the "
        f"address and the port of rank 0's machine, and a RANK of its own"
    )
