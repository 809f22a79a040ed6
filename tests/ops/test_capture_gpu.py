"""A graph on GPUs holds what its mode picks, and eager calls beside it run another way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ladder.ops
from ladder.infer.graphs import WARM_UP_STEPS, capture_graph, capture_stream
from ladder.models.errors import UserError
from ladder.ops import overlapped
from ladder.ops.table import VARIABLE
from ladder.parallel import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
OP, ROWS = "all_gather_matmul", 512


def modes(file: str) -> int:
    device = launch.join("cuda")
    entry = {
        "op": OP, "device": torch.cuda.get_device_name(device), "dtype": "bfloat16", "ranks": 2,
        "sizes": [ROWS, 256, 512], "options": {}, "source": "a test",
    }  # fmt: skip
    both = (("captured", "chunked"), ("eager", "staged"))
    if launch.rank() == 0:
        made = [{**entry, "mode": mode, "implementation": name} for mode, name in both]
        Path(file).write_text(json.dumps(made))
    dist.barrier()
    group = dist.group.WORLD.group_name
    A = torch.randn(ROWS // 2, 512, device=device).bfloat16()
    B = torch.randn(512, 256, device=device).bfloat16() / 16

    def work() -> torch.Tensor:
        return torch.ops.ladder.all_gather_matmul(A, [B], 0, group, return_A=False)[1][0]

    chunks = mock.Mock(wraps=overlapped.gather_chunks)
    with (
        mock.patch.object(overlapped, "gather_chunks", chunks),
        mock.patch.dict(os.environ, {VARIABLE: file}),
    ):
        expected = work()
        assert chunks.call_count == 0
        torch.cuda.synchronize()
        refused: Any = pytest.raises(UserError, match=r"needs new memory .*as_captured\(\)")
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(torch.cuda.current_device())
        with refused, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.synchronize()
        before = chunks.call_count
        graph, found = capture_graph(work)
        assert chunks.call_count == before + WARM_UP_STEPS + 1
        for _ in range(3):
            found.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
            torch.testing.assert_close(work(), expected)
        assert chunks.call_count == before + WARM_UP_STEPS + 1
        choice = ladder.ops.explain(OP, [A.shape, [B.shape]], mode="captured")
        assert choice.implementation == "chunked"
    return 0


def test_a_graph_holds_what_its_mode_picks(tmp_path: Path) -> None:
    assert launch.run(modes, (str(tmp_path / "table.json"),), nproc=2) == 0
