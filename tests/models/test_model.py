"""The model in one process, against the restatement of the equations, and what else it promises."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.models import Ranks, Reducer, Transformer, UserError
from ladder.models.runtime import Runtime
from tests import ROOT, restatement
from tests.distributed import PATIENCE
from tests.samples import (
    DEPENDS_ON_T,
    PLANS,
    SAME_AT_ANY_T,
    full_model,
    model_at,
    random_plan,
    relative_error,
    sample_tokens,
    small_config,
    virtual,
    weights_of,
)

EXACT = 1e-9  # float64, relative to the largest value
DIFFERENT = 1e-2  # two architectures, or two weights, are at least this far apart


# Plans that the restatement knows by their records only
NO_FUNCTION = (
    "ladder@0-1",
    "lag 2",
    "lags 3, 1 and 0, some parallel",
    "desync-2x then ladder",
    "ladder then desync-4x",
    "ladder, then groups of 3 and of 1",
    "ladder, then groups of 3 in flight, then standard",
    "a ladder that sums every second output",
    "groups in flight under own parts of others",
    "own at once, peers 1 later",
    "own 2 later, peers at once",
    "a mix of everything",
)


# Against the restatement


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [*PLANS, "none"])
def test_logits_are_those_of_the_equations(name: str, ranks: int) -> None:
    """Catches a wrong lag, order, scale, split or norm in the loop or in the plan's landings, since
    the restatement shares no code with either."""
    model = model_at(name, ranks)
    tokens = sample_tokens(model.config, seed=2)
    logits = model(tokens)
    weights = weights_of(model)
    assert logits.dtype == torch.float64
    general = restatement.logits(weights, model.config, tokens, ranks)
    assert relative_error(logits, general) < EXACT
    own_function = restatement.named(name, model.config)
    if own_function is not None:
        expected = own_function(weights, model.config, tokens, ranks)
        assert relative_error(logits, expected) < EXACT
    else:
        assert name in NO_FUNCTION


def test_ladder_is_equation_2() -> None:
    """Algorithm 1 and Equation 2 are one architecture, and ours."""
    model = model_at("ladder", 2)
    tokens = sample_tokens(model.config, seed=2)
    expected = restatement.ladder_equation_2(weights_of(model), model.config, tokens, 2)
    assert relative_error(model(tokens), expected) < EXACT


@pytest.mark.parametrize("seed", range(30))
def test_random_plans(seed: int) -> None:
    """Plans that no preset has, on shapes that no preset needs: KV heads fewer than ranks or one
    per query head, biases where they are allowed, head_dim that is not hidden / heads."""
    rng = random.Random(1000 + seed)
    layers, ranks = rng.randint(1, 4), rng.choice((1, 2, 4))
    plan = random_plan(rng, layers, stay_equal=seed % 3 == 0)
    biases = all(plan.equal_reads)
    attention_bias = biases and rng.random() < 0.7
    config = small_config(
        plan,
        ranks,
        plan.depends_on_tp,
        num_layers=layers,
        num_kv_heads=rng.choice((1, 2, 4)),
        head_dim=rng.choice((6, 8)),
        tie_embeddings=rng.random() < 0.5,
        attention_bias=attention_bias,
        qkv_bias=not attention_bias and rng.random() < 0.5,
        mlp_bias=biases and rng.random() < 0.7,
        qk_norm=rng.random() < 0.5,
    )
    model = virtual(full_model(config, seed), ranks)
    tokens = sample_tokens(config, seed, batch=rng.choice((1, 3)), length=rng.choice((1, 6)))
    expected = restatement.logits(weights_of(model), config, tokens, ranks)
    assert relative_error(model(tokens), expected) < EXACT


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_the_equations(name: str, ranks: int) -> None:
    """Loss and every parameter's gradient, against autograd through the restatement and torch's
    cross-entropy. Catches an in-place sum that spoils a saved tensor, a sum over held ranks whose
    gradient reaches one of them, and a loss that counts ignored targets."""
    model = model_at(name, ranks)
    tokens, targets = sample_tokens(model.config, seed=3), sample_tokens(model.config, seed=4)
    targets[0, :4] = -100
    targets[1, -1] = -1
    losses = model(tokens, targets)
    weigh = torch.linspace(0.5, 2.0, losses.numel(), dtype=losses.dtype).view_as(losses)
    (losses * weigh).sum().backward()

    leaves = {name: value.clone().requires_grad_() for name, value in weights_of(model).items()}
    logits = restatement.logits(leaves, model.config, tokens, ranks)
    kept = targets.where(targets >= 0, 0)
    expected = F.cross_entropy(logits.flatten(0, 1), kept.flatten(), reduction="none")
    expected = expected.view_as(losses) * (targets >= 0)
    (expected * weigh).sum().backward()

    assert relative_error(losses.detach(), expected.detach()) < EXACT
    for parameter_name, parameter in model.named_parameters():
        expected_grad = leaves[parameter_name].grad
        assert parameter.grad is not None, parameter_name
        assert expected_grad is not None, parameter_name
        assert relative_error(parameter.grad, expected_grad) < EXACT, parameter_name
        assert parameter.grad.abs().max() > 1e-6, f"{parameter_name} takes no part"


def test_gradient_of_tied_embeddings_has_both_parts() -> None:
    """Catches one weight's use as embedding or as head that is left out."""
    model = model_at("ladder", 2, tie_embeddings=True)
    tokens, targets = sample_tokens(model.config, seed=3), sample_tokens(model.config, seed=4)
    model(tokens, targets).sum().backward()
    weight = model.lm_head.weight
    assert weight is model.model.embed_tokens.weight
    leaf = weight.detach().clone().requires_grad_()
    weights = {**weights_of(model), "model.embed_tokens.weight": leaf, "lm_head.weight": leaf}
    logits = restatement.logits(weights, model.config, tokens, 2)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert weight.grad is not None
    assert leaf.grad is not None
    assert relative_error(weight.grad, leaf.grad) < EXACT


