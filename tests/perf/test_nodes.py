"""Training steps over several nodes, by declared links: closed forms, and properties."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main, make_parser
from ladder.config import model_config
from ladder.costs import BF16, FP32
from ladder.models import UserError
from ladder.perf import nodes, training_phase
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.cost_training import TrainingCost
from ladder.perf.graph import COPIES, DATA, training
from ladder.perf.machine import BETWEEN_GPUS, Estimate, Link
from ladder.perf.machine_files import load as load_measured
from ladder.perf.machine_files import shipped, write
from ladder.perf.memory import local_parameters
from ladder.perf.nodes import (
    BEST,
    WORST,
    for_degree,
    group,
    links_of,
    load,
    names,
    relatives,
    without_peers,
)
from ladder.perf.scale.tables import NVLINK, reduces
from ladder.perf.training_phase import training_shape

Out = pytest.CaptureFixture[str]
SHAPE = model_config("llama-3-8b")
NODE = load("h200x8")


def data_parallel(layout: str, nodes: int) -> dict[str, float]:
    """Seconds of what a layer's weights and gradients take between ranks, and between copies."""
    shape = training_shape(SHAPE, 8 * nodes, layout, 1, 1024, "none", nodes)
    cost = TrainingCost(SHAPE, NODE, shape, False, False)
    hsdp = 1 < shape.shards < shape.replicas
    gradients = "ddp" if shape.shards == 1 else "hsdp" if hsdp else "fsdp"
    style = "sharded" if shape.sequence_parallel else "alone"
    found = training(SHAPE.plan, style, gradients).operations
    return {
        each.part if each.stream == DATA else "copies": 1e-6 * cost(each)
        for each in found
        if each.stream in (DATA, COPIES)
    }


def test_collectives_are_those_of_their_groups() -> None:
    """Shards lie next to each other, in a node as far as they fit; copies have one of each."""
    links = links_of(NODE)
    for layout, tp, shards, copies in (
        ("ddp", 1, None, group(links, 8, 4)),
        ("fsdp", 1, group(links, 8, 4), None),
        ("hsdp8", 1, group(links, 8, 1), group(links, 1, 4)),
        ("hsdp2", 1, group(links, 2, 1), group(links, 4, 4)),
        ("hsdp16", 1, group(links, 8, 2), group(links, 1, 2)),
        ("tp4+sp+fsdp", 4, group(links, 2, 4), None),
        ("tp4+sp+hsdp2", 4, group(links, 2, 1), group(links, 1, 4)),
        ("tp8+sp+fsdp", 8, group(links, 1, 4), None),
    ):
        layer = local_parameters(SHAPE, tp) / SHAPE.num_layers
        gather = 0.0 if shards is None else shards.gather(BF16 * layer)
        found = data_parallel(layout, 4)
        assert found.get("weights", 0.0) == pytest.approx(gather), layout
        if shards is None:
            assert copies is not None
            assert found["gradients"] == pytest.approx(copies.all_reduce(FP32 * layer)), layout
            continue
        assert found["gradients"] == pytest.approx(shards.gather(FP32 * layer)), layout
        between = copies.all_reduce(FP32 * layer / shards.ranks) if copies else 0.0
        assert found.get("copies", 0.0) == pytest.approx(between), layout


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp8", "tp4+sp+fsdp"])
def test_steps_grow_with_nodes_and_with_slower_links(layout: str) -> None:
    def us(nodes: int, doubt: Any = None) -> float:
        more = {} if doubt is None else {"doubt": doubt}
        return training_phase.train(SHAPE, NODE, layout, 4096, 1, nodes=nodes, **more).us

    steps = [us(nodes) for nodes in (2, 4, 16, 64)]
    assert steps == sorted(steps)
    assert us(4, BEST) <= us(4) <= us(4, WORST)


def test_a_declared_machine_has_what_its_gpu_was_measured_with() -> None:
    four = load_measured("h200x4")
    apart, more = ("h200x2-no-p2p", "h200x4-no-p2p"), ("h100x4", "h100x8")
    assert names() == (*more, *apart, "h200x8")
    assert NODE.gpus == 8
    assert NODE.curve("product", rows=1) == four.curve("product", rows=1)
    assert load("h200x4") == four
    with pytest.raises(UserError, match=r"unknown machine 'h100x3'.*h100x8.*h200x8, or the path"):
        load("h100x3")


