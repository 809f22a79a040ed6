"""Overlap of communication and computation: made-up kernels with known answers, and real traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder import jit
from ladder.bench import trace as tracing
from ladder.bench.inference.profile import DECODE_STEPS, profile_session
from ladder.bench.trace import (
    BOTH,
    COMMUNICATION,
    COMPUTATION,
    LANDING,
    TRANSFER,
    Kernel,
    describe_trace,
    kernel_kind,
    kernels_of,
    overlap,
    read_trace,
)
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.infer.session import Session
from ladder.models import UserError
from tests.bench.traces import on_gpu
from tests.distributed import Pools, tp_mesh
from tests.infer.engines import make

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, COMMUNICATION),
        ("_push_all_reduce", COMMUNICATION),
        ("_two_shot_all_reduce", COMMUNICATION),
        ("void c10d::symmetric_memory::one_shot_all_reduce_kernel<bf16, 16, 4>()", COMMUNICATION),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**)", COMMUNICATION),
        ("Memcpy PtoP (Device -> Device)", COMMUNICATION),
        ("Memcpy DtoH (Device -> Pinned)", TRANSFER),
        ("Memcpy DtoD (Device -> Device)", TRANSFER),
        ("Memset (Device)", TRANSFER),
        ("_send_kernel", COMMUNICATION),
        ("_land_kernel", LANDING),
        ("_land_rows_kernel", LANDING),
        ("_land_slots_kernel", LANDING),
        ("_project_kernel", BOTH),
        ("_choose_kernel", BOTH),
        ("_norm_kernel", COMPUTATION),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", COMPUTATION),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()", COMPUTATION),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>()", COMPUTATION),
    ],
)
def test_kernels_are_known_by_name(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_a_product_that_reduces_is_no_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused product counts as a computation, for any name of its kernel."""
    assert kernel_kind("_gemm_all_reduce") == COMMUNICATION  # another's, told by its name
    monkeypatch.setitem(jit.KERNELS, "_gemm_all_reduce", "both")
    found = overlap([Kernel("_gemm_all_reduce", 1, 0.0, 10.0), Kernel(NCCL, 2, 8.0, 12.0)])
    assert [(reduce.name, reduce.hidden) for reduce in found.reduces] == [(NCCL, 0.5)]
    assert found.exposed == 2.0


def test_the_hidden_part_of_each_reduce() -> None:
    """Counting two computations at once twice, or idle time as computation, fails this."""
    found = overlap(
        [
            Kernel("gemm", 1, 0.0, 10.0),
            Kernel(NCCL, 2, 8.0, 18.0),  # 2 beneath the first, 4 beneath the next two: 6 of 10
            Kernel("gemm", 1, 12.0, 16.0),
            Kernel("norm", 3, 13.0, 15.0),
            Kernel("Memcpy DtoH (Device -> Pinned)", 4, 16.0, 18.0),
            Kernel(NCCL, 2, 20.0, 24.0),  # bare
            Kernel(NCCL, 2, 30.0, 32.0),
            Kernel("gemm", 1, 29.0, 40.0),  # all of the last
        ]
    )
    assert [reduce.hidden for reduce in found.reduces] == [0.6, 0.0, 1.0]
    assert [reduce.start for reduce in found.reduces] == [8.0, 20.0, 30.0]
    assert found.communication == 16.0
    assert found.hidden == pytest.approx(8 / 16)
    assert found.exposed == 8.0
    assert found.span == 40.0
    assert found.idle == 7.0  # 18 to 20 and 24 to 29
    assert found.streams == 4
    assert found.top[:2] == (("gemm", 3, 25.0, pytest.approx(25 / 3)), (NCCL, 3, 16.0, 16 / 3))


def test_a_dependent_launch_that_waits_hides_nothing() -> None:
    """It starts under the reduce ahead of it on its stream; on other streams work is work."""
    chain = [
        Kernel("gemm", 1, 0.0, 10.0),
        Kernel("_push_all_reduce", 1, 7.0, 14.0),  # waits until 10
        Kernel("_norm_kernel", 1, 9.0, 15.0),  # launched at 9, waits until 14
    ]
    found = overlap(chain)
    assert found.reduces == (tracing.Reduce("_push_all_reduce", 10.0, 4.0, 0.0),)
    assert found.exposed == 4.0
    assert {name: total for name, _, total, _ in found.top}["_norm_kernel"] == 1.0
    beside = overlap([*chain[:2], chain[2]._replace(stream=2)])
    assert beside.reduces[0].hidden == 1.0


def test_fused_communication_is_reported_as_what_it_is() -> None:
    """A plan without a reduce kernel must not be said to hide all of it, nor none."""
    fused = overlap(
        [
            Kernel("_project_kernel", 1, 0.0, 10.0),
            Kernel("_land_kernel", 1, 5.0, 13.0),
            Kernel("_project_kernel", 1, 6.0, 20.0),
        ]
    )
    assert (fused.reduces, fused.landing, fused.exposed) == ((), 3.0, 3.0)
    text = describe_trace("decode", fused, steps=2)
    assert "communication kernels: none" in text
    assert "landing kernels 1.5 us" in text
    assert "hidden" not in text
    assert "under computation" not in text


def test_two_reduces_at_once_are_exposed_once() -> None:
    found = overlap([Kernel(NCCL, 1, 0.0, 10.0), Kernel("_push_all_reduce", 2, 5.0, 12.0)])
    assert (found.communication, found.exposed, found.hidden) == (17.0, 12.0, 0.0)


