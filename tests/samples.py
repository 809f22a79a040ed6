"""Small models and plans that several tests share."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ladder.models import (
    ModelConfig,
    Plan,
    Ranks,
    Reducer,
    SublayerRecord,
    Transformer,
    UserError,
    resolve_plan,
)
from ladder.models.presets import PlanSpec

# Plans of four layers. Those whose function depends on T, and those whose does not.
SAME_AT_ANY_T: dict[str, PlanSpec] = {
    "standard": "standard",
    "parallel": "parallel",
    "ladder": "ladder",
    "hybrid": "hybrid",
    "ladder@1-3": "ladder@1-3",
    "ladder@0-1": "ladder@0-1",
    "lag 2": [
        {
            "layers": "0-3",
            "attention": {"own_lag": 2, "peer_lag": 2},
            "mlp": {"own_lag": 2, "peer_lag": 2},
        }
    ],
    "lags 3, 1 and 0, some parallel": [
        {"layers": 0, "attention": {"own_lag": 1, "peer_lag": 1}},
        {"layers": 1, "attention+mlp": {"own_lag": 3, "peer_lag": 3}},
        {"layers": 2, "attention+mlp": {"own_lag": 1, "peer_lag": 1}},
        {"layers": 3, "mlp": {"own_lag": 3, "peer_lag": 3}},
    ],
}
DEPENDS_ON_T: dict[str, PlanSpec] = {
    "desync-2x": "desync-2x",
    "desync-3x": "desync-3x",
    "desync-4x": "desync-4x",
    "accumulate-4x": "accumulate-4x",
    "accumulate-2x-lag1": "accumulate-2x-lag1",
    "accumulate-1x-lag3": "accumulate-1x-lag3",
    "dtp-1": "dtp-1",
    "dtp-2": "dtp-2",
    "dtp-3": "dtp-3",
    "desync-2x then ladder": "desync-2x@0-1,ladder@2-3",
    "ladder then desync-4x": "ladder@0-1,desync-4x@2-3",
    "ladder, then groups of 3 and of 1": [
        {
            "layers": 0,
            "attention": {"own_lag": 1, "peer_lag": 1},
            "mlp": {"own_lag": 1, "peer_lag": 1},
        },
        {
            "layers": 1,
            "attention": {"reduce": "none", "own_scale": 1.5},
            "mlp": {"reduce": "none"},
        },
        {"layers": 2, "attention+mlp": {"reduce": "accumulated"}},
        {"layers": 3, "attention": {"reduce": "accumulated"}, "mlp": {"own_lag": 1, "peer_lag": 2}},
    ],
    "ladder, then groups of 3 in flight, then standard": [
        {"layers": 0, "preset": "ladder"},
        {"layers": "1-2", "preset": "accumulate-3x-lag2"},
        {"layers": 3, "preset": "standard"},
    ],
    "a ladder that sums every second output": [
        {
            "layers": "0-3",
            "attention": {"own_lag": 1, "peer_lag": 1, "reduce": "none"},
            "mlp": {"own_lag": 1, "peer_lag": 1, "reduce": "accumulated"},
        }
    ],
    "groups in flight under own parts of others": [
        {"layers": 0, "attention+mlp": {"reduce": "accumulated", "own_scale": 1.5}},
        {
            "layers": 1,
            "attention": {"reduce": "none", "own_scale": 0.5, "own_lag": 1, "peer_lag": 3},
            "mlp": {"reduce": "accumulated", "own_scale": 2.0, "own_lag": 1, "peer_lag": 2},
        },
        {"layers": "2-3", "attention": {"peer_lag": 2}, "mlp": {"peer_lag": 3}},
    ],
    "own at once, peers 1 later": [
        {"layers": "0-3", "attention": {"peer_lag": 1}, "mlp": {"peer_lag": 1}}
    ],
    "own 2 later, peers at once": [
        {"layers": "0-3", "attention": {"own_lag": 2}, "mlp": {"own_lag": 1, "peer_lag": 2}}
    ],
    "a mix of everything": [
        {
            "layers": 0,
            "attention": {"own_scale": 1.5},
            "mlp": {"own_lag": 1, "peer_lag": 2, "reduce": "none"},
        },
        {"layers": 1, "attention+mlp": {"reduce": "residual"}},
        {
            "layers": 2,
            "attention": {"own_lag": 1, "peer_lag": 1},
            "mlp": {"peer_lag": 2, "own_scale": 0.75},
        },
        {
            "layers": 3,
            "attention": {"reduce": "none", "own_scale": 2.0},
            "mlp": {"own_lag": 2, "peer_lag": 1},
        },
    ],
}
PLANS: dict[str, PlanSpec] = {**SAME_AT_ANY_T, **DEPENDS_ON_T}
# And for the fused modules: an own part that is a sum of two products, kept apart from the push.
FUSED_PLANS: dict[str, PlanSpec] = {
    **PLANS,
    "parallel, the own part scaled": [{"layers": "0-3", "attention+mlp": {"own_scale": 1.5}}],
}

# Ranks add their own outputs and their peers' at different times: equal but for rounding.
ADDED_APART = (
    "own at once, peers 1 later",
    "own 2 later, peers at once",
    "groups in flight under own parts of others",
)


def small_config(
    plan: PlanSpec = "standard", ranks: int = 1, depends: bool = False, **changes: Any
) -> ModelConfig:
    """A model of four layers; with `depends` its tp_degree is `ranks`."""
    shape: dict[str, Any] = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 64,
    }
    degree = ranks if depends else None
    return ModelConfig(**{**shape, "plan": plan, "tp_degree": degree, **changes})


def both(**fields: Any) -> list[SublayerRecord]:
    """The two records of a layer, with the same fields."""
    return [SublayerRecord("attention", **fields), SublayerRecord("mlp", **fields)]


def random_plan(rng: random.Random, num_layers: int, stay_equal: bool = False) -> Plan:
    """A valid plan: any kinds, lags 0 to 3, reduces and scales; `stay_equal`: one without T.

    Layers are drawn again where a plan may not continue with them; half are drawn as part of an
    `accumulated` reduce's group, with lags of their own.
    """
    records: list[SublayerRecord] = []
    while not records or Plan(tuple(records)).num_layers < num_layers:
        kinds = rng.choice((("attention", "mlp"), ("attention", "mlp"), ("attention+mlp",)))
        together = not stay_equal and rng.random() < 0.5
        layer = []
        for kind in kinds:
            own_lag, peer_lag = rng.choice((0, 0, 1, 1, 2, 3)), rng.choice((0, 0, 1, 1, 2, 3))
            reduce = rng.choice(("output", "output", "none", "residual"))
            if together:
                peer_lag = max(own_lag, peer_lag)
                reduce = rng.choice(("none", "accumulated"))
            if stay_equal:
                peer_lag, reduce = own_lag, "output"
            free = not stay_equal and reduce in ("output", "none")
            scale = rng.choice((1.0, 1.0, 0.5, 1.75)) if free else 1.0
            layer.append(SublayerRecord(kind, own_lag, peer_lag, reduce, scale))
        try:
            Plan((*records, *layer))
        except UserError:
            continue
        records += layer
    apart = Plan(tuple(records)).own_needed
    for n, record in enumerate(records):
        if record.reduce == "accumulated" and apart[n]:
            records[n] = replace(record, own_scale=rng.choice((1.0, 0.5, 1.75)))
    return Plan(tuple(records), "random")


@torch.no_grad()
def fill(model: Transformer, seed: int) -> None:
    """Random weights in which everything matters: norms far from 1, biases far from 0.

    Matrices have about unit gain, so that each sublayer weighs as much as the embedding, and two
    ranks' norms differ as much as two layers' do. (`initialise` would hide errors: its norms are
    all 1, its biases 0 and its sublayers small.)
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 7919 + zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            noise = 1 + 0.4 * noise
        elif name.endswith("bias"):
            noise = 0.5 * noise
        elif "embed_tokens" not in name:
            noise = noise / math.sqrt(parameter.shape[1])
        parameter.copy_(noise)


