"""Why implementations over peer memory cannot run a call."""

from __future__ import annotations

import torch

from ladder.comm.access import push_refusal
from ladder.jit import device_name
from ladder.kernels.limits import MAX_SIZE
from ladder.ops.registry import Call

HALF = (torch.bfloat16, torch.float16)
ROUNDING = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}  # of torch.backends.cuda.matmul


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
    if call.apart is not None:
        return call.apart or None
    here = torch.cuda.is_available() and device_name(torch.device("cuda", 0)) == call.device
    return push_refusal(call.ranks) if here else None


def kernel_refusal(call: Call) -> str | None:
    if call.dtype not in HALF:
        return (
            f"its kernel takes bfloat16 and float16, not {str(call.dtype).removeprefix('torch.')}"
        )
    return peer_refusal(call)


def reduced_precision() -> tuple[bool, ...]:
    """The values of torch's settings in ROUNDING, which must be the same on all ranks."""
    return tuple(bool(getattr(torch.backends.cuda.matmul, each)) for each in ROUNDING.values())


def rounding_refusal(call: Call) -> str | None:
    """The refusal of sums over all rows that are rounded after the rows of each rank."""
    setting = ROUNDING.get(call.dtype)
    if setting is not None and not getattr(torch.backends.cuda.matmul, setting):
        return (
            f"it rounds the matrix's gradient after each rank's rows, which "
            f"torch.backends.cuda.matmul.{setting}=False forbids"
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