# T: where it is no part of the function, and where it is


@pytest.mark.parametrize("name", SAME_AT_ANY_T)
def test_t_is_no_part_of_equal_residuals(name: str) -> None:
    """One model, run with 1, 2 and 4 virtual ranks. Catches a bias added by each rank, and KV heads
    paired with the wrong queries where T exceeds them."""
    config = small_config(PLANS[name], attention_bias=True, mlp_bias=True)
    assert not config.plan.depends_on_tp
    model = full_model(config, seed=5)
    tokens, targets = sample_tokens(config, seed=6), sample_tokens(config, seed=7)
    expected: list[Tensor] = []
    for ranks in (1, 2, 4):
        virtual(model, ranks)
        model.zero_grad()
        losses = model(tokens, targets)
        losses.sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found = [model(tokens).detach(), losses.detach(), *grads]
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            assert relative_error(one, other) < EXACT


@pytest.mark.parametrize("name", DEPENDS_ON_T)
def test_t_is_part_of_unequal_residuals(name: str) -> None:
    """The same weights under T = 1 and 2 are different functions (so the tests above can fail), and
    a model of one T refuses another rather than compute it."""
    config = small_config(PLANS[name], 2, True)
    model = full_model(config, seed=5)
    tokens = sample_tokens(config, seed=6)
    logits = model(tokens)
    alone = small_config(PLANS[name], 1, True)
    first_rows = {
        key: value[:1] if "norm" in key and value.dim() == 2 else value
        for key, value in weights_of(model).items()
    }
    other = Transformer(alone).double()
    other.load_state_dict(first_rows)
    assert relative_error(other(tokens), logits) > DIFFERENT
    for ranks in (1, 4):
        with pytest.raises(UserError, match="tp_degree=2") as error:
            model.use(Runtime(Reducer(Ranks(ranks, 0, ranks))))
        assert str(ranks) in str(error.value)
    assert torch.equal(model(tokens), logits), "a refused reducer was taken all the same"


def test_t_must_divide_the_model() -> None:
    """Catches a split that drops the rest of the heads or columns."""
    model = full_model(small_config("ladder", num_heads=4, num_kv_heads=4), seed=5)
    for ranks in (3, 8):
        with pytest.raises(UserError, match=rf"tp={ranks} .*num_heads=4"):
            virtual(model, ranks)
    odd = full_model(small_config("ladder", intermediate_size=50), seed=5)
    with pytest.raises(UserError, match=r"tp=4 .*intermediate_size=50"):
        virtual(odd, 4)


@pytest.mark.parametrize("name", DEPENDS_ON_T)
def test_norms_that_read_unequal_residuals_have_a_weight_per_rank(name: str) -> None:
    """Shapes, and that each rank uses its own: exchanging two ranks' rows changes the logits."""
    model = model_at(name, 4)
    plan = model.config.plan
    for n, record in enumerate(plan.sublayers):
        layer = model.model.layers[plan.layers[n]]
        norm = layer.post_attention_layernorm if record.kind == "mlp" else layer.input_layernorm
        assert norm.weight.shape == ((32,) if plan.equal_reads[n] else (4, 32))
    assert model.model.norm.weight.shape == ((32,) if plan.equal_reads[-1] else (4, 32))
    tokens = sample_tokens(model.config, seed=2)
    before = model(tokens)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key and parameter.dim() == 2:
                parameter.copy_(parameter[[1, 0, 2, 3]])
    assert relative_error(model(tokens), before) > DIFFERENT


def test_parallel_layers_have_one_norm() -> None:
    model = Transformer(small_config("parallel"))
    assert not [name for name, _ in model.named_parameters() if "post_attention" in name]


@pytest.mark.parametrize("name", [name for name in PLANS if name != "standard"])
def test_architectures_differ(name: str) -> None:
    """With the same weights each plan is another function than standard, by far more than any
    tolerance here: a model that ignored its plan would fail."""
    model = model_at(name, 2)
    standard = Transformer(small_config()).double()
    shared = {
        key: value[0] if "norm" in key and value.dim() == 2 else value
        for key, value in weights_of(model).items()
    }
    lacking = standard.load_state_dict(shared, strict=False)
    assert not lacking.unexpected_keys
    for key in lacking.missing_keys:  # a parallel layer's one norm serves for both
        source = key.replace("post_attention_layernorm", "input_layernorm")
        standard.get_parameter(key).data.copy_(standard.get_parameter(source).data)
    tokens = sample_tokens(model.config, seed=2)
    assert relative_error(model(tokens), standard(tokens)) > DIFFERENT


