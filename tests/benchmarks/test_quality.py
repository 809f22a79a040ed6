"""benchmarks/quality.py: its plans, its queue, what it skips, its errors."""

from __future__ import annotations

import json
import shutil
import sys
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ladder.checkpoint import load_model
from ladder.cli import main as ladder
from ladder.config import load_plan
from ladder.data.mix import open_sources
from ladder.models import Transformer, resolve_plan
from ladder.models.transformer import tensor_shapes
from ladder.parallel.sharding import initialise
from ladder.train.config import load_train_config
from ladder.train.loop import train
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import jobs
import quality
import quality_initial
import quality_plans
import quality_report
from quality_plans import chosen

SMALL = [
    "model=tiny", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4",
    "model.num_kv_heads=4", "model.head_dim=8", "model.intermediate_size=64", "dtype=float32",
    "steps=3", "warmup_steps=1", "seq_len=16", "batch_size=4", "micro_batch_size=2",
    "log_interval=1",
]  # fmt: skip
# What stands in for a training: it writes a run's metrics, and when and where it ran.
STAND_IN = """
import json, os, pathlib, sys, time
since, (out, value, code) = time.time(), sys.argv[1:]
time.sleep(0.3)
folder = pathlib.Path(out)
folder.mkdir()
(folder / "recipe.json").write_text("{}")
lines = [{"step": 1, "loss": 2.0, "tokens": 64, "tokens_per_second": 9.0},
         {"step": 1, "heldout_loss": 1.0, "heldout_bits_per_byte": float(value)}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
ran = {"since": since, "until": time.time(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
(folder / "ran.json").write_text(json.dumps(ran))
print("the disk is full")
sys.exit(int(code))
"""


