"""Kernels for inference, each beside a plain PyTorch reference.

`project`, `land`, `decode_attention`, `add_rms_norm` are for decoding: one token of each of a few
sequences. `land_rows`, `rotary_prompt`, `swiglu` are for prompts. Kernels that write to other GPUs
have no reference and need GPUs: those with a `PushTarget`, `send`, the modules `bags`, `rows` and
`grouped`, which `ladder.ops` uses, and the all-reduces, which are classes in `ladder.comm.push` and
`ladder.comm.two_shot`.

The module can be imported without Triton, and runs on CPU tensors without it: see `ladder.jit`.
Names are imported on first use, as those of `ladder.models`: predictions read the shapes and limits
of kernels without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.kernels.attention import decode_attention, decode_attention_reference
    from ladder.kernels.decode import project, project_reference
    from ladder.kernels.landing import (
        LandingJob,
        PushTarget,
        SendJob,
        land,
        land_reference,
        new_landing,
        send,
    )
    from ladder.kernels.norm import add_rms_norm, add_rms_norm_reference
    from ladder.kernels.prefill import (
        land_rows,
        land_rows_reference,
        rotary_prompt,
        rotary_prompt_reference,
        swiglu,
        swiglu_reference,
    )

_MODULES = {
    "LandingJob": "landing",
    "PushTarget": "landing",
    "SendJob": "landing",
    "add_rms_norm": "norm",
    "add_rms_norm_reference": "norm",
    "decode_attention": "attention",
    "decode_attention_reference": "attention",
    "land": "landing",
    "land_reference": "landing",
    "land_rows": "prefill",
    "land_rows_reference": "prefill",
    "new_landing": "landing",
    "project": "decode",
    "project_reference": "decode",
    "rotary_prompt": "prefill",
    "rotary_prompt_reference": "prefill",
    "send": "landing",
    "swiglu": "prefill",
    "swiglu_reference": "prefill",
}

__all__ = [
    "LandingJob",
    "PushTarget",
    "SendJob",
    "add_rms_norm",
    "add_rms_norm_reference",
    "decode_attention",
    "decode_attention_reference",
    "land",
    "land_reference",
    "land_rows",
    "land_rows_reference",
    "new_landing",
    "project",
    "project_reference",
    "rotary_prompt",
    "rotary_prompt_reference",
    "send",
    "swiglu",
    "swiglu_reference",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
