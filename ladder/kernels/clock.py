"""The clock rate at which a GPU's SMs ran: a GPU at its power limit lowers it as it computes.

So two implementations may differ in time only because the clock rate has changed.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import ASSEMBLY
from ladder.jit import begin, kernel, launch, tl

SMS = 1024  # above the number of every SM
PROGRAMS = 16  # for each SM, so that every one has some


@kernel("computation")
@no_type_check
def _clock_kernel(out, PDL: tl.constexpr):
    """Each program stores its SM's count of cycles, and nanoseconds, in the SM's row."""
    begin(PDL)
    sm, cycles, now = 0, tl.full([], 1, tl.int64), tl.full([], 1, tl.int64)
    if ASSEMBLY:
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], tl.int32, False, 1)
        cycles = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], tl.int64, False, 1)
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    i = tl.arange(0, 2)
    tl.store(out + sm * 2 + i, tl.where(i == 0, cycles, now))


def stamp(out: Tensor, programs: int) -> None:
    """Store the present counts of every SM in out, int64 [SMs, (cycles, nanoseconds)]."""
    launch(_clock_kernel, (programs,), out.device, out, num_warps=1, dependent=False)


class Meter:
    """Marks on the current stream, and the clock between them."""

    def __init__(self, device: torch.device) -> None:
        self.marks = torch.zeros(2, SMS, 2, dtype=torch.int64, device=device)
        self.programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count

    def mark(self, which: int) -> None:
        """which: 0 at the beginning, 1 at the end."""
        stamp(self.marks[which], self.programs)

    def mhz(self) -> float:
        return between(self.marks)


def between(marks: Tensor) -> float:
    """The median clock rate in MHz of the SMs in both marks, [2, SMs, (cycles, nanoseconds)]."""
    found = marks.cpu().double()
    begun, ended = found[:, found[..., 1].gt(0).all(0)]
    cycles, ns = (ended - begun).unbind(1)
    return float((1e3 * cycles / ns).median())
