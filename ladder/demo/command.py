"""`ladder demo`: one tiny model, trained on real text under five residual plans.

Trains a tokenizer on Python's standard library, prepares the data, trains the model under each plan
on the same tokens, evaluates each on held-out text, runs each with tensor parallelism on two ranks,
and writes report.json and report.html.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from ladder.bench import figures, report
from ladder.checkpoint import load_model, newest
from ladder.config import build, find, load_mapping
from ladder.data.prepare import prepare
from ladder.data.prepared import heldout_windows, open_data
from ladder.data.sources import open_corpus
from ladder.data.tokenizer import load_tokenizer, train_tokenizer
from ladder.files import beside, make_folder, write_text
from ladder.infer.engine import generate
from ladder.infer.sampling import Sampling
from ladder.lock import hold
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.mesh import make_mesh
from ladder.plans import aligned, picture
from ladder.records import facts
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.loop import train

PLANS: dict[str, int | None] = {  # plan -> tp_degree
    "standard": None,
    "parallel": None,
    "ladder": None,
    "desync-4x": 4,
    "hybrid": None,  # ladder on the upper half
}
VOCAB_SIZE = 1024
PROMPT = "def read(self, "
NEW_TOKENS = 96  # of each plan's sample
TP = 2
MARK = ".ladder-demo"  # the file that marks a folder of a demo, which the next demo may replace
OWN = ("tokenizer", "data", "report.json", "report.html", "samples.json")
SMOOTH = 5  # recorded steps that a point of the loss curves averages


def main(out: Path) -> int:
    figures.require_matplotlib()  # before minutes of training
    # Another demo would remove what this one writes.
    with hold(beside(Path(os.path.realpath(out))), f"--out={out}"):
        return _run(out)


def _run(out: Path) -> int:
    started = time.perf_counter()
    _clear(out)
    _say("1/4", "tokenizer and data: this Python's standard library")
    corpus = open_corpus()
    size = train_tokenizer((d.text for d in corpus.read("train")), VOCAB_SIZE, out / "tokenizer")
    index = prepare(None, out / "tokenizer", out / "data")
    tokens = index["splits"]["train"]["tokens"]
    print(f"{tokens:,} training tokens of a {size:,}-token vocabulary", flush=True)

    recipe = load_mapping(find("train", "demo"))
    results: dict[str, dict[str, Any]] = {}
    for i, (plan, degree) in enumerate(PLANS.items(), start=1):
        _say("2/4", f"training plan {i} of {len(PLANS)}")
        settings = {"data": str(out / "data"), "out": str(out / plan), "plan": plan}
        config = build(TrainConfig, {**recipe, **settings, "tp_degree": degree}, "the demo")
        heldout = train(config, device="cpu")
        if heldout is None:  # the trainer has said so, and saved
            raise UserError("the demo ends here (SIGTERM); run it again, and it begins anew")
        results[plan] = {
            "bits_per_byte": heldout.bits_per_byte,
            "tokens_per_second": _speed(out / plan),
        }

    _say("3/4", f"running each with {TP}-rank tensor parallelism")
    for plan in PLANS:
        model = load_model(newest(out / plan))
        results[plan] |= {
            "collectives_per_token": model.config.plan.collectives,
            "blocking_collectives_per_token": sum(model.config.plan.blocking),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        torch.save(_heldout_logits(model, out), out / plan / "logits.pt")
    code = launch.run(_run_with_tp, (out,), nproc=TP)
    if code:
        return code
    for plan in PLANS:
        (out / plan / "logits.pt").unlink()
        results[plan] |= json.loads((out / plan / "tp.json").read_text(encoding="utf-8"))

    _say("4/4", "report")
    samples = {plan: result.pop("sample") for plan, result in results.items()}
    (out / "samples.json").write_text(json.dumps(samples, indent=1), encoding="utf-8")
    write_text(out / "report.html", _page(out, results, samples, recipe))
    write_text(out / "report.json", json.dumps(results, indent=1) + "\n")
    print(aligned([list(HEAD), *_rows(results)]))
    print(f"\n{time.perf_counter() - started:.0f} s in all; open {out / 'report.html'}")
    return 0


def _clear(out: Path) -> None:
    """Empty the folder of an earlier demo. Raises UserError if it holds anything else."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; choose a folder")
    make_folder(out)
    found = {path.name for path in out.iterdir()}
    own = {MARK, *OWN, *PLANS}
    # A demo that was killed may leave an unfinished `.data.partial-...`.
    foreign = {n for n in found - own if not n.startswith(tuple(f".{name}." for name in own))}
    if found and (foreign or MARK not in found):
        raise UserError(
            f"--out={out} holds files that are not the demo's ({sorted(foreign or found)[0]}); "
            f"choose another folder"
        )
    for name in found - {MARK}:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_text(out / MARK, "Written by `ladder demo`, which may replace what lies here.\n")


