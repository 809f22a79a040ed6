"""Masking across documents: a window of several is each of them alone, in every way of running it.

The oracle of the model is tests/restatement.py, which knows no documents: it runs each by itself.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.checkpoint import load_model, newest
from ladder.data.prepared import heldout_windows, open_data
from ladder.models import Transformer, UserError, document_starts, documents
from ladder.parallel.sharding import (
    local_parameters,
    local_tensor,
    shard_model,
    sum_shared_gradients,
)
from ladder.train.loop import train
from tests import restatement
from tests.distributed import Pools, tp_mesh
from tests.parallel.layouts import LAYOUTS, Layouts, curve, train_all
from tests.parallel.steps import weigh
from tests.samples import full_model, relative_error, small_config, virtual, weights_of
from tests.train.runs import losses, recipe, recorded, run_on_ranks, seal, untimed, weights

END = 5  # ends a document in these tests
# Two rows of 12 tokens, of 4, 1, 5 and 2 tokens and of 7 and 5: the first ends with an end, a
# document of an end alone comes second, the last row's last document has no end.
LENGTHS = [[4, 1, 5, 2], [7, 5]]
EXACT, ROUNDED = 1e-9, 1e-5  # rotary angles are float32, whence the second where they are shifted
DIFFERENT = 1e-2
CASES = [("standard", 1), ("ladder", 1), ("ladder", 2), ("desync-2x", 2), ("dtp-1", 4)]


def sample() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(8)
    tokens, targets = torch.randint(6, 67, (2, 2, 12), generator=source)
    tokens[0, [3, 4, 9, 11]] = END
    tokens[1, 6] = END
    return tokens, targets


def pieces() -> list[tuple[int, int, int]]:
    """(row, start, stop) of each document."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in lengths:
            found.append((row, at, at + length))
            at += length
    return found


def model_at(plan: str, ranks: int, **changes: Any) -> Transformer:
    depends = plan.startswith(("desync", "dtp"))
    return virtual(full_model(small_config(plan, ranks, depends, **changes), 4), ranks)


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, longest: int,
    longest_k: int, *, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """`varlen_attn` one sequence after another, in any dtype, on a CPU."""
    assert starts.dtype == starts_k.dtype == torch.int32
    assert window_size == (-1, 0)
    marks = starts.tolist()
    assert (marks[0], marks[-1]) == (0, len(q))
    done = []
    for begin, end in itertools.pairwise(marks):
        assert 0 <= end - begin <= min(longest, longest_k)
        part = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        done.append(out.transpose(0, 1))
    return torch.cat(done)


@torch.library.custom_op("ladder_tests::varlen", mutates_args=())
def _opaque(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    window = (-1, 0)
    return plain_varlen(q, k, v, starts, starts, longest, longest, window_size=window).contiguous()


@_opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    return torch.empty_like(q)


def opaque(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, longest: int, *rest: int,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The same as one operation, which a compiler does not look into."""
    return _opaque(q, k, v, starts, longest)


@pytest.fixture(params=["mask", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways: by a mask, and by the GPU's, with a plain function in place of its kernel."""
    if request.param == "kernel":
        monkeypatch.setattr(documents, "_has_kernel", lambda *_: True)
        monkeypatch.setattr(documents, "_kernel", lambda: plain_varlen)
    return str(request.param)


def test_where_documents_begin() -> None:
    """Catches an end-of-text token that is given to the document after it, rows that run on into
    each other, and a document of an end alone that is lost."""
    tokens, _ = sample()
    starts = document_starts(tokens, END)
    assert starts.dtype == torch.int32
    assert starts.tolist() == [0, 4, 5, 10, 12, 19, 24]
    assert document_starts(torch.full((2, 3), 9), END).tolist() == [0, 3, 6]


@pytest.mark.parametrize(("plan", "ranks"), CASES)
def test_a_window_is_its_documents_alone(path: str, plan: str, ranks: int) -> None:
    """Logits and all gradients are those of the equations for each document by itself. Catches
    tokens that see another document or row, virtual ranks with each other's or no mask, keys that
    are paired with the wrong heads, and a mask in the forward pass only."""
    model = model_at(plan, ranks)
    tokens, _ = sample()
    starts = document_starts(tokens, END)
    logits = model(tokens, documents=starts)
    weigh(logits).backward()

    leaves = {name: value.clone().requires_grad_() for name, value in weights_of(model).items()}
    expected = torch.zeros_like(logits)
    for row, begin, end in pieces():
        alone = restatement.logits(leaves, model.config, tokens[row : row + 1, begin:end], ranks)
        expected[row, begin:end] = alone[0]
    weigh(expected).backward()

    assert relative_error(logits, expected) < ROUNDED
    for name, parameter in model.named_parameters():
        found, wanted = parameter.grad, leaves[name].grad
        assert found is not None, name
        assert wanted is not None, name
        assert relative_error(found, wanted) < ROUNDED, name
    assert relative_error(model(tokens), expected) > DIFFERENT  # without it, another function


@pytest.mark.parametrize(("plan", "ranks"), CASES)
def test_positions_go_on_without_effect(path: str, plan: str, ranks: int) -> None:
    """The same to rounding in float64 as each document at its place in the window, and within that
    of the angles (float32) as each from 0 on. Catches positions that matter, and so a reason to
    begin them again with each document."""
    model = model_at(plan, ranks)
    tokens, targets = sample()
    with torch.no_grad():
        found = model(tokens, targets, documents=document_starts(tokens, END))
        for row, begin, end in pieces():
            part, wanted = tokens[row : row + 1, begin:end], targets[row : row + 1, begin:end]
            shifted = model(part, wanted, positions=torch.arange(begin, end).unsqueeze(0))
            assert relative_error(found[row : row + 1, begin:end], shifted) < EXACT
            assert relative_error(found[row : row + 1, begin:end], model(part, wanted)) < ROUNDED


@pytest.mark.parametrize(("plan", "ranks"), CASES)
def test_nothing_before_a_document_matters(path: str, plan: str, ranks: int) -> None:
    """Other tokens, and documents cut elsewhere, before it leave its losses to the bit. Catches any
    way in for what stands before it: one layer without the mask, or sums over the window."""
    model = model_at(plan, ranks)
    tokens, targets = sample()
    other = tokens.clone()
    other[0, :5] = torch.tensor([7, END, 8, 9, END])
    with torch.no_grad():
        before, after = (model(t, targets, documents=document_starts(t, END)) for t in
                         (tokens, other))  # fmt: skip
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :4], after[0, :4])


