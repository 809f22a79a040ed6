"""The clock of a GPU's SMs."""

from __future__ import annotations

import pytest
import torch

from ladder.kernels.clock import SMS, Meter, between


def test_the_clock_between_two_marks() -> None:
    """The median of the SMs that have both; others are left out."""
    marks = torch.zeros(2, SMS, 2, dtype=torch.int64)
    for sm, mhz in ((0, 1300), (5, 1320), (131, 1500)):
        marks[0, sm] = torch.tensor([10**12 + sm, 10**18])
        marks[1, sm] = torch.tensor([10**12 + sm + 20_000 * mhz, 10**18 + 20_000_000])
    marks[0, 7] = torch.tensor([5, 10**18])
    marks[1, 8] = torch.tensor([5, 10**18])
    assert between(marks) == 1320.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_clock_of_a_gpu() -> None:
    """As many cycles as a kernel spins, in the time that it takes."""
    meter, cycles = Meter(torch.device("cuda", 0)), 50_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one compiles
        meter.mark(0)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        meter.mark(1)
        torch.cuda.synchronize()
    assert meter.mhz() == pytest.approx(cycles / start.elapsed_time(end) / 1e3, rel=0.05)
