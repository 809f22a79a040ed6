"""NCCL's switch for access to other GPUs' memory, which `ladder` follows, too."""

from __future__ import annotations

import os

P2P_SWITCH = "NCCL_P2P_DISABLE"


def p2p_disabled() -> bool:
    """Whether the environment disables access to other GPUs' memory.

    NCCL itself accepts only 1; here any value but 0 has that meaning.
    """
    return os.environ.get(P2P_SWITCH, "0") not in ("", "0")