def test_one_document_is_plain_attention(path: str) -> None:
    """Catches a mask that takes away from tokens of one document, as a strict past does."""
    model = model_at("ladder", 1)
    tokens, _ = sample()
    with torch.no_grad():
        whole = model(tokens, documents=document_starts(tokens, 66 + 1))
        assert relative_error(whole, model(tokens)) < EXACT


def test_documents_are_refused_with_a_cache() -> None:
    """Catches generation that would ignore one of the two, and numbers in place of starts."""
    model = model_at("standard", 1)
    tokens, _ = sample()
    starts = document_starts(tokens, END)
    with pytest.raises(AssertionError, match="a cache holds one document"):
        model(tokens, documents=starts, cache=object())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="the starts of each"):
        model(tokens, documents=tokens)


# On ranks


def documents_on_ranks(rank: int, world: int, cases: list[tuple[str, int]]) -> list[str]:
    """In a worker: what is wrong at TP = world, against one process that holds all ranks."""
    wrong = []
    tokens, targets = sample()
    starts = document_starts(tokens, END)
    for plan, ranks in cases:
        whole, model = model_at(plan, ranks), model_at(plan, ranks)
        shard_model(model, tp_mesh(world))
        values = [each(tokens, targets, documents=starts) for each in (whole, model)]
        for value in values:
            weigh(value).backward()
        sum_shared_gradients(model)
        if relative_error(values[1].detach(), values[0].detach()) > EXACT:
            wrong.append(f"{plan} {ranks}: losses")
        wanted, found = (dict(each.named_parameters()) for each in (whole, model))
        for name, _, part in local_parameters(model):
            mine, theirs = found[name].grad, wanted[name].grad
            assert mine is not None, name
            assert theirs is not None, name
            difference = (local_tensor(mine) - theirs[part]).abs().max()
            if difference > EXACT * theirs.abs().max():
                wrong.append(f"{plan} {ranks}: {name}")
    return wrong


def test_two_ranks(pools: Pools) -> None:
    """T = 2 and, as two processes of two virtual ranks, T = 4. Catches starts that are repeated by
    T and not by the ranks that a process holds."""
    cases = [("standard", 2), ("ladder", 2), ("desync-2x", 2), ("desync-2x", 4), ("dtp-1", 4)]
    assert pools(2).run(documents_on_ranks, cases) == [[], []]


# Training


def masked(corpus: Path, out: Path, **changes: Any) -> Any:
    """A recipe whose windows hold about two documents, which are set apart."""
    return recipe(corpus, out, **{"seq_len": 256, "mask_documents": True, **changes})


def test_the_corpus_has_windows_of_several_documents(corpus: Path) -> None:
    """Or else the tests below would pass without a mask."""
    data = open_data(corpus)
    tokens, _ = data.windows("train", 256).batch(0, 4, 0)
    assert len(document_starts(tokens, data.eos_id)) - 1 > 6


def test_training_masks(corpus: Path, tmp_path: Path) -> None:
    """The first loss is that of the fresh model with documents apart, and so are the held-out bits
    per byte of the trained one, over the same text. Catches an option that does nothing, in either,
    and another end-of-text token."""
    for name, mask in (("masked", True), ("plain", False)):
        config = masked(corpus, tmp_path / name, mask_documents=mask, steps=4)
        result = train(config, device="cpu")
        assert result is not None
        model, data = load_model(newest(tmp_path / name)), open_data(corpus)
        nats = count = text = 0.0
        for tokens, targets, sizes in heldout_windows(data, 256, 4, 4):
            starts = document_starts(tokens, data.eos_id) if mask else None
            with torch.no_grad():
                nats += model(tokens, targets, documents=starts).sum().item()
            count, text = count + targets.numel(), text + sizes.sum().item()
        assert result.tokens == count
        assert result.loss == pytest.approx(nats / count, rel=1e-6)
        assert result.bits_per_byte == pytest.approx(nats / 0.6931471805599453 / text, rel=1e-6)
    assert losses(tmp_path / "masked") != losses(tmp_path / "plain")


