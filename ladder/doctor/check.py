"""One check of `ladder doctor`: its result, and how it is run.

A check runs the thing that it reports on, and reports any error that this raises. So this is the
only place that catches every exception.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the report.

    status: `ok`; `missing`, which is not here (detail: what it would unlock, and how to get it);
    `failed`, which is here and does not work (detail: its error). detail: one line. core: whether
    ladder needs it on every machine.
    """

    name: str
    status: str
    detail: str
    core: bool = False


class Missing(Exception):
    """What a check raises for something that is not there; the message says what to do."""


class Failed(Exception):
    """What a check raises for something that does not work, where it knows why."""


def run_check(name: str, probe: Callable[[], str], core: bool = False) -> DoctorCheck:
    """Run `probe`: it returns the detail, or raises Missing, Failed or the error to report."""
    try:
        with redirect_stdout(sys.stderr):  # some packages greet on import; stdout may be JSON
            detail, status = probe(), "ok"
    except Missing as lack:
        detail, status = str(lack), "missing"
    except Failed as reason:
        detail, status = str(reason), "failed"
    except (Exception, SystemExit) as error:
        detail, status = f"{type(error).__name__}: {error}", "failed"
    return DoctorCheck(name, status, one_line(detail), core)


def run_check_with_torch(name: str, probe: Callable[[], str], core: bool = False) -> DoctorCheck:
    """The same for a check that uses torch: one line says why torch is not there, not ten."""
    if sys.modules.get("torch") is None:
        return DoctorCheck(name, "missing", "needs torch", core)
    return run_check(name, probe, core)


def one_line(text: str, limit: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def run_process(command: list[str], seconds: float) -> str:
    """Standard output of `command`; raises Failed with its last words, or after `seconds`."""
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
