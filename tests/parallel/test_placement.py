"""Placing a model on ranks: one seed is one model however it is built; a wrong T is refused."""

from __future__ import annotations

import pytest
import torch

from ladder.models import Transformer, UserError
from ladder.parallel.sharding import initialise, local_parameters, local_tensor, shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import DEPENDS_ON_T, PLANS, small_config


def weights_that_differ(rank: int, world_size: int) -> list[str]:
    """In a worker: parameters that the ways of building a model do not agree on, bit for bit."""
    wrong = []
    mesh = tp_mesh(world_size)
    for plan in ("ladder", "desync-2x", "parallel"):
        for tied in (False, True):
            depends = plan in DEPENDS_ON_T
            config = small_config(plan, world_size, depends, tie_embeddings=tied)
            whole = Transformer(config)
            shard_model(whole)
            initialise(whole, seed=12)
            values = {name: value.clone() for name, value, _ in local_parameters(whole)}

            with torch.device("meta"):
                on_meta = Transformer(config)
            shard_model(on_meta, mesh, dtype=torch.float32)
            initialise(on_meta, seed=12)
            on_cpu = Transformer(config)
            shard_model(on_cpu, mesh)
            initialise(on_cpu, seed=12)
            copied = Transformer(config)
            copied.load_state_dict(whole.state_dict())
            shard_model(copied, mesh)
            alone_on_meta = torch.device("meta")
            with alone_on_meta:
                alone = Transformer(config)
            shard_model(alone, device="cpu")
            initialise(alone, seed=12)
            for how, model in {
                "meta": on_meta,
                "cpu": on_cpu,
                "copied": copied,
                "meta, one process": alone,
            }.items():
                held = 0
                for name, value, part in local_parameters(model):
                    if not torch.equal(value, values[name][part]):
                        wrong.append(f"{plan} tied={tied} {how}: {name}")
                    held += value.numel()
                if (model.lm_head.weight is model.model.embed_tokens.weight) != tied:
                    wrong.append(f"{plan} tied={tied} {how}: tie")
                total = sum(value.numel() for value in values.values())
                if how != "meta, one process" and held > 0.7 * total:
                    wrong.append(f"{plan} tied={tied} {how}: holds {held} of {total} numbers")
            other = Transformer(config)
            shard_model(other, mesh)
            initialise(other, seed=13)
            if torch.equal(
                local_tensor(other.model.embed_tokens.weight),
                local_tensor(on_cpu.model.embed_tokens.weight),
            ):
                wrong.append(f"{plan} tied={tied}: another seed, the same weights")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_seed_is_one_model(pools: Pools, world_size: int) -> None:
    """Built on meta or on a CPU, placed before or after it is filled, on any T: the same numbers,
    and each process holds its part alone. Catches a generator that goes on from parameter to
    parameter, or one per rank, and a shard that keeps the whole in memory."""
    assert pools(world_size).run(weights_that_differ) == [[]] * world_size


def refusals(rank: int, world_size: int) -> list[str]:
    """In a worker: what each impossible placement says."""
    said = []
    for plan, degree, changes in (
        ("desync-2x", 2, {}),
        ("dtp-2", 2, {}),
        ("desync-2x", 1, {}),
        ("a mix of everything", 2, {}),
        ("ladder", None, {"num_heads": 6, "num_kv_heads": 6, "head_dim": 4}),
        ("ladder", None, {"num_heads": 12, "num_kv_heads": 6, "head_dim": 4}),
        ("ladder", None, {"intermediate_size": 46}),
        ("ladder", None, {"vocab_size": 5}),
    ):
        depends = degree is not None
        model = Transformer(small_config(PLANS[plan], degree or 1, depends, **changes))
        try:
            shard_model(model, tp_mesh(world_size))
        except UserError as error:
            said.append(str(error))
        else:
            said.append("")
    model = Transformer(small_config())
    shard_model(model, tp_mesh(world_size))
    try:
        shard_model(model, tp_mesh(world_size))
    except ValueError as error:
        said.append(str(error))
    return said


def test_a_wrong_t_is_refused(pools: Pools) -> None:
    """On every rank alike, so that none hangs, with the option and its value. Catches a model of T
    = 2 that runs on four ranks and computes something else."""
    for said in pools(4).run(refusals):
        for text, words in zip(
            said,
            (
                ["desync-2x", "tp_degree=2", "4 ranks"],
                ["dtp-2", "tp_degree=2", "4 ranks"],
                ["desync-2x", "tp_degree=1", "4 ranks"],
                ["tp_degree=2", "4 ranks"],
                ["tp=4", "num_heads=6"],
                ["tp=4", "num_kv_heads=6"],
                ["tp=4", "intermediate_size=46"],
                ["tp=4", "vocab_size=5"],
                ["sharded already", "of [67, 32]"],
            ),
            strict=True,
        ):
            for word in words:
                assert word in text, (word, text)