@pytest.mark.parametrize("algorithm", ["nccl", "push", "two-shot"])
def test_all_reduces_of_more_ranks_continue_those_of_fewer(algorithm: str) -> None:
    """Of n = 2, 4, 8 GPUs a ring moves 1, 3/2, 7/4 of a message's bytes, and its steps, as what a
    push sends, go with n - 1 = 1, 3, 7."""
    two, four = (
        load_measured(name).curve("all-reduce", algorithm=algorithm)
        for name in ("h200x2", "h200x4")
    )
    found, before = NODE.curve("all-reduce", algorithm=algorithm), 0.0
    rates = [0.0, 0.0]
    if algorithm != "push":
        ends = [each.points[-2:] for each in (two, four)]
        rates = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in ends]
    assert len(found.points) >= 10
    for size, us in found.points:
        low, high = two.at(size).us - rates[0] * size, four.at(size).us - rates[1] * size
        steps = max(high, 3 * high - 2 * low)
        assert us == pytest.approx(max(before, steps + 7 / 6 * rates[1] * size), abs=1e-3)
        assert us >= four.at(size).us
        assert found.at(size).basis == "extrapolated"  # though it is a point of the curve
        before = us


def test_all_reduces_of_eight_are_those_of_ladder_residuals_rows() -> None:
    """Set so that its standard is as far from its rows without communication as published. That of
    16 MiB is its prompt's with NVLink, which its own logs do not confirm (docs/results)."""
    published = reduces(NVLINK)
    ours = load("h100x8").curve("all-reduce", algorithm="nccl")
    sizes = [size for size, _ in published.points if size != 2**24]
    assert len(sizes) == 4
    for size in sizes:
        assert ours.at(size).us == pytest.approx(published.at(size).us, rel=0.10), size


@pytest.fixture
def one_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no more than one had been measured."""
    known = [name for name in shipped() if name != "h100x2"]
    monkeypatch.setattr(nodes, "shipped", lambda: known)
    for each in (nodes.declared, nodes._loaded):
        each.cache_clear()
    yield
    for each in (nodes.declared, nodes._loaded):
        each.cache_clear()


@pytest.mark.usefixtures("one_h100")
def test_several_h100s_are_one_as_measured_and_links_as_of_h200s() -> None:
    """Only what an exchange moves in a GPU's memory takes longer there."""
    one = load_measured("h100x1")
    for ranks in (2, 4):
        several, other = load(f"h100x{ranks}"), load_measured(f"h200x{ranks}")
        assert several.gpus == ranks
        assert several.gpu == one.gpu
        for name in one.values:
            assert several.values[name] == one.values[name], name
        for name in ("product", "attention", "landing", "copy", "matrix", "more rows"):
            assert several.family(name) == one.family(name), name
        for name in ("push_kernel_us", "rank_spread", "product_beside_nccl"):
            assert several.value(name) == other.value(name), name
        between = [each for each in several.curves if each.name in BETWEEN_GPUS]
        assert {each.name for each in between} >= {"all-reduce", "peer copy"}
        assert all(each.provenance.startswith("declared") for each in between)
        push = [each.curve("all-reduce", algorithm="push").points for each in (several, other)]
        assert push[0] == push[1]
    degrees = {each.gpus for each in relatives(load("h100x4"))}
    assert degrees == {1, 2, 4}, "no more GPUs than the machine has"
    assert for_degree(load("h100x8"), 4).gpu == "NVIDIA H100 80GB HBM3"
    found = []
    for each in (load("h100x2"), load_measured("h200x2")):
        cost = PromptCost(SHAPE, each, 2, 1, 1024)
        rows = cost.exchange("copy-kernels", 5)
        assert rows is not None
        found.append(rows.us + cost.gap)  # of the landing that was taken away
    assert found[0] == pytest.approx(found[1]), "between GPUs nothing is faster"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100x4", "what is between GPUs as of h200x4, which has the same links."),
        (
            "h200x8",
            "all-reduces and exchanges as extrapolated from those of h200x2 and h200x4; copies to "
            "a peer as of h200x4.",
        ),
        (
            "h100x8",
            "all-reduces and exchanges as extrapolated from those of h200x2 and h200x4; copies to "
            "a peer as of h200x4; what else is between GPUs as of h200x4, which has the same "
            "links.",
        ),
        ("h200x4-no-p2p", "collectives as rings over the links of h200x4-no-p2p."),
        ("h200x4", ""),
    ],
)
def test_what_is_declared_is_said(name: str, said: str, capsys: Out) -> None:
    where = f"Declared, not measured, of machine '{name}': {said}"
    for words in (["llama-3-8b", "--plans", "standard"], ["ops", "--m", "1024"]):
        assert main(["predict", *words, "--machine", name]) == 0
        found = " ".join(capsys.readouterr().out.split())
        assert (where in found) == bool(said)
        assert ("Declared, not measured" in found) == bool(said)