def call(corpus: Path, tmp_path: Path, *options: str) -> int:
    where = ["--data", str(corpus), "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "on")]
    return quality.main(["run", *SMALL, *where, *options])


def resolved(
    corpus: Path, tmp_path: Path, *pairs: tuple[str, int], degree: int = 4,
    recipe: str = quality.RECIPE,
) -> list[quality.Run]:  # fmt: skip
    options = Namespace(overrides=SMALL, recipe=recipe, data=corpus, runs=tmp_path)
    data = open_sources(str(corpus))
    return [quality.resolve(plan, seed, degree, options, data) for plan, seed in pairs]


def stand_in(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
    def command(self: quality.Run) -> list[str]:
        return [
            "-c",
            STAND_IN,
            self.config.out,
            str(1 + self.seed),
            str(3 * (self.plan == failing)),
        ]

    monkeypatch.setattr(quality.Run, "command", property(command))


def test_a_plan_in_a_file_is_called_by_its_name(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: [{layers: 0-1, attention: {reduce: none}, mlp: {reduce: residual}}]")
    (run,) = resolved(corpus, tmp_path, (str(file), 3))
    assert (run.plan, run.name) == ("mine", "mine-seed3")
    assert run.folder == tmp_path / "mine-seed3"
    assert run.model.tp_degree == quality_plans.T  # the plan depends on T


def test_scaled_plans_are_desync_with_a_factor_on_what_is_not_reduced(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written as files that `ladder` reads, also for another T; the paper's plan keeps its name."""
    for power, scale in (("root4", 2**0.5), ("sqrt", 2.0), ("full", 4.0)):
        for every, reduces in ((2, 12), (4, 6), (8, 3), (16, 2), (24, 1)):
            name = f"desync-{every}x-{power}"
            assert quality.main(["plans", name, "--out", str(tmp_path)]) == 0
            file = capsys.readouterr().out.strip()
            assert quality_plans.called(file) == name
            plan = resolve_plan(load_plan(file), 12, 4)
            assert plan.name == name
            assert [r.reduce for r in plan.sublayers] == [
                r.reduce for r in resolve_plan(f"desync-{every}x", 12, 4).sublayers
            ]
            assert (plan.collectives, plan.final_mean) == (reduces, False)
            for record in plan.sublayers:
                wanted = scale if record.reduce == "none" else 1.0
                assert record.own_scale == pytest.approx(wanted, rel=1e-12)
    (run,) = resolved(corpus, tmp_path, ("desync-4x-sqrt", 1), degree=2)
    assert run.key == ("desync-4x-sqrt", 1, 2)
    assert run.name == "desync-4x-sqrt-T2-seed1"
    assert {r.own_scale for r in run.model.plan.sublayers if r.reduce == "none"} == {2**0.5}
    assert quality_plans.scaled("desync-4x", 12, 4) is None
    assert quality.main(["plans", "desync-4x", "--out", str(tmp_path)]) == 2
    assert "desync-4x-sqrt" in capsys.readouterr().err


def test_a_scale_by_initialisation_is_the_plain_plan_from_larger_matrices(
    corpus: Path, tmp_path: Path
) -> None:
    """desync-2x: attention is never reduced, and alone begins larger; the seed's draws are kept.

    The record has the recipe of the other runs, and the scale."""
    (run,) = resolved(corpus, tmp_path, ("desync-2x-init-full", 1))
    (plain,) = resolved(corpus, tmp_path, ("desync-2x", 1))
    assert (run.plan, run.initial_scale) == ("desync-2x-init-full", 4.0)
    assert (run.model, quality.recipe_of(run)) == (plain.model, quality.recipe_of(plain))
    run.prepare()
    model = load_model(run.initial)
    drawn = Transformer(run.model)
    initialise(drawn, 1)
    begun = dict(model.named_parameters())
    for name, parameter in drawn.named_parameters():
        scale = 4 if name.endswith("self_attn.o_proj.weight") else 1
        assert torch.equal(begun[name], scale * parameter), name
    assert ladder(run.command[2:]) == 0
    found = quality.record(Namespace(job=run, wall_s=1.0, arguments=[]))
    assert found["initial_scale"] == 4.0
    assert found["parameters"] == sum(each.numel() for each in drawn.parameters())

    # The way itself changes nothing: with a scale of 1, the losses are those of plain desync.
    quality_initial.write_initial(run.model, 1, 1.0, run.initial)
    shutil.rmtree(run.folder)
    losses = []
    for each in (run, plain):
        assert ladder(each.command[2:]) == 0
        losses.append(quality.record(Namespace(job=each, wall_s=1.0, arguments=[]))["losses"])
    assert losses[0] == losses[1] != found["losses"]


def test_an_interrupted_run_goes_on_from_its_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """With the losses of a run that was not interrupted; a finished one begins again."""
    losses = []
    for where, stop in (("whole", None), ("parts", 2)):
        (run,) = resolved(corpus, tmp_path / where, ("desync-2x-init-sqrt", 0))
        run.prepare()
        train(load_train_config(run.recipe, run.command[4:]), stop_after=stop, device="cpu")
        assert run.continues == (stop is not None)
        run.prepare()
        assert ("--resume" in run.command) == run.folder.exists() == run.continues
        assert ladder(run.command[2:]) == 0
        losses.append(quality.record(Namespace(job=run, wall_s=1.0, arguments=[]))["losses"])
    assert losses[0] == losses[1]


def test_unreduced_sublayers_are_those_of_the_plan() -> None:
    plan = resolve_plan("desync-4x@0-1,parallel@2", 3, 4)
    assert quality_initial.unreduced(plan) == [
        "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn",
    ]  # fmt: skip


def test_runs_are_named_by_sets_seeds_and_t() -> None:
    wanted = chosen(["ladder:0-2", "dtp-1:1:8", "standard", "ladder:1"])
    assert wanted == [
        *(("ladder", seed, 4) for seed in range(3)), ("dtp-1", 1, 8), ("standard", 0, 4),
        ("standard", 1, 4),
    ]  # fmt: skip
    assert chosen(None) == chosen(quality_plans.PLANS)
    scales = chosen(["scales"])
    assert len(scales) == 2 + 5 * 4
    frontier = chosen(["frontier"])
    assert {seed for _, seed, _ in frontier} == {0, 1, 2}
    assert (len(frontier), len(chosen(["shapes"]))) == (30, 8)
    assert {degree for plan, _, degree in frontier if plan == "desync-4x-sqrt"} == {2, 4}


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        ("quality-100m", quality_plans.SETS),
        ("quality-30m", ["shapes"]),
        ("quality-300m", ["shapes"]),
    ],
)
def test_the_sets_are_of_the_recipe(
    recipe: str, sets: list[str], corpus: Path, tmp_path: Path
) -> None:
    options = Namespace(overrides=[], recipe=recipe, data=corpus, runs=tmp_path)
    data = open_sources(str(corpus))
    width = {"quality-30m": 384, "quality-100m": 768, "quality-300m": 1024}[recipe]
    for plan, degree in {(p, d) for name in sets for p, _, d in chosen([name])}:
        run = quality.resolve(plan, 0, degree, options, data)
        assert (run.model.hidden_size, run.plan) == (width, plan)
        assert run.command[3] == recipe


def test_a_recipe_has_results_of_its_own() -> None:
    """Where nothing else is said; runs go beside the results."""
    for recipe, folder in (("quality-100m", "quality"), ("quality-30m", "quality-30m")):
        options = quality.parse(["run", "--recipe", recipe])
        assert (options.out, options.runs) == (Path("runs", folder),) * 2
    options = quality.parse(["run", "--recipe", "quality-30m", "--out", "here", "--runs", "there"])
    assert (options.out, options.runs) == (Path("here"), Path("there"))


def test_shapes_differ_from_quality_100m_by_a_rule(corpus: Path) -> None:
    """The rate falls with the width; of tokens, those of a smaller model are in proportion."""
    known = {}
    for name in ("quality-30m", "quality-100m", "quality-300m"):
        config = load_train_config(name, [f"data={corpus}"])
        model = config.model_config(16384)
        known[name] = config, sum(s.numel() for s in tensor_shapes(model).values())
        assert config.lr * model.hidden_size == pytest.approx(1e-3 * 768)
        assert config.min_lr == pytest.approx(config.lr / 10)
        assert (config.batch_size, config.seq_len) == (128, 1024)
        if name != "quality-100m":
            model.check_divides(8, "T")
    (small, few), (middle, some) = known["quality-30m"], known["quality-100m"]
    assert small.steps / few == pytest.approx(middle.steps / some, rel=0.03)
    assert known["quality-300m"][0].steps == middle.steps
    half = load_train_config("quality-100m", ["model=quality-100m-16h"]).model_config(16384)
    assert sum(s.numel() for s in tensor_shapes(half).values()) == some
    half.check_divides(8, "T")


def test_a_plan_is_trained_once_for_each_t(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once in all where T makes no difference; a second command begins nothing again."""
    stand_in(monkeypatch)
    monkeypatch.setattr(quality, "visible_gpus", lambda count: ["0", "1", "2"])
    only = ["--only", "desync-2x-sqrt:0", "desync-2x-sqrt:0:2", "ladder:0", "ladder:0:2"]
    assert call(corpus, tmp_path, *only) == 0
    records = quality_report.read(tmp_path / "out" / quality.RESULTS)
    assert sorted((r["plan"], r["tp_degree"] or 0) for r in records) == [
        ("desync-2x-sqrt", 2), ("desync-2x-sqrt", 4), ("ladder", 0),
    ]  # fmt: skip
    assert [record["heldout"] for record in records] == [[[1, 1.0]]] * 3
    assert [row[0] for row in quality_report.rows(records)].count("desync-2x-sqrt") == 2
    monkeypatch.setattr(jobs, "start", None)
    assert call(corpus, tmp_path, *only) == 0


@pytest.mark.slow  # two processes that import torch and train; others here have a stand-in
def test_two_plans_are_trained_once(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Really trained: desync on virtual ranks first, over what a broken-off run left."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    left = tmp_path / "on" / "standard-seed0"
    left.mkdir(parents=True)
    (left / "recipe.json").write_text("{}")
    only = ["eval_interval=2", "--only", "standard:0", "desync-2x"]
    assert call(corpus, tmp_path, *only) == 0
    records = quality_report.read(tmp_path / "out" / quality.RESULTS)
    assert [(r["plan"], r["tp_degree"]) for r in records] == [("desync-2x", 4), ("standard", None)]
    for each in records:
        assert each["tokens"] == 3 * 4 * 16
        assert 1 < each["heldout_bits_per_byte"] < 8
        assert [step for step, _ in each["losses"]] == [1, 2, 3]
        assert [step for step, _ in each["heldout"]] == [2, 3]
        assert each["heldout"][-1][1] == each["heldout_bits_per_byte"]
        assert each["machine"]["command"].startswith("python -m ladder train quality-100m model=")
        assert each["recipe"]["model"]["hidden_size"] == 32
    table = capsys.readouterr().out

    monkeypatch.setattr(jobs, "start", None)  # nothing may be started
    assert call(corpus, tmp_path, *only) == 0
    again = capsys.readouterr().out
    assert again.strip() == table[table.index("tiny,") :].strip()
    assert call(corpus, tmp_path, "eval_interval=1", *only[1:]) == 0  # the same training
    assert call(corpus, tmp_path, "steps=4", "--only", "standard:0") == 2  # not the same recipe
    assert "another recipe or of other data (recipe.steps differs)" in capsys.readouterr().err


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: Namespace) -> int:
        raise KeyboardInterrupt

    assert jobs.finish(Namespace(verb=interrupted)) == 130
    assert capsys.readouterr().err == "interrupted; what is finished is kept\n"


def test_each_gpu_has_one_run_at_a_time_and_the_longest_are_first(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failure is named, and is no record; the rest goes on."""
    stand_in(monkeypatch, failing="parallel")
    monkeypatch.setattr(quality, "visible_gpus", lambda count: ["2", "5"])
    only = ["standard", "parallel", "desync-2x", "dtp-1"]
    assert call(corpus, tmp_path, "--only", *only) == 1
    assert "parallel-seed0 on GPU" in (err := capsys.readouterr().err)
    assert "the disk is full" in err
    ran = {
        folder.name: json.loads((folder / "ran.json").read_text())
        for folder in (tmp_path / "on").iterdir()
        if folder.is_dir()
    }
    assert len(ran) == 5
    order = sorted(ran, key=lambda name: ran[name]["since"])
    assert set(order[:2]) == {"desync-2x-seed0", "dtp-1-seed0"}
    assert order[-1] == "standard-seed1"
    for gpu in ("2", "5"):
        own = sorted((r["since"], r["until"]) for r in ran.values() if r["gpu"] == gpu)
        assert len(own) >= 2
        assert all(end < begin for (_, end), (begin, _) in pairwise(own))
    records = quality_report.read(tmp_path / "out" / quality.RESULTS)
    assert sorted(f"{r['plan']}:{r['seed']}" for r in records) == [
        "desync-2x:0", "dtp-1:0", "standard:0", "standard:1",
    ]  # fmt: skip


def test_what_would_end_after_the_budget_is_not_begun(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch)
    runs = resolved(corpus, tmp_path, ("ladder", 0), ("desync-2x", 0))
    records = [{"tp_degree": 4, "wall_s": 100.0}]  # of virtual ranks: says nothing about ladder
    deadline = time.monotonic() + 50
    file = tmp_path / "quality.jsonl"
    assert quality.train_all(runs, [None], deadline, records, file, {}) == []
    assert [each["plan"] for each in quality_report.read(file)] == ["ladder"]
    assert "left out, the budget is spent: desync-2x-seed0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nowhere"], ["nowhere", "prepare"]),
        (["--only", "laddder"], ["'laddder'", "'ladder'"]),
        (["--only", "none"], ["'none'", "no_comm"]),
        (["--only", "ladder:x"], ["--only=ladder:x", "whole number"]),
        (["--only", "ladder:2-1"], ["--only=ladder:2-1", "above"]),
        (["--only", "ladder:0:1"], ["--only=ladder:0:1", "above 1"]),
        (["--only", "ladder", "--budget", "0"], ["--budget=0"]),
        (["--gpus", "99"], ["--gpus=99"]),
        (["plan=ladder"], ["'plan=ladder'", "set by the benchmark"]),
        (["stepz=4"], ["stepz", "steps"]),
        (["--recipe", "quality-10m"], ["'quality-10m'", "quality-100m"]),
        (["seq_len=4096"], ["seq_len=4096"]),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], words: list[str], corpus: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call(corpus, tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "out").exists()