def test_the_restatement_tells_lags_apart() -> None:
    """The oracle itself: hybrids that differ by one layer, delays by one, and so on, all differ."""
    specs = ["standard", "ladder", "hybrid", "ladder@1-3", "ladder@0-1", "lag 2"]
    config = small_config()
    weights, tokens = weights_of(full_model(config, 1)), sample_tokens(config, seed=2)
    found = [restatement.logits(weights, small_config(PLANS[spec]), tokens, 1) for spec in specs]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert relative_error(one, other) > DIFFERENT


# The forward pass's other promises


def test_compute_dtype_narrows_activations_and_not_parameters() -> None:
    """bfloat16 activations from float32 parameters: close to float32, and losses in float32."""
    model = full_model(small_config("ladder"), 1, torch.float32)
    tokens, targets = sample_tokens(model.config, seed=2), sample_tokens(model.config, seed=3)
    expected = model(tokens)
    model.use(replace(model.runtime, compute_dtype=torch.bfloat16))
    logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert 1e-4 < relative_error(logits, expected) < 0.1
    losses = model(tokens, targets)
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_losses_of_extreme_logits_are_finite() -> None:
    """Catches an exponential without subtraction of the maximum."""
    model = full_model(small_config("standard"), 1, torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    tokens, targets = sample_tokens(model.config, seed=2), sample_tokens(model.config, seed=3)
    losses = model(tokens, targets)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    assert relative_error(losses.flatten(), expected) < 1e-6


def test_initialise_gives_the_documented_spread() -> None:
    """0.02, and 0.02 / sqrt(2 L) where a matrix writes to the residual; norms 1, biases 0."""
    from ladder.parallel.sharding import initialise

    config = small_config("desync-2x", 2, True, hidden_size=64, intermediate_size=96)
    biased = small_config("ladder", hidden_size=64, attention_bias=True, mlp_bias=True)
    for model in (Transformer(config), Transformer(biased)):
        initialise(model, seed=3)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                assert (parameter == 1).all()
            elif name.endswith("bias"):
                assert (parameter == 0).all()
            else:
                writes = "o_proj" in name or "down_proj" in name
                std = 0.02 / 8**0.5 if writes else 0.02
                assert parameter.std().item() == pytest.approx(std, rel=0.1), name
        # Numbers of its own for each matrix, by its name, and for each seed.
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        values = [first.k_proj.weight, first.v_proj.weight, second.k_proj.weight]
        found = torch.stack(values).detach().clone()
        assert len(torch.unique(found[:, 0, 0])) == 3
        initialise(model, seed=4)
        assert not (found == torch.stack(values)).any()


@torch.no_grad()
def test_a_new_model_has_random_weights() -> None:
    """Of torch's seed, and not what lay in the memory that it was given; none on `meta`."""
    config = small_config("desync-2x", 2, True, hidden_size=64, attention_bias=False)
    tokens = sample_tokens(config, seed=0)
    rubbish = [torch.full((64, 96), torch.nan) for _ in range(64)]
    del rubbish
    torch.manual_seed(5)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            writes = "o_proj" in name or "down_proj" in name
            std = 0.02 / 8**0.5 if writes else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    logits = model(tokens)
    assert not torch.equal(logits, Transformer(config)(tokens))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(each.is_meta for each in Transformer(config).parameters())
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(logits, Transformer(config)(tokens))


def test_every_rank_has_a_row_of_the_vocabulary() -> None:
    """Rows are shared out by the ceiling: 6 over 4 ranks leave the last one none, 7 leave it 1."""
    for size in (6, 7):
        model = Transformer(small_config(vocab_size=size, num_kv_heads=4))
        if size == 7:
            model.use(Runtime(Reducer(Ranks(4, 0, 1))))
            continue
        with pytest.raises(UserError, match="tp=4 leaves a rank without a row of vocab_size=6"):
            model.use(Runtime(Reducer(Ranks(4, 0, 1))))


# What the model may know of


def test_the_model_imports_torch_and_itself() -> None:
    """DESIGN: `ladder/models` knows no communication, no kernels, no files."""
    allowed = {"torch", *sys.stdlib_module_names}
    for path in (ROOT / "ladder" / "models").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.startswith("ladder.models") or name.split(".")[0] in allowed, path
                assert not name.startswith("torch.distributed"), path


def test_importing_the_package_imports_nothing() -> None:
    """`import ladder` is free, and importing the model starts no process group."""
    code = (
        "import sys, ladder; assert 'torch' not in sys.modules; "
        "import ladder.models, torch; assert not torch.distributed.is_initialized()"
    )
    root = ROOT
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, cwd=root)
