"""`ladder convert sensitivity`: against plain probabilities, its choice, its plan, its mistakes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import (
    WEIGHTS,
    load_model,
    model_entries,
    read_config,
    write_config,
    write_tensors,
)
from ladder.cli import main
from ladder.convert.command import convert
from ladder.convert.sensitivity import (
    costs,
    free_layers,
    measure_sensitivity,
    named,
    turned,
    worded,
)
from ladder.data.prepared import heldout_windows, open_data
from ladder.data.tokenizer import train_tokenizer
from ladder.infer.load import load_for_inference
from ladder.models import ModelConfig, Transformer, UserError, resolve_plan
from ladder.train.evaluate import bits_per_byte
from tests.distributed import Pools
from tests.samples import full_model, small_config

LAG_2 = {"attention": {"own_lag": 2, "peer_lag": 2}, "mlp": {"own_lag": 2, "peer_lag": 2}}


@pytest.fixture(scope="module")
def standard(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standard model in which every sublayer weighs, so that rounding is nothing beside it."""
    folder = tmp_path_factory.mktemp("standard")
    data = open_data(corpus)
    config = small_config("standard", vocab_size=data.vocab_size)
    write_config(folder, config, data.eos_id)
    entries = model_entries(full_model(config, 5, torch.float32))
    write_tensors(folder, WEIGHTS, entries, writer=True)
    return folder


def test_turned_and_named() -> None:
    plan = resolve_plan("standard", 6)
    assert named([4, 1, 2, 5]) == "ladder@1-2,ladder@4-5"
    assert named([3]) == "ladder@3"
    for layers in ([3], [1, 2, 4, 5], list(range(6))):
        assert turned(plan, layers).sublayers == resolve_plan(named(layers), 6).sublayers
    assert free_layers(resolve_plan("ladder@4-5", 6)) == [0, 1, 2, 3]
    for before, layers, words in (
        ("standard", [3], "ladder@3"),
        ("ladder@4-5", [0, 3], "ladder@0,ladder@3-5"),
        ([{"layers": "0-4", "preset": "standard"}, {"layers": 5, **LAG_2}], [0], ""),
        ([{"layers": "0-4", "preset": "standard"}, {"layers": 5, **LAG_2}], [5], "ladder@5"),
    ):
        assert worded(resolve_plan(before, 6), layers) == words
    for name in ("parallel", "ladder"):
        with pytest.raises(UserError, match=f"'{name}'"):
            free_layers(resolve_plan(name, 6))
    with pytest.raises(UserError, match="other norms"):
        free_layers(small_config("desync-2x", 2, True).plan)


