"""Why implementations over peer memory cannot run a call."""

from __future__ import annotations

import torch

from ladder.comm.access import push_refusal
from ladder.jit import device_name
from ladder.kernels.norm import MAX_SIZE
from ladder.ops.registry import Call

HALF = (torch.bfloat16, torch.float16)


def peer_refusal(call: Call) -> str | None:
    """Why the ranks cannot write to each other's memory, for this machine's GPUs."""
    if call.device == "cpu":
        return "it needs GPUs that can access each other's memory"
    if call.ranks == 1:
        return "one rank has nothing to exchange"
    if 0 in call.sizes:
        return "a size is 0; there is nothing to overlap"
    if call.dtype == torch.float64:
        return "it sums in float32; float64 is for gradcheck"
    here = torch.cuda.is_available() and device_name(torch.device("cuda", 0)) == call.device
    return push_refusal(call.ranks) if here else None


def kernel_refusal(call: Call) -> str | None:
    if call.dtype not in HALF:
        return (
            f"its kernel takes bfloat16 and float16, not {str(call.dtype).removeprefix('torch.')}"
        )
    return peer_refusal(call)


def _wide_refusal(call: Call) -> str | None:
    if call.sizes[1] > MAX_SIZE:
        return f"its kernel holds rows of up to {MAX_SIZE} columns"
    return None


def landing_refusal(call: Call) -> str | None:
    return _wide_refusal(call) or peer_refusal(call)


def landing_kernel_refusal(call: Call) -> str | None:
    return _wide_refusal(call) or kernel_refusal(call)
