"""benchmarks/residual*.py: the figures against values computed by hand, and the command."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ladder.models import ModelConfig, Plan, Transformer, resolve_plan
from ladder.parallel.sharding import initialise
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import residual
import residual_measure
import residual_report

T = 2
PARTIALS = ((1.0, 3.0), (2.0, 4.0), (5.0, 1.0), (1.0, 1.0))  # of each sublayer, on each rank
SHAPE = {
    "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 2,
}  # fmt: skip
TOKENS = torch.tensor([[1, 2, 3], [3, 3, 0]])
TARGETS = torch.tensor([[2, 3, -1], [3, 0, 5]])
SMALL = [
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4",
    "model.head_dim=8", "model.intermediate_size=64", "steps=2", "warmup_steps=1", "seq_len=16",
    "batch_size=2", "eval_windows=2",
]  # fmt: skip


def plan(scale: float) -> Plan:
    return residual.scaled(resolve_plan("desync-2x", 2, T), scale, T)


def by_hand(scale: float) -> Transformer:
    """A model in which every value is the same in all positions and channels.

    The embedding is 8, so a norm gives 1 and rank r's partial of sublayer n is PARTIALS[n][r].
    """
    model = Transformer(ModelConfig(**SHAPE, plan=plan(scale), tp_degree=T))
    initialise(model, seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(8.0)
        for n, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            attention.v_proj.weight.fill_(1 / 4)
            mlp.gate_proj.weight.fill_(1 / 4)
            mlp.up_proj.weight.fill_(1 / 4 * (1 + math.exp(-1)))  # over silu(1)
            for matrix, values in ((attention.o_proj, PARTIALS[2 * n]),
                                   (mlp.down_proj, PARTIALS[2 * n + 1])):  # fmt: skip
                matrix.weight.copy_(torch.tensor(values).repeat_interleave(2).expand(4, 4) / 2)
    return model


@pytest.mark.parametrize(
    ("scale", "residuals", "written"),
    [
        # Unscaled: read 2 has the mean of attention's (1, 3), and all of the MLP's (2, 4).
        (1.0, [(8, 8), (9, 11), (16, 16), (21, 17), (21, 21)], [2, 6, 3, 2]),
        # Scaled by T: the sum of (1, 3).
        (2.0, [(8, 8), (10, 14), (18, 18), (28, 20), (26, 26)], [4, 6, 6, 2]),
    ],
)
def test_sizes_shares_and_coefficients_are_those_computed_by_hand(
    scale: float, residuals: list[tuple[int, int]], written: list[int]
) -> None:
    found = residual_measure.measure(by_hand(scale), TOKENS, TARGETS, T)
    final = residuals[-1][0]
    for read, (zero, one) in zip(found["residuals"], residuals, strict=True):
        size = math.sqrt((zero**2 + one**2) / 2)
        assert read["rms"] == pytest.approx(size, rel=1e-4)
        assert read["apart"] == pytest.approx(abs(zero - one) / 2 / size, rel=1e-4, abs=1e-5)
        assert read["error"] < 1e-6
    for n, each in enumerate(found["sublayers"]):
        assert each["partial_rms"] == pytest.approx(PARTIALS[n], rel=1e-4)
        assert each["output_rms"] == pytest.approx(sum(PARTIALS[n]), rel=1e-4)
        assert each["written_rms"] == pytest.approx(written[n], rel=1e-4)
        assert each["share"] == pytest.approx(written[n] / final, rel=1e-4)
        summed = n % 2 == 1
        assert each["coefficients"] == ([1.0] * T if summed else [scale / T] * T)
        assert each["own_coefficient"] == (1.0 if summed else scale)
        assert (each["first_read"], each["equal_read"]) == (n + 1, n + 1 if summed else n + 2)
    assert found["embedding"]["share"] == pytest.approx(8 / final, rel=1e-4)
    assert sum(residual_report.shares(found).values()) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "degree", "expected"),
    [
        ("standard", 4, [1.0] * 8),
        ("ladder", 4, [1.0] * 8),
        ("desync-4x", 4, [0.25, 0.25, 0.25, 1.0] * 2),
        ("accumulate-4x", 4, [1.0] * 8),
        ("desync-4x", 8, [0.125, 0.125, 0.125, 1.0] * 2),
        # Twice the own partial of the first and the last sublayer; the last one's peers: never.
        ("dtp-1", 4, [(2 + 3) / 4, *[1.0] * 6, 2 / 4]),
    ],
)
def test_a_partial_reaches_later_layers_divided_by_T(
    name: str, degree: int, expected: list[float]
) -> None:
    found = residual_measure.coefficients(resolve_plan(name, 4, degree), degree)
    reads = residual_measure.arrivals(found)
    mean = [found[reads[m]].mean(0)[m].mean().item() for m in range(8)]
    assert mean == pytest.approx(expected)


def test_gradients_are_those_of_the_residual_and_the_partials() -> None:
    """By identities of the plan's algebra; the embedding's gradient is the first read's."""
    scale = 1.5
    model = Transformer(ModelConfig(**SHAPE, plan=plan(scale), tp_degree=T))
    initialise(model, seed=1)
    run, loss = residual_measure.observe(model, TOKENS, TARGETS, T)
    logits = model(TOKENS)
    assert loss == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), ignore_index=-1).item(), rel=1e-5
    )
    residuals = [each.grad for each in run.residuals]
    first, landed = run.partials[:2]
    torch.testing.assert_close(first.grad, scale * residuals[1])  # X_1 = X_0 + scale o_0
    common = residuals[2].sum(0).expand(T, -1, -1, -1)  # X_2 = the sum of o_1 + X_1 / T
    torch.testing.assert_close(landed.grad, common)
    weight = model.model.embed_tokens.weight.grad
    wanted = torch.zeros_like(weight).index_add_(
        0, TOKENS.flatten(), residuals[0].sum(0).flatten(0, 1)
    )
    torch.testing.assert_close(weight, wanted)
    found = residual_measure.measure(model, TOKENS, TARGETS, T)
    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    for each, wanted in zip(found["residuals"], residuals, strict=True):
        assert each["gradient"] == pytest.approx(wanted.sum(0).norm().item(), rel=1e-4)
    assert found["sublayers"][0]["partial_gradient"] == pytest.approx(
        first.grad.norm().item() / math.sqrt(T), rel=1e-4
    )
    output = model.model.layers[1].mlp.down_proj.weight
    (mlp,) = (e for e in found["parameters"] if (e.get("layer"), e["kind"]) == (1, "mlp"))
    assert mlp["output_gradient"] == pytest.approx(output.grad.norm().item(), rel=1e-4)
    slot = [each.grad.norm().item() for each in model.model.layers[1].mlp.parameters()]
    assert mlp["gradient"] == pytest.approx(math.hypot(*slot), rel=1e-4)


