"""The peak FLOPs per second of GPUs, relative to which MFU is computed."""

from __future__ import annotations

import torch

# Dense bfloat16 FLOPs per second, by a part of the GPU's name; vendors' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}


def peak_flops(device: torch.device) -> float | None:
    """The peak FLOPs per second of a GPU; None if unknown (a CPU, another GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
