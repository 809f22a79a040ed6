"""Printing when standard output fails, and the messages of errors other than UserError."""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback

from ladder.models.errors import brief

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last: the shell's limit on the size of files


def replace_unknown() -> None:
    """Print `?` for a character that the output's encoding lacks, and never fail because of one."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def flush() -> None:
    """Flush standard output, so that an error occurs in the command and not at Python's exit."""
    if sys.stdout is not None:  # None: it was closed
        sys.stdout.flush()


def discard() -> None:
    """Send standard output to the null device, so that Python's flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def told(error: Exception) -> tuple[int, str]:
    """Exit code and message of an error other than UserError: one line, or a traceback."""
    number = error.errno if isinstance(error, OSError) else None
    path = brief(str(getattr(error, "filename", None)), 100)
    if number == errno.ENAMETOOLONG:  # the path may be of any option
        return 2, f"error: the path {path!r} is too long; give a shorter one\n"
    if number in FULL:
        try:
            flush()
        except OSError:
            discard()
        what = "the output, or a file," if path == "None" else path  # none for an open file
        remedy = "make room, or write elsewhere"
        return 1, f"error: {what} cannot be written: {os.strerror(number)}; {remedy}\n"
    return 1, traceback.format_exc()
