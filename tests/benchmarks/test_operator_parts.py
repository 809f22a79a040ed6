"""benchmarks/operator_parts.py: each way computes the whole product, on slots and flags as set."""

from __future__ import annotations

import sys

import pytest
import torch

from ladder.bench.ops.measure import TOLERANCE, compare
from ladder.bench.ops.points import OpPoint, variants
from tests import ROOT
from tests.kernels.support import on

sys.path.insert(0, str(ROOT / "benchmarks"))
import operator_parts


@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("all_gather_matmul", ["waiting:tile=16x32x16,group_m=1"]),
        ("matmul_reduce_scatter", ["tracked:tile=16x32x16,pieces=2", "summing:tile=16x32x16"]),
    ],
)
def test_products(device: str, op: str, words: list[str]) -> None:
    n, k = (4 * 40, 24) if op == "all_gather_matmul" else (40, 4 * 24)
    point = OpPoint(op, "", 4 * 20, n, k, 4, "bfloat16")
    where = torch.device("cuda" if device == "cuda" else "cpu")
    ways, exact, flops = operator_parts.products(point, variants(words, [op]), where)
    assert list(ways) == ["cuBLAS", "in chunks", *words]
    assert flops == 2 * 80 * 40 * 24
    for part in ways.values():
        assert compare([part.result()], [exact]) < TOLERANCE["bfloat16"]


def test_lookups() -> None:
    point = OpPoint("embedding_bag_all_to_all", "dlrm", 6, 8, 4, 2, "float32", 0, 2, 3)
    ways, exact, bytes_ = operator_parts.lookups(point, torch.device("cpu"))
    assert compare([ways["torch"].result()], [exact]) < TOLERANCE["float32"]
    written, indices, offsets = 2 * 6 * 4 * 4, 2 * 6 * 3 * 8, (2 * 6 + 1) * 8
    read = bytes_ - written - indices - offsets
    assert 0 < read <= 2 * 6 * 3 * 4 * 4  # each row that is looked up, once