def test_scales_are_those_of_partials_that_wait_for_a_reduce() -> None:
    desync = resolve_plan("desync-2x", 2, 4)
    names = [each.name for each in residual.variants(desync, (1.0, 1.5, 2.0, 4.0), 4)]
    assert names == ["desync-2x", "desync-2x-scale-1.5", "desync-2x-sqrt", "desync-2x-full"]
    assert [r.own_scale for r in residual.variants(desync, (2.0,), 4)[0].sublayers] == [2, 1, 2, 1]
    accumulate = resolve_plan("accumulate-2x", 2, 4)
    names = [each.name for each in residual.variants(accumulate, (1.0, 2.0), 4)]
    assert names == ["accumulate-2x-scale-1", "accumulate-2x"]  # sqrt(T) is its own
    late = residual.variants(resolve_plan("accumulate-2x-lag1", 3, 4), (1.0, 2.0), 4)
    assert [each.name for each in late] == ["accumulate-2x-lag1-scale-1", "accumulate-2x-lag1"]
    # Sums that lag are read after the own part of the sublayer that reduces, but for the last.
    assert [[r.own_scale for r in each.sublayers] for each in late] == [[1] * 6, [2] * 5 + [1]]
    for alone in (resolve_plan("standard", 2), resolve_plan("dtp-1", 2, 4)):
        assert residual.variants(alone, (1.0, 2.0), 4) == [alone]


def test_balance_compares_with_the_same_sublayers_of_standard() -> None:
    def record(reduces: list[str], written: list[float]) -> dict[str, Any]:
        pairs = enumerate(zip(reduces, written, strict=True))
        keys = ("sublayer", "reduce", "written_rms")
        return {"sublayers": [dict(zip(keys, (n, *each), strict=True)) for n, each in pairs]}

    standard = record(["output"] * 4, [1.0, 2.0, 4.0, 8.0])
    desync = record(["none", "residual"] * 2, [0.5, 6.0, 0.5, 24.0])  # 1/2, 3, 1/8, 3
    assert residual_report.balance(desync, standard) == pytest.approx(1 / 4 / 3)
    assert residual_report.balance(standard, standard) is None


def records(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "residual.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--scales", "1", "-1"], "--scales=-1 must be above 0 and below 1e6"),
        (["--run", "x", "--scales", "1"], "--scales with --run"),
        (["--run", "x", "--plans", "ladder"], "--plans with --run"),
        (["--run", "x", "steps=3"], "override 'steps=3' with --run"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert residual.main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_an_empty_file_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    assert residual.main(["report", str(tmp_path / "empty")]) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path / 'empty'} is empty; give a file of results\n"
    )


def test_the_command_trains_and_measures_and_takes_finished_runs(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tp-degree", "2", "--windows", "2", "--data", str(corpus)]
    own = ["--plans", "standard", "desync-2x", "--scales", "2", "--out", str(tmp_path / "a")]
    assert residual.main(["run", *SMALL, *words, *own]) == 0
    found = records(tmp_path / "a")
    assert [(each["plan"], each["when"]) for each in found] == [
        ("standard", "initial"), ("standard", "trained"),
        ("desync-2x-full", "initial"), ("desync-2x-full", "trained"),
    ]  # fmt: skip
    assert found[0]["loss"] != found[1]["loss"]
    assert all(each["error"] < 1e-5 for each in found)
    table = (tmp_path / "a" / "residual.txt").read_text(encoding="utf-8")
    assert "desync-2x-full, trained" in table
    assert table in capsys.readouterr().out
    assert residual.main(["run", *SMALL, *words, *own]) == 0  # all are there
    assert records(tmp_path / "a") == found
    runs = ["--run", str(tmp_path / "a" / "desync-2x-full"), "--out", str(tmp_path / "b")]
    assert residual.main(["run", *runs, *words]) == 0
    again = records(tmp_path / "b")
    for old, new in zip(found[2:], again, strict=True):
        for record in (old, new):
            del record["machine"]
        assert old == new
    capsys.readouterr()
    assert residual.main(["run", "--run", str(tmp_path / "no"), "--out", str(tmp_path / "c")]) == 2
    assert f"--run={tmp_path / 'no'} is no run" in capsys.readouterr().err