@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-2x", 2)])
def test_a_masked_run_resumes_to_the_bit(
    corpus: Path, tmp_path: Path, plan: str, degree: int | None
) -> None:
    """Catches a resumed run that forgets the option; and one that would change it is refused."""
    settings = {"plan": plan, "tp_degree": degree, "eval_interval": 3}
    train(masked(corpus, tmp_path / "whole", **settings), device="cpu")
    run = tmp_path / "run"
    train(masked(corpus, run, **settings), device="cpu", stop_after=4)
    changed = masked(corpus, run, mask_documents=False, **settings)
    with pytest.raises(UserError, match="mask_documents=False differs"):
        train(changed, device="cpu", resume=True)
    train(masked(corpus, run, **settings), device="cpu", resume=True)
    assert untimed(run) == untimed(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(run)[name]), name


def test_a_run_from_before_the_option_goes_on(corpus: Path, tmp_path: Path) -> None:
    """Catches a new option that ends all runs begun without it."""
    run = tmp_path / "run"
    train(recipe(corpus, run), device="cpu", stop_after=2)
    path = newest(run) / "train.json"
    record = json.loads(path.read_text())
    del record["config"]["mask_documents"]
    path.write_text(json.dumps(record))
    seal(path)
    with pytest.raises(UserError, match="started with mask_documents=False"):
        train(recipe(corpus, run, mask_documents=True), device="cpu", resume=True)
    train(recipe(corpus, run), device="cpu", resume=True)
    assert len(losses(run)) == 6


@pytest.mark.parametrize(
    ("plan", "degree", "layouts"),
    [
        pytest.param("ladder", None, LAYOUTS[4][:5:2], marks=pytest.mark.slow),
        ("desync-2x", 4, LAYOUTS[4][1:5:3]),
        pytest.param("ladder", None, LAYOUTS[4][1:5:2], marks=pytest.mark.slow),
        pytest.param("desync-2x", 4, [*LAYOUTS[4][:4:2], LAYOUTS[4][3]], marks=pytest.mark.slow),
    ],
)
def test_masked_training_on_ranks(
    corpus: Path, tmp_path: Path, pools: Pools, plan: str, degree: int | None, layouts: Layouts
) -> None:
    """DDP, HSDP and TP x FSDP, in micro-batches; the ladder with its residual sharded by tokens and
    checkpointed sublayers too; FSDP of four virtual ranks, and TP x FSDP of two. Catches documents
    that begin where those of another rank or micro-batch do, and FSDP that does not pass them
    on."""
    alone = masked(corpus, tmp_path / "alone", plan=plan, tp_degree=degree, batch_size=8)
    train(alone, device="cpu")
    settings = alone.to_dict() | {"micro_batch_size": 1}
    pools(4).run(train_all, settings, layouts, str(tmp_path))
    names = [f"{name} of 4" for _, _, name in layouts]
    if plan == "ladder":
        wrapped = {"sequence_parallel": True, "activation_checkpointing": "selective", "tp": 2}
        pools(2).run(run_on_ranks, settings | wrapped | {"out": str(tmp_path / "sharded")}, None)
        names.append("sharded")
    for name in names:
        for found, expected in zip(curve(tmp_path / name), curve(tmp_path / "alone"), strict=True):
            assert found == pytest.approx(expected, rel=1e-3), name
        held = [recorded(tmp_path / run, "heldout_loss") for run in ("alone", name)]
        assert held[1] == pytest.approx(held[0], abs=1e-4), name


def test_compiled_attention_is_compiled_for_few_numbers_of_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the GPU's way, where the documents' number is a shape. Catches a compilation for each of
    them, which takes minutes and ends at torch's limit, and what cannot be compiled whole."""
    monkeypatch.setattr(documents, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(documents, "_kernel", lambda: opaque)
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    plain, compiled = model_at("ladder", 1, num_layers=1), model_at("ladder", 1, num_layers=1)
    attention = compiled.model.layers[0].self_attn
    attention.forward = torch.compile(
        attention.forward, dynamic=False, fullgraph=True, backend=count
    )
    seen = set()
    for ends in range(1, 12):
        tokens = torch.full((2, 12), 9)
        tokens[0, :ends] = END
        starts = document_starts(tokens, END)
        seen.add(len(starts) - 1)
        with torch.no_grad():
            found, expected = (m(tokens, documents=starts) for m in (compiled, plain))
        assert relative_error(found, expected) < EXACT
    assert seen == set(range(3, 14))
    assert graphs == 3  # of up to 4, 8 and 16 documents