def _say(step: str, text: str) -> None:
    print(f"\n== {step}  {text}", flush=True)


def _speed(run: Path) -> float:
    """The median training speed over the run's log intervals, in tokens/s."""
    speeds = sorted(
        r["tokens_per_second"] for r in metrics.read_metrics(run) if "tokens_per_second" in r
    )
    return float(speeds[len(speeds) // 2])


@torch.no_grad()
def _heldout_logits(model: Transformer, out: Path) -> torch.Tensor:
    tokens, _, _ = next(heldout_windows(open_data(out / "data"), 128, 2, 2))
    return model(tokens)


def _run_with_tp(out: Path) -> int:
    """On each rank: compare every plan's logits with one process's, and write a sample."""
    device = launch.join("cpu")
    mesh = make_mesh(device, TP)
    assert mesh is not None
    tokenizer = load_tokenizer(out / "tokenizer")
    for plan in PLANS:
        model = load_model(newest(out / plan), mesh["tp"], device=device)
        expected = torch.load(out / plan / "logits.pt", weights_only=True)
        difference = (_heldout_logits(model, out) - expected).abs().max().item()
        prompt = tokenizer.encode(PROMPT).ids
        sampling = Sampling(temperature=0.7, top_p=0.95, seed=1)
        done = generate(model, [prompt], max_new_tokens=NEW_TOKENS, sampling=sampling)[0]
        sample = PROMPT + tokenizer.decode(done.tokens)
        if launch.rank() == 0:
            result = {"tp2_max_logit_difference": difference, "sample": sample}
            write_text(out / plan / "tp.json", json.dumps(result))
            print(f"-- {plan}\n{sample}\n", flush=True)
    return 0


HEAD = ("plan", "bits per byte", "collectives", "blocking", "tokens/s", "parameters", "TP 2 diff")


def _rows(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [
        [
            plan,
            f"{r['bits_per_byte']:.4f}",
            str(r["collectives_per_token"]),
            str(r["blocking_collectives_per_token"]),
            f"{r['tokens_per_second']:,.0f}",
            f"{r['parameters']:,}",
            f"{r['tp2_max_logit_difference']:.1e}",
        ]
        for plan, r in results.items()
    ]


def _page(
    out: Path, results: dict[str, dict[str, Any]], samples: dict[str, str], recipe: dict[str, Any]
) -> str:
    lines = {}
    for plan in results:
        records = [r for r in metrics.read_metrics(out / plan) if "loss" in r]
        losses = [r["loss"] for r in records]
        smooth = [sum(losses[i : i + SMOOTH]) / SMOOTH for i in range(len(losses) - SMOOTH + 1)]
        lines[plan] = ([r["tokens"] for r in records[SMOOTH - 1 :]], smooth)
    drawn = figures.lines(
        lines, "training tokens", f"training loss (nats per token), mean of {SMOOTH}"
    )
    parts: list[report.PagePart] = [
        report.Figure(drawn),
        report.Table(HEAD, _rows(results)),
        report.Text(
            "One model shape, one corpus (the standard library of the Python that ran this), the "
            f"same {recipe['steps']} steps of {recipe['batch_size']} x {recipe['seq_len']} tokens; "
            "only the residual plan differs. Collectives are all-reduces of the sublayers per "
            "token; those that block are waited for before another sublayer is launched. TP 2 "
            "diff: the largest difference of any held-out logit between two ranks and one process. "
            "One seed and a tiny model: differences of a few hundredths of a bit are noise."
        ),
        report.Heading("How the plans are wired"),
        *(
            report.Code(f"{plan}\n{picture(load_model(newest(out / plan)).config.plan)}")
            for plan in results
        ),
        report.Heading(f"What each wrote on {TP} ranks"),
        *(report.Code(f"# {plan}\n{sample}") for plan, sample in samples.items()),
    ]
    title = "ladder demo: one model, five residual plans"
    return report.page(title, _finding(results), parts, [facts("none")])


def _finding(results: dict[str, dict[str, Any]]) -> str:
    """The report's main result, in a sentence."""
    standard, ladder = (results[plan] for plan in ("standard", "ladder"))
    blocking = "blocking_collectives_per_token"
    return (
        f"The ladder reaches {ladder['bits_per_byte']:.3f} bits per byte, standard "
        f"{standard['bits_per_byte']:.3f}; of {ladder['collectives_per_token']} all-reduces a "
        f"token the ladder waits for {ladder[blocking]}, standard for {standard[blocking]}."
    )