def test_what_is_borrowed_is_said_where_it_is_used(capsys: Out) -> None:
    """`training_bytes` of another machine are no fit of this one's, and of training alone."""
    words = ["quarter-8b", "--plans", "standard", "--batch", "1"]
    for name, between in (
        ("h100x1", ""),
        ("h100x4", "what is between GPUs as of h200x4, which has the same links; "),
    ):
        where = f"Declared, not measured, of machine '{name}': "
        train = ["predict", *words, "--machine", name, "--train", "--layouts", "fsdp"]
        assert main(train) == 0
        found = " ".join(capsys.readouterr().out.split())
        assert f"{where}{between}training_bytes as of h100x2." in found
        assert f" 3 values of machine '{name}' are fitted to records" in found
        assert main([*train, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert any("training_bytes as of h100x2" in each for each in row["provenance"])
        assert main(["predict", *words, "--machine", name]) == 0
        assert "training_bytes" not in capsys.readouterr().out


def test_links_are_declared_of_kinds_of_gpus() -> None:
    other = replace(load_measured("h200x4"), gpu="NVIDIA B200")
    said = r"known are those of NVIDIA H100 80GB HBM3, NVIDIA H200$"
    with pytest.raises(UserError, match=said):
        links_of(other)


def test_a_link_of_the_machines_own_file_counts() -> None:
    slow = Link("InfiniBand", 14.0, 10.0, "measured: by hand")
    mine = replace(load_measured("h200x4"), links=(*load_measured("h200x4").links, slow))
    assert slow in links_of(mine)
    assert {each.tier for each in links_of(mine)} == {"InfiniBand", "NVLink"}
    one, other = (
        training_phase.train(SHAPE, each, "fsdp", 4096, 1, nodes=2).us
        for each in (load_measured("h200x4"), mine)
    )
    assert other > one


def test_the_planner_joins_nodes(capsys: Out) -> None:
    words = ["llama-3-8b", "--machine", "h200x8", "--train", "--batch", "2", "--nodes"]
    assert main(["predict", *words, "4", "--plans", "standard", "ladder", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 32
    rows = {(row["plan"], row["way"]): row for row in found["rows"]}
    assert {way for _, way in rows} >= {"fsdp", "hsdp8", "tp4+sp+fsdp", "tp4+sp+hsdp2"}
    for row in rows.values():
        assert (row["basis"], row["far"]) == ("extrapolated", True)
        assert row["low_us"] < row["us"] < row["high_us"]
        assert "links of declared nodes" in row["interval"]
        tokens = 32 // row["tp"] * 2 * 1024
        assert row["tokens_s"] == pytest.approx(tokens / row["us"] * 1e6)
    assert rows["ladder", "tp8+sp+fsdp"]["us"] < rows["standard", "tp8+sp+fsdp"]["us"]
    command = shlex.split(found["command"])
    start = command.index("-m") + 2
    assert command[:start] == shlex.split(
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        "-m ladder"
    )
    assert make_parser().parse_args(command[start:]).nproc == 1
    assert main(["predict", *words, "4", "--plans", "standard", "--layouts", "fsdp"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rings over declared links, which nobody has measured" in said
    assert "on 4 x h200x8 (32 x NVIDIA H200)" in said


def test_decoding_on_a_declared_machine_is_extrapolated(capsys: Out) -> None:
    words = ["llama-3-70b", "--machine", "h200x8", "--tp", "8", "--plans", "standard", "ladder"]
    assert main(["predict", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {(row["way"], row["basis"]) for row in found["rows"]}
    assert ways == {("async", "extrapolated"), ("push", "extrapolated")}
    assert all(row["far"] for row in found["rows"])


def test_gpus_without_access_to_each_other_reduce_through_the_host(capsys: Out) -> None:
    """By rings over the declared link, two by what was measured, and never by NVLink's curves."""
    apart = load("h200x4-no-p2p")
    assert without_peers(apart)
    assert not any(map(without_peers, (load("h200x4"), load("h200x1"), NODE)))
    curve = apart.curve("all-reduce", algorithm="nccl")
    step, rate = 5.7, 20e3  # us, bytes a us
    for size, us in curve.points:
        assert us == pytest.approx(8.4 + 2 * (3 * step + size * 3 / 4 / rate))
    two = for_degree(apart, 2).curve("all-reduce", algorithm="nccl")
    assert two.at(2.0**20) == Estimate(65.3, "extrapolated")  # on another host
    rings = for_degree(apart, 2).curve("reduce-scatter", algorithm="nccl")  # was not measured
    assert rings.at(2.0**20).us == pytest.approx(8.4 + step + 2.0**20 / 2 / rate)
    measured = replace(load("h200x4"), links=(), curves=tuple(
        each for each in load("h200x4").curves if each.where.get("algorithm") != "push"
    ))  # fmt: skip
    assert for_degree(measured, 2).curve("all-reduce", algorithm="nccl") == two
    words = ["llama-3-8b", "--machine", "h200x4-no-p2p", "--plans", "standard", "accumulate-4x"]
    assert main(["predict", *words, "--tp", "2", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["tp"], row["way"]) for row in found["rows"]} == {(2, "async"), (4, "async")}
    assert found["recommended"]["plan"] == "accumulate-4x"
    assert "--p2p off" in found["command"]
    assert main(["predict", *words[:3], "--train", "--layouts", "fsdp", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["command"]
    assert said.startswith("env NCCL_P2P_DISABLE=1 ladder bench train")
    assert main(["predict", *words[:3], "--train", "--nodes", "2"]) == 2
    assert "several nodes of such are not predicted" in capsys.readouterr().err


def test_records_are_of_machines_with_access_to_peers_or_without(capsys: Out) -> None:
    record = "benchmarks/results/2026-11-22-rare-reduces-half-8b-h200x2.jsonl"
    assert main(["predict", "validate", record, "--machine", "h200x2-no-p2p", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["phase"] == "decode"]
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
    assert len(rows) == 24
    assert sum(errors) / len(errors) < 0.05
    assert main(["predict", "validate", record]) == 2
    assert "24 without access to peers' memory" in capsys.readouterr().err


def test_prompts_with_sums_in_8_bits(capsys: Out) -> None:
    """As measured on two GPUs that reach each other by the host: what 8 bits save, and how long."""
    record = Path("benchmarks/results/2026-11-30-eight-bits-no-p2p-h200x2.jsonl")
    measured: dict[tuple[str, str, int], float] = {}
    for each in map(json.loads, record.read_text().splitlines()):
        point = each["point"]
        if not point["no_comm"]:
            key = point["plan"], point["reducer"], point["batch"]
            measured[key] = each["result"]["prefill_ms"]
    words = ["half-8b", "--machine", "h200x2-no-p2p", "--prefill", "--batch", "1", "16", "64"]
    words += ["--tp", "2", "--reducers", "async", "async-int8", "--json", "--plans"]
    assert main(["predict", *words, "standard", "ladder", "desync-2x"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["plan"], row["way"], row["batch"]): row["us"] / 1e3 for row in found["rows"]}
    for plan, most in (("standard", 0.05), ("ladder", 0.16)):
        for batch in (1, 16, 64):
            one, small = ((plan, way, batch) for way in ("async", "async-int8"))
            assert rows[small] == pytest.approx(measured[small], rel=most)
            saved = rows[one] / rows[small]
            assert saved == pytest.approx(measured[one] / measured[small], rel=0.05)
    assert ("desync-2x", "async-int8", 16) not in rows
    held = {(row["plan"], row["way"], row["batch"]): row["memory_gib"] for row in found["rows"]}
    more = held["standard", "async-int8", 16] - held["standard", "async", 16]
    assert more == pytest.approx(5.41 - 5.09, abs=0.02)  # as the record has it
    assert any("desync-2x at TP 2: not by async-int8 (some sub" in x for x in found["left_out"])
    assert found["command"].endswith("--nproc 2")
    assert "--reducers async-int8 " in found["command"]
    assert main(["predict", *words, "none"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["way"] for row in found["rows"]} == {"async"}  # there is nothing to round
    assert main(["predict", "half-8b", "--reducers", "async-int8"]) == 2
    error = capsys.readouterr().err
    assert "--reducers async-int8 is of prompts: decode steps run as with async; give" in error


def test_of_more_ranks_sums_in_8_bits_are_exchanged_twice() -> None:
    """An all-to-all and a gather, each of all rows once: half the bytes of an all-reduce."""
    config, machine = model_config("llama-3-8b"), load("h200x4-no-p2p")
    costs = [PromptCost(config, for_degree(machine, tp), tp, 64, 1024) for tp in (2, 4)]
    for cost in costs:
        gather = cost.machine.nccl("all-gather", 2 * 65536 * 4112 / (2 if cost.tp > 2 else 1)).us
        found = cost.rounded(65536).us / ((2 if cost.tp > 2 else 1) * gather)
        assert 1 < found < 1.05
        whole = cost.machine.nccl("all-reduce", 65536 * 8192).us
        assert 0.45 < cost.rounded(65536).us / whole < 0.6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layouts", "tp8+sp+fsdp"), "on nodes of 4 GPUs: a group of TP lies within a node"),
        (("--layouts", "hsdp6", "--nodes", "3"), "6 shards neither fill nodes nor divide one"),
        (("--nodes", "64", "--jitter", "5"), "at most 64 ranks are simulated; lower --nodes"),
        (("--machine", "OTHER"), "nothing is declared of links between nodes of another GPU"),
    ],
)
def test_what_nodes_cannot_do_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: Out
) -> None:
    write(replace(load_measured("h200x4"), gpu="another GPU"), tmp_path / "other.json")
    given = [str(tmp_path / "other.json") if each == "OTHER" else each for each in words]
    head = ["predict", "llama-3-8b", "--train", "--batch", "1", "--nodes", "4", "--plans"]
    assert main([*head, "standard", *given]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1
