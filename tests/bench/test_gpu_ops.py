"""`ladder bench ops` on GPUs: captured and eager, beside torch's own fused operators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ladder.bench.ops.points import OF_EXPERTS, OPS
from ladder.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]


@pytest.mark.parametrize("world", WORLDS)
def test_bench_ops(tmp_path: Path, capfd: pytest.CaptureFixture[str], world: int) -> None:
    command = (
        f"bench ops --shapes llama-3.2-1b dlrm qwen3-30b-a3b --m 64 --tables 8 --nproc {world}"
    )
    code = main([*command.split(), "--out", str(tmp_path)])
    said = capfd.readouterr()
    assert code == 0, said.err
    found = [json.loads(line) for line in (tmp_path / "ops.jsonl").read_text().splitlines()]
    timed = {(r["point"]["op"], r["point"]["way"], r["point"]["mode"]) for r in found}
    for op in OPS:
        assert {(op, way, mode) for way in ("alone", "NCCL") for mode in ("captured", "eager")} <= (
            timed
        )
        assert (op, "staged", "eager") in timed
    assert ("matmul_reduce_scatter", "staged", "captured") in timed
    # It waits for offsets on the host, which no graph can hold.
    assert ("embedding_bag_all_to_all", "staged", "captured") not in timed
    assert "embedding_bag_all_to_all, dlrm" in said.err
    for op in ("embedding_bag_all_to_all", *OF_EXPERTS):
        assert {(op, "pushed", mode) for mode in ("captured", "eager")} <= timed
    assert ("matmul_all_to_all", "grouped", "captured") in timed
    for way in ("torch fused", "torch native"):
        assert ("all_gather_matmul", way, "eager") in timed
    assert ("matmul_reduce_scatter", "torch fused", "eager") in timed
    assert all(r["result"]["floor_us"] > 0 for r in found)