def full_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> Transformer:
    """The whole model in this process, filled from `seed`."""
    model = Transformer(config).to(dtype)
    fill(model, seed)
    return model


@torch.no_grad()
def share_head(model: Transformer, ranks: int) -> None:
    """Give each rank the same rows of the head: their logits differ only where what they read does.

    The head is cut by rows, so `ranks` must divide them.
    """
    weight = model.lm_head.weight
    weight.copy_(weight[: len(weight) // ranks].repeat(ranks, 1))


def heads_read_the_same(logits: Tensor, ranks: int) -> bool:
    """Whether the whole logits [..., V] of a model after `share_head` are the same bits by rank."""
    first, *others = logits.view(torch.uint8).chunk(ranks, dim=-1)
    return all(torch.equal(first, other) for other in others)


def virtual(model: Transformer, ranks: int) -> Transformer:
    """The model with its T = `ranks` ranks all held by this process."""
    model.use(replace(model.runtime, reducer=Reducer(Ranks(ranks, 0, ranks))))
    return model


def sample_tokens(config: ModelConfig, seed: int, batch: int = 2, length: int = 9) -> Tensor:
    """Token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected value; inf where not finite."""
    if found.shape != expected.shape or not found.isfinite().all():
        return math.inf
    largest = expected.abs().max().item()
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / largest if largest else difference


def weights_of(model: Transformer) -> Mapping[str, Tensor]:
    """Its state dict, detached."""
    return {name: value.detach() for name, value in model.state_dict().items()}


def model_at(name: str, ranks: int, seed: int = 1, **changes: Any) -> Transformer:
    """The float64 model of a sample plan (or of a spec) with `ranks` virtual ranks."""
    spec = PLANS.get(name, name)
    depends = resolve_plan(spec, 4, ranks).depends_on_tp
    return virtual(full_model(small_config(spec, ranks, depends, **changes), seed), ranks)
