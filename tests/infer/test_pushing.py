"""Products that push, between ranks that are processes, through Triton's interpreter on a CPU.

tests/infer/test_gpu_decode.py runs every plan on GPUs, compiled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm import symmetric
from ladder.infer import fused
from ladder.infer.engine import Engine
from ladder.models import Transformer
from ladder.models.presets import PlanSpec
from ladder.parallel.reducers import AsyncReducer, PushReducer
from ladder.parallel.sharding import shard_model
from tests.comm.mapped import mapped, resting
from tests.distributed import Pools, tp_mesh
from tests.interpreter import interpreting
from tests.kernels.support import on
from tests.samples import FUSED_PLANS, full_model, small_config, virtual

PROMPTS = [[3], [9]]
PLANS: dict[str, PlanSpec] = {
    name: FUSED_PLANS[name]
    for name in (
        "accumulate-2x-lag1",
        "ladder, then groups of 3 in flight, then standard",
    )
}
# An own part that is a sum of two products and is not the sum that is sent.
PLANS["parallel, own parts kept beside the group's sum"] = [
    {"layers": "0-1", "attention+mlp": {"reduce": "none", "peer_lag": 1}},
    {"layers": "2-3", "attention+mlp": {"reduce": "accumulated", "peer_lag": 1}},
]

QUICK = "accumulate-2x-lag1"  # the one of these that `make test` runs


class Pushing(PushReducer):
    """Whose products push, and whose other sums are gloo's."""

    def __init__(self, base: AsyncReducer) -> None:
        AsyncReducer.__init__(self, base.ranks, base.group)
        self.dispatch, self.picked = None, {}  # type: ignore[assignment]

    reduce = AsyncReducer.reduce


def decode(model: Transformer, fused: bool) -> list[list[int]]:
    results = Engine(model, fused=fused).generate(PROMPTS, max_new_tokens=3)
    return [each.tokens for each in results]


def push_on_ranks(rank: int, world: int, plan: PlanSpec, depends: bool, folder: str) -> Any:
    model = full_model(small_config(plan, world, depends), 5, torch.float32)
    shard_model(model, tp_mesh(world))
    assert isinstance(model.reducer, AsyncReducer)
    model.use(replace(model.runtime, reducer=Pushing(model.reducer)))
    with (
        interpreting() as ran,
        resting(),
        mock.patch.object(symmetric, "allocate", mapped(folder, rank, world)),
        mock.patch.object(fused, "PREFILL_TRANSPORTS", ()),
        torch.inference_mode(),
    ):
        found = [
            each.tokens for each in Engine(model, fused=True).generate(PROMPTS, max_new_tokens=3)
        ]
        dist.barrier()  # every rank's slots stay mapped until all have read theirs
    return found, ran


@pytest.mark.parametrize(
    ("device", "name"), [on("interpreter", name, slow=name != QUICK) for name in PLANS]
)
def test_products_that_push_decode_what_the_plain_path_does(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, name: str
) -> None:
    """Catches an own part sent in place of its group's sum, one left out when the sum lands, and a
    set of slots that is written again before it has been read."""
    config = small_config(PLANS[name], 2, True)
    plain = virtual(full_model(config, 5), 2)
    expected = [
        each.tokens for each in Engine(plain, fused=False).generate(PROMPTS, max_new_tokens=3)
    ]
    for found, ran in pools(2).run(push_on_ranks, PLANS[name], True, str(tmp_path)):
        assert found == expected
        interpreted += ran