def test_nothing_at_all() -> None:
    found = overlap([])
    assert (found.span, found.idle, found.reduces, found.top) == (0.0, 0.0, (), ())


def test_the_lines_give_figures_per_step() -> None:
    found = overlap(
        [Kernel("gemm", 1, 0.0, 80.0), Kernel(NCCL, 2, 0.0, 40.0), Kernel(NCCL, 2, 60.0, 100.0)]
    )
    lines = describe_trace("decode", found, steps=4).splitlines()
    assert lines[0] == "decode: 25.0 us a step (mean of 4), GPU idle 0.0 us, 2 streams"
    assert "0.5 communication kernels, 20.0 us, 75% of it under computation" in lines[1]
    assert "median 75%, least 50%, most 100%); exposed 5.0 us" in lines[1]
    assert [line.split()[-3:] for line in lines[3:]] == [
        ["0.5", "20.0", "40.00"],
        ["0.25", "20.0", "80.00"],
    ]


def with_kernels(file: Path) -> None:
    """Put kernels into a CPU's trace: two in each phase, and some that are in none."""
    data = json.loads(gzip.decompress(file.read_bytes()))
    for event in list(data["traceEvents"]):
        if event.get("cat") == "user_annotation" and event["name"] in ("prefill", "decode"):
            at = event["ts"]
            data["traceEvents"] += [
                on_gpu("gemm", 7, at + 10, at + 30),
                on_gpu("_push_all_reduce", 13, at + 20, at + 40),
                on_gpu("Memset (Device)", 7, at + 40, at + 41, "gpu_memset"),
                on_gpu("gemm", 7, at - 50, at - 10),
                on_gpu("decode", 7, at + 10, at + 50, "gpu_user_annotation"),
            ]
    file.write_bytes(gzip.compress(json.dumps(data).encode()))


def session_for(model: Any) -> tuple[Session, list[list[int]], torch.Tensor]:
    prompts = [[3, 4, 5], [6]]
    return Engine(model).session(2, 20, Sampling()), prompts, draws(Sampling(), 2, 20)


def test_a_real_trace(tmp_path: Path) -> None:
    """Phases that are taken from the warm-up, or kernels from beyond them, fail this."""
    session, prompts, uniforms = session_for(make("ladder", None))
    calls: list[str] = []
    originals = session.prefill, session.step
    session.prefill = lambda *a: (calls.append("prefill"), originals[0](*a))[1]  # type: ignore
    session.step = lambda: (calls.append("step"), originals[1]())[1]  # type: ignore
    file = tmp_path / "trace.json.gz"
    with pytest.raises(UserError, match="no GPU kernels in"):
        profile_session(session, prompts, uniforms, file)
    assert calls == 2 * (["prefill"] + DECODE_STEPS * ["step"])
    trace = read_trace(file)
    assert kernels_of(trace, "prefill") == kernels_of(trace, "decode") == []
    inside = [e for e in trace if e.get("cat") == "cpu_op" and "attention" in e["name"]]
    assert len(inside) > 0, "the trace holds no computation"
    with_kernels(file)
    for phase in ("prefill", "decode"):
        found = overlap(kernels_of(read_trace(file), phase))
        assert found.span == pytest.approx(31.0)
        assert [r.hidden for r in found.reduces] == [pytest.approx(0.5)]


@pytest.mark.parametrize("new", [2, 3])
def test_a_trace_has_no_more_steps_than_new_tokens(new: int, tmp_path: Path) -> None:
    """The cache of a session of `new` tokens may be full after one step less."""
    session = Engine(make("ladder", None)).session(2, 20, Sampling())
    steps: list[int] = []
    session.step = lambda: steps.append(1)
    with pytest.raises(UserError, match="no GPU kernels in"):
        profile_session(session, [[3], [6]], draws(Sampling(), 2, new), tmp_path / "t.json.gz")
    assert len(steps) == 2 * (new - 1)


def test_the_report_and_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tracing.record_trace

    def recorded(*args: Any) -> None:
        record(*args)
        with_kernels(args[2])

    monkeypatch.setattr(tracing, "record_trace", recorded)
    out = tmp_path / "new" / "ladder-push.json.gz"
    text = profile_session(*session_for(make("ladder", None)), out)
    assert text.startswith(f"trace: {out}\nprefill: 31.0 us, GPU idle 0.0 us, 2 streams\n")
    assert "decode: 7.8 us a step (mean of 4)" in text
    figures = json.loads((out.parent / "ladder-push.figures.json").read_text())
    assert figures["decode"]["steps"] == DECODE_STEPS
    assert figures["prefill"]["reduces"][0]["hidden"] == pytest.approx(0.5)


def on_rank(rank: int, world: int, folder: str) -> str:
    session, prompts, uniforms = session_for(make("ladder", None, tp_mesh(world)))
    try:
        return profile_session(session, prompts, uniforms, Path(folder) / f"{rank}.json.gz")
    except UserError as error:
        return str(error)


def test_rank_0_alone_writes(pools: Pools, tmp_path: Path) -> None:
    """A rank that leaves a collective out would hang the others here."""
    first, second = pools(2).run(on_rank, str(tmp_path))
    assert "no GPU kernels" in first
    assert second == ""
    assert [file.name for file in tmp_path.iterdir()] == ["0.json.gz"]
