"""The peak FLOPs per second of GPUs, relative to which MFU is computed."""

from __future__ import annotations

import torch

# Dense bfloat16 FLOPs per second. The first key that the GPU's name contains counts, so the more
# specific keys come first. The comments name NVIDIA's data sheets and give their figures: in TFLOPS
# of one GPU with sparsity, which doubles it, unless they say otherwise.
PEAKS = {
    "H100 PCIe": 756e12,  # H100: 1,513 TFLOPS with sparsity
    "H100 NVL": 835e12,  # H100: 1,671, of one GPU
    "H100": 989e12,  # H100, SXM: 1,979; its name has the memory in place of SXM
    "H200 NVL": 835e12,  # H200: 1,671
    "H200": 989e12,  # H200, SXM: 1,979
    "GH200": 989e12,  # GH200 Grace Hopper Superchip: 1,979
    "H800 PCIe": 756e12,  # an H100 with slower links and float64
    "H800": 989e12,
    "A100": 312e12,  # A100, PCIe and SXM: 312, without sparsity
    "GB200": 2500e12,  # GB200 NVL72: 10 PFLOPS with sparsity, of two GPUs
    "B200": 2250e12,  # HGX B200: 36 PFLOPS with sparsity, of eight GPUs
}


def peak_flops(device: torch.device) -> float | None:
    """The peak FLOPs per second of a GPU; None if unknown (a CPU, another GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    words = f" {name} ".replace("-", " ")  # A100-SXM4-80GB
    return next((peak for part, peak in PEAKS.items() if f" {part} " in words), None)
