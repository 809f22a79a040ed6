"""The work of `ladder.data.workers` processes in tests, which import little else."""

from __future__ import annotations

import os
import signal

from ladder.models.errors import UserError


def die(item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def refuse(item: int) -> int:
    if item > 1:
        raise UserError(f"item {item} is broken")
    return item
