"""`ladder bench machine` on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ladder.cli import main
from ladder.perf.machine import AWAITED, EXCHANGES, HIDDEN, SPEEDS
from ladder.perf.machine_files import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
PAIRS = [
    each
    for other in ("nccl", "push", "copies", "direct")
    for each in (f"product_beside_{other}", f"{other}_beside_product")
]


def test_two_gpus_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A copy to a peer takes a link's time, and what runs at once is slower than alone."""
    out = tmp_path / "m.json"
    words = ["bench", "machine", "--nproc", "2", "--out", str(out)]
    parts = ("values", "all-reduce", "peer-copy", "exchange", "beside", "turns")
    assert main([*words, "--only", *parts]) == 0
    said = capfd.readouterr().out
    assert "failed" not in said
    found = load(str(out))
    for algorithm in ("nccl", "push", "two-shot"):
        assert len(found.curve("all-reduce", algorithm=algorithm).points) > 8
    size, us = found.curve("peer copy").points[-1]
    assert 2 * size / us < 0.5 * 1e6 * found.value("copy_tb_s")
    for transport in EXCHANGES:  # half of it crosses the links twice, at once in both directions
        nbytes, us = found.curve("exchange", transport=transport).points[-1]
        assert us > found.curve("peer copy").at(nbytes / 2).us
    for first, second in zip(PAIRS[::2], PAIRS[1::2], strict=True):
        assert min(found.value(first), found.value(second)) < 1.0
    assert min(speed for name in SPEEDS for _, speed in found.curve(name).points) < 1.0
    for nbytes, us in found.curve(AWAITED).points:
        assert us > 0.8 * found.curve("all-reduce", algorithm="nccl").at(nbytes).us
        assert us > found.curve(HIDDEN).at(nbytes).us
