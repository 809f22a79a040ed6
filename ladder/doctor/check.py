"""One check of `ladder doctor`: its result, and how it is run.

A check runs the feature that it reports on, and reports any error. So only this module catches
every exception.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check, which is one line of the report.

    status: `ok`, `missing` (not on this machine) or `failed` (installed, but does not work).
    detail: one line; if missing, what needs it and how to install it; if failed, the error.
    core: whether ladder needs it on every machine.
    """

    name: str
    status: str
    detail: str
    core: bool = False


class Missing(Exception):
    """Raised by a probe for something that is not there; the message says what to do."""


class Failed(Exception):
    """Raised by a probe for something that does not work; the message says why."""


def run_check(name: str, probe: Callable[[], str], core: bool = False) -> DoctorCheck:
    """Run `probe`, which returns the detail, or raises Missing, Failed or any other error."""
    try:
        with redirect_stdout(sys.stderr):  # packages may print when imported; stdout may be JSON
            detail, status = probe(), "ok"
    except Missing as lack:
        detail, status = str(lack), "missing"
    except Failed as reason:
        detail, status = str(reason), "failed"
    except (Exception, SystemExit) as error:
        detail, status = f"{type(error).__name__}: {error}", "failed"
    return DoctorCheck(name, status, one_line(detail), core)


def run_check_with_torch(name: str, probe: Callable[[], str], core: bool = False) -> DoctorCheck:
    """`run_check` for a probe that uses torch; without torch, the check is missing."""
    if sys.modules.get("torch") is None:
        return DoctorCheck(name, "missing", "needs torch", core)
    return run_check(name, probe, core)


def one_line(text: str, limit: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def run_process(command: list[str], seconds: float) -> str:
    """The standard output of `command`.

    Raises Failed with the last line of its output if it fails, or if it takes more than `seconds`.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {seconds:g} s") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(words[-1] if words else f"ended with status {done.returncode}")
    return done.stdout