def test_costs_are_those_of_plain_probabilities(standard: Path, corpus: Path) -> None:
    """In float64 by log_softmax. Catches the divergence the wrong way round, a mean over windows of
    unlike sizes, a plan that stays in force, nats for bits."""
    data = open_data(corpus)
    model = load_model(standard, dtype=torch.float64)
    before = model.config
    sets = [(1,), (0, 3)]
    tokens, (own, *found) = costs(model, data, sets, 16, 5, 2, "test")
    assert model.config is before
    batches = list(heldout_windows(data, 16, 5, 2))
    assert tokens == sum(int((targets >= 0).sum()) for _, targets, _ in batches)
    text = sum(int(sizes.sum()) for _, _, sizes in batches)

    def under(plan: Any) -> Transformer:
        """Another model of the same weights."""
        made = Transformer(replace(before, plan=plan)).double()
        made.load_state_dict(model.state_dict())
        return made

    def predictions(plan: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [under(plan)(inputs).log_softmax(-1) for inputs, _, _ in batches]

    def bits(chosen: list[torch.Tensor]) -> float:
        nats = sum(
            -p.gather(-1, t.unsqueeze(-1)).sum()
            for p, (_, t, _) in zip(chosen, batches, strict=True)
        )
        return float(nats) / math.log(2) / text

    theirs = predictions(before.plan)
    assert own.bits_per_byte == pytest.approx(bits(theirs), rel=1e-9)
    assert (own.layers, own.divergence) == ((), pytest.approx(0, abs=1e-12))
    for cost, layers in zip(found, sets, strict=True):
        ours = predictions(resolve_plan(named(layers), before.num_layers))
        apart = sum((p.exp() * (p - q)).sum() for p, q in zip(theirs, ours, strict=True))
        assert cost.divergence == pytest.approx(float(apart) / tokens, rel=1e-9)
        assert cost.bits_per_byte == pytest.approx(bits(ours), rel=1e-9)
        assert cost.divergence > 0

    # Another model's divergence from the one that it was made from, on all windows.
    other = under(resolve_plan(named((1,)), before.num_layers))
    whole, (alone,) = costs(other, data, [], 16, None, 2, "test", model)
    assert whole > tokens
    assert alone.divergence == costs(model, data, [(1,)], 16, None, 2, "test")[1][1].divergence


def test_the_choice(standard: Path, corpus: Path) -> None:
    """Singles come cheapest first, the choice is of the cheapest, suffixes grow to the whole."""
    model = load_model(standard)
    report = measure_sensitivity(model, open_data(corpus), 2, 16, 6, 3)
    divergences = [cost.divergence for cost in report.singles]
    assert divergences == sorted(divergences)
    assert sorted(cost.layers for cost in report.singles) == [(n,) for n in range(4)]
    cheapest = sorted(cost.layers[0] for cost in report.singles[:2])
    assert list(report.chosen.layers) == cheapest
    assert [cost.layers for cost in report.suffixes] == [(3,), (2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert report.suffix == report.suffixes[1]


def test_documents_are_kept_apart_as_in_the_training(
    standard: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `mask_documents` the original's figure is that of the run's own evaluation."""
    run, data = shutil.copytree(standard, tmp_path / "run"), open_data(corpus)
    model, found = load_model(standard), {}
    for mask in (False, True):
        recipe = {"seq_len": 64, "mask_documents": mask}
        (run / "train.json").write_text(json.dumps({"config": recipe}))
        out = tmp_path / f"{mask}.json"
        command = ["convert", "sensitivity", str(run), "--data", str(corpus), "--windows", "40"]
        assert main([*command, "--layers", "1", "--out", str(out)]) == 0
        first = capsys.readouterr().out.splitlines()[0]
        more = "; attention within each document, as trained" * mask
        assert first == f"windows of 64 tokens, as trained{more}"
        found[mask] = json.loads(out.read_text())
        assert found[mask]["mask_documents"] is mask
        own = bits_per_byte(model, data, 64, 8, 40, mask_documents=mask)
        assert own is not None
        assert found[mask]["original"] == pytest.approx(own.bits_per_byte, rel=1e-6)
    assert abs(found[True]["original"] - found[False]["original"]) > 1e-4


def on_ranks(rank: int, world: int, folder: str, data: str) -> list[float]:
    model = load_for_inference(folder, reducer="async", dtype="float32", device="cpu")
    return [c.divergence for c in measure_sensitivity(model, open_data(data), 2, 16, 4, 2).suffixes]


def test_two_ranks_measure_what_one_does(standard: Path, corpus: Path, pools: Pools) -> None:
    alone = [
        c.divergence
        for c in measure_sensitivity(load_model(standard), open_data(corpus), 2, 16, 4, 2).suffixes
    ]
    for found in pools(2).run(on_ranks, str(standard), str(corpus)):
        assert found == pytest.approx(alone, rel=1e-3)


def test_the_command(
    standard: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plan can be given to `ladder convert` as it is printed."""
    common = ["convert", "sensitivity", str(standard), "--data", str(corpus), "--windows", "4"]
    assert main([*common, "--layers", "2", "--out", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr().out
    plan = printed.strip().splitlines()[-2].removeprefix("--plan ")
    assert main([*common, "--layers", "1", "--out", str(tmp_path / "a.json")]) == 2
    assert "a.json exists; name another file" in capsys.readouterr().err
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["singles"]) == len(found["suffixes"]) == 4
    assert main(["convert", str(standard), "--plan", plan, "--out", str(tmp_path / "b")]) == 0
    assert isinstance(load_model(tmp_path / "b").config, ModelConfig)
    capsys.readouterr()
    # What is a ladder already stays one.
    convert(standard, tmp_path / "hybrid", "ladder@0")
    words = ["convert", "sensitivity", str(tmp_path / "hybrid"), *common[3:], "--layers", "1"]
    assert main(words) == 0
    plan = capsys.readouterr().out.strip().splitlines()[-2].removeprefix("--plan ")
    assert plan in ("ladder@0-1", "ladder@0,ladder@2", "ladder@0,ladder@3")
    # Windows are as long as those of the training, where a run's checkpoint says so.
    run = shutil.copytree(standard, tmp_path / "run")
    (run / "train.json").write_text(json.dumps({"config": {"seq_len": 16}}))
    for folder, more, said in (
        (run, [], "windows of 16 tokens, as trained\n"),
        (run, ["--seq-len", "8"], "windows of 8 tokens\n"),
        (standard, [], f"windows of {read_config(standard).max_seq_len} tokens\n"),
    ):
        assert main([*common[:2], str(folder), *common[3:], "--layers", "1", *more]) == 0
        assert capsys.readouterr().out.startswith(said)
    (tmp_path / "hybrid" / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    assert main(words) == 0
    train_tokenizer(["others"] * 9, 300, tmp_path / "hybrid")
    capsys.readouterr()
    assert main(words) == 2
    assert "made with another vocabulary" in capsys.readouterr().err
    for wrong, words in (
        (["--layers", "5"], "--layers=5 must be 1 to 4"),
        (["--layers", "2", "--seq-len", "9999"], "--seq-len=9999"),
        (["--layers", "2", "--batch", "0"], "--batch=0"),
    ):
        assert main([*common, *wrong]) == 2
        error = capsys.readouterr().err
        assert words in error
