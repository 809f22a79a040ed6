"""Standard output that cannot take what is printed, and the words of errors of the system."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback

from ladder.models.errors import brief

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: a limit of the shell


def replace_unknown() -> None:
    """Let `?` stand for a character that the output's encoding lacks: no text is an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Write what was printed, so that its error is the command's and not one of Python's exit."""
    if sys.stdout is not None:  # a closed one
        sys.stdout.flush()


def discard() -> None:
    """Let standard output take everything and keep nothing: Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def told(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error that is no UserError: one line if it needs no traceback."""
    number = error.errno if isinstance(error, OSError) else None
    path = brief(str(getattr(error, "filename", None)), 100)
    if number == errno.ENAMETOOLONG:  # any option's
        return 2, f"error: the path {path!r} is too long; give a shorter one\n"
    if number in FULL:
        try:
            flush()
        except OSError:
            discard()
        what = "the output, or a file," if path == "None" else path  # one that is open has no name
        remedy = "make room, or write elsewhere"
        return 1, f"error: {what} cannot be written: {os.strerror(number)}; {remedy}\n"
    return 1, traceback.format_exc()
