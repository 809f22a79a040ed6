"""Small models and engines, and references for their tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ladder.bench.inference.verify import forced
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling
from ladder.models import ModelConfig, Transformer
from ladder.parallel import launch
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import initialise, shard_model
from tests import samples
from tests.samples import heads_read_the_same

PLANS = [
    ("standard", None),
    ("parallel", None),
    ("ladder", None),
    ("hybrid", None),
    ("desync-4x", 4),
    ("accumulate-4x", 4),
    ("accumulate-4x-lag2", 4),
    ("dtp-1", 4),
]


def make(plan: str, degree: int | None, mesh: object = None, **changes: object) -> Transformer:
    """A random model with wide logits, so that its choices are no near ties."""
    fields = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 40,
    } | changes
    config = ModelConfig(**fields, plan=plan, tp_degree=degree)  # type: ignore[arg-type]
    model = Transformer(config)
    shard_model(model, mesh, dtype=torch.float64)  # type: ignore[arg-type]
    initialise(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 67, (n,), generator=generator).tolist() for n in (7, 1, 12)]


def without_cache(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by full forward passes, one prompt at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def heads_agree(engine: Engine, tokens: Tensor, prompt: int) -> list[bool]:
    """Whether the heads of all ranks read the same bits in each step, after `share_head`."""
    session = engine.session(*tokens.shape, Sampling())
    ranks = engine.model.reducer.ranks.processes
    return [heads_read_the_same(logits, ranks) for logits in forced(session, tokens, prompt)]


def fused_config(name: str, world: int, **changes: Any) -> ModelConfig:
    """The config of a sample plan, with heads for up to four ranks."""
    shape = {"num_heads": 8, "num_kv_heads": 4, "hidden_size": 64, **changes}
    depends = name not in samples.SAME_AT_ANY_T
    return samples.small_config(samples.FUSED_PLANS[name], world, depends, **shape)


def pushing_engine(name: str, device: torch.device, degree: int = 0) -> tuple[Transformer, Engine]:
    """A sample plan's model in one CPU process, and the engine of its ranks on GPUs.

    degree: T, of a plan that depends on it; those beyond the GPUs are virtual ranks.
    """
    world = launch.world_size()
    mesh = make_mesh(device, world)
    tp = None if mesh is None else mesh["tp"]
    config = fused_config(name, degree or world)
    model = samples.full_model(config, 7, torch.float32)
    shard_model(model, tp, device=device, reducer="async" if world == 1 else "push")
    return samples.full_model(config, 7), Engine(model, fused=True)
