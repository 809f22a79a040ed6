"""Every kernel compiled for GPUs of compute capability 9.0, on any machine.

`python -m tests.kernels.compiled` prints a JSON object: `kinds`, of each kernel; `ptx`, of each
launch here, called "kernel: case", that of docs/primitives.md too; `primitives`, of the kernels of
tests.primitives; `made`, the shared memory and the spills of these and of hot decode steps
(tests.kernels.steps); `unread`, what no launch has compiled of the package's Triton functions;
`defaults`, those that some versions of Triton do not take. --everything: more steps, all to machine
code, and none of the launches here. --few: `kinds`, `ptx` of FEW and `primitives` alone.

It is a process of its own, as tests import the kernels for Triton's interpreter. A new kernel needs
a launch here or in tests.kernels.steps, and so does each side of what is decided when a kernel is
compiled.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ladder.models.storage import QUANTISED, scale_dtype, scale_shape
from tests import ROOT, pages

if TYPE_CHECKING:
    from tests.kernels.standin import Gpu

BF16, FP32 = torch.bfloat16, torch.float32
WORLD, RANK, ROWS, SIZE = 4, 1, 1, 4096
# What `make test` compiles: a launch of most kinds, which takes a twentieth of the time of all.
FEW = (
    "_gemm_kernel: waiting", "_land_slots_kernel: waiting", "_push_rows_kernel: bfloat16",
    "_receive_rows_kernel: bfloat16", "_project_kernel: 8 rows, any weight",
    "_choose_kernel: bfloat16",
)  # fmt: skip


def launches() -> list[tuple[str, Any, tuple, dict[str, Any]]]:
    """(case, kernel, arguments, constants and options) of a call of everything that launches."""
    from ladder import kernels
    from ladder.bench.trace import all_kernels
    from ladder.comm import push, symmetric, two_shot
    from ladder.kernels import (
        choice,
        clock,
        collect,
        decode_shapes,
        eight_bits,
        gemm,
        messages,
        push_land,
    )
    from ladder.kernels import slots as slots_module
    from ladder.kernels.limits import CHUNK

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pages.write_files(pages.parse((ROOT / "docs" / "primitives.md").read_text("utf-8")))
        with mock.patch.object(sys, "path", [folder, *sys.path]):
            page = importlib.import_module("matmul_reduce_scatter")
    all_kernels()  # one without a case is to be seen
    found: list[tuple[str, Any, tuple, dict[str, Any]]] = []
    case = ""

    def cases(name: str) -> None:
        nonlocal case
        case = name

    def launch(kernel: Any, grid: Any, device: Any, *args: Any, dependent: bool = True,
               **meta: Any) -> None:  # fmt: skip
        pdl = {"PDL": dependent, "launch_pdl": dependent}
        found.append((case, kernel, args, meta | pdl))

    def allocate(shape: Any, dtype: Any, *_: Any, **__: Any) -> symmetric.SymmetricTensor:
        parts = [torch.zeros(shape, dtype=dtype)] * WORLD
        return symmetric.SymmetricTensor(RANK, parts, buffers)

    group: Any = SimpleNamespace()
    device = torch.device("cpu")
    buffers = torch.zeros(WORLD, dtype=torch.int64)
    with contextlib.ExitStack() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith(("ladder.kernels.", "ladder.comm.")) or module is page:
                for attribute, stand_in in (("launch", launch), ("on_triton", lambda _: True)):
                    if hasattr(module, attribute):
                        patched.enter_context(mock.patch.object(module, attribute, stand_in))
        patched.enter_context(mock.patch.object(symmetric, "allocate", allocate))
        patched.enter_context(mock.patch("torch.distributed.get_rank", return_value=RANK))
        patched.enter_context(mock.patch("torch.distributed.get_world_size", return_value=WORLD))
        for dtype in (BF16, FP32):
            case = str(dtype).removeprefix("torch.")
            x = torch.zeros(ROWS, SIZE, dtype=dtype)
            slots = torch.zeros(WORLD, ROWS, SIZE, dtype=dtype)
            target = kernels.PushTarget(buffers, WORLD * ROWS * SIZE, RANK, WORLD)
            kernels.land(kernels.new_landing(x, sums=[slots]))
            kernels.send(kernels.SendJob(x, target))
            push.PushAllReduce(SIZE, dtype, group, device)(x, False)
            all_shots(two_shot.TwoShotAllReduce(2**20, group, device), x, cases)
            cases(str(dtype).removeprefix("torch."))
            collect.Collector(ROWS * SIZE, dtype, group, device)(ROWS, SIZE)
            rows = torch.zeros(2 * WORLD, SIZE, dtype=dtype)
            for name, count in (("scattered", 2), ("everywhere", 2 * WORLD)):
                cases(f"{str(dtype).removeprefix('torch.')}, {name}")
                lands = push_land.PushedLanding(rows.numel(), dtype, group, device)
                some, gain = rows[:count], rows[0]
                lands(rows, some, gain, 1e-5, (some, some))
        case, halves = "float16", torch.zeros(ROWS, SIZE, dtype=torch.float16)
        push.PushAllReduce(SIZE, halves.dtype, group, device)(halves, False)
        all_shots(two_shot.TwoShotAllReduce(2**20, group, device), halves, cases)
        cases("float16")
        collect.Collector(ROWS * SIZE, halves.dtype, group, device)(ROWS, SIZE)
        for rows in (1, 8):  # without tensor cores and with them
            case = f"{rows} rows"
            x, h = (torch.zeros(rows, size, dtype=BF16) for size in (SIZE, SIZE // WORLD))
            weight = torch.zeros(SIZE, SIZE // WORLD, dtype=BF16)
            target = kernels.PushTarget(buffers, WORLD * rows * SIZE, RANK, WORLD)
            kernels.project(h, weight, push=target, keep=False)
            case = f"{rows} rows, any weight"
            kernels.project(h, weight, push=target, keep=False, fixed=False)
            case, parts = f"{rows} rows, of a norm", torch.zeros(rows, SIZE // CHUNK)
            kernels.project(x, weight.view(-1, SIZE), squares=parts, eps=1e-5)
            case, cut = f"{rows} rows, cut as 8 bits", decode_shapes.blocks
            with mock.patch.object(decode_shapes, "blocks", lambda *a, b=cut, **_: b(*a[:5], True)):
                kernels.project(h, weight, push=target, keep=False)
            for kind, dtype in QUANTISED.items():
                case = f"{rows} rows, {kind}"
                stored = weight.to(dtype)
                scales = torch.zeros(scale_shape(kind, stored.shape), dtype=scale_dtype(kind))
                kernels.project(h, stored, push=target, keep=False, scales=(scales, None))
                case += ", gated"
                kernels.project(h, stored, stored, scales=(scales, scales))
        case, h = "40 rows, fp8-block", torch.zeros(40, SIZE // WORLD, dtype=BF16)
        stored = torch.zeros(SIZE, SIZE // WORLD, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(scale_shape("fp8-block", stored.shape), dtype=torch.uint8)
        kernels.project(h, stored, scales=(scales, None))
        # Not in pieces, as on GPUs other than Hopper; x and the squares of 8 rows, from above.
        case, stored = "8 rows, of a norm, fp8-block", stored.view(-1, SIZE)
        scales = torch.zeros(scale_shape("fp8-block", stored.shape), dtype=torch.uint8)
        kernels.project(x, stored, squares=parts, eps=1e-5, scales=(scales, None))
        for kind, dtype in QUANTISED.items():
            case = kind
            stored = torch.zeros(SIZE, SIZE, dtype=torch.int8).view(dtype)
            scales = torch.zeros(scale_shape(kind, stored.shape), dtype=scale_dtype(kind))
            eight_bits.unpack(stored, scales, BF16)
            if kind != "fp8-block":
                row = torch.zeros(ROWS, SIZE, dtype=BF16)
                message = messages.pack(row, kind, ROWS)
                messages.sum_messages(row, torch.stack([message] * WORLD), RANK, kind)
                messages.unpack(message.expand(WORLD, -1, -1), kind, SIZE, BF16)
        case = "bfloat16"
        eight_bits.round_rows(torch.zeros(ROWS, SIZE, dtype=BF16))
        x, weight = torch.zeros(WORLD * 128, 64, dtype=BF16), torch.zeros(64, 256, dtype=BF16)
        page.MatmulReduceScatter(128, 256, BF16, group, device)(x, weight)
        tokens = [torch.zeros(ROWS, dtype=torch.int64) for _ in range(3)]
        choice.embed(tokens[0], torch.zeros(64, SIZE, dtype=BF16), 0, 64)
        logits = torch.zeros(ROWS, 2048, dtype=BF16)
        choice.GreedyChoice(ROWS, RANK, WORLD, group, device)(logits, 0, *tokens, 7)
        x, gain = torch.zeros(32, SIZE, dtype=BF16), torch.zeros(SIZE, dtype=BF16)
        kernels.add_rms_norm(x, [(x, 1.0), (x[:1].clone(), 1.0)], gain, 1e-5)
        kernels.add_rms_norm(x, [], gain.repeat(4, 1), 1e-5)
        kernels.land_rows([x] * WORLD, x, gain, 1e-5, (x, x), [x] * (WORLD - 1))
        kernels.swiglu(x)
        heads, table = torch.zeros(2, 16, 4 * 64, dtype=BF16), torch.zeros(64, 64)
        keys, values = torch.zeros(2, 2, 1, 64, 64, dtype=BF16)
        kernels.rotary_prompt(heads, table, keys, values, 2, 1)
        arrived = torch.zeros(2, dtype=torch.int32)
        positions = torch.zeros(2, dtype=torch.int64)
        kernels.decode_attention(heads[:, 0].contiguous(), table, positions, keys, values, 2, 1.0,
                                 arrived)  # fmt: skip
        case = "a cache in fp8"
        cache = torch.zeros(2, 2, 1, 64, 64, dtype=torch.float8_e4m3fn)
        exponents = tuple(torch.zeros(2, 2, 1, 64, dtype=torch.uint8))
        kernels.rotary_prompt(heads, table, *cache, 2, 1, exponents=exponents)
        kernels.decode_attention(heads[:, 0].contiguous(), table, positions, *cache, 2, 1.0,
                                 arrived, exponents=exponents)  # fmt: skip
        case, cache = "a cache in fp8, not in pairs", cache[..., :48].contiguous()
        kernels.decode_attention(torch.zeros(2, 4 * 48, dtype=BF16), torch.zeros(64, 48), positions,
                                 *cache, 2, 1.0, arrived, exponents=exponents)  # fmt: skip
        m, n, k = WORLD * 256, 512, 256
        order, table = torch.zeros(32, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        track = gemm.Track(order, order, order, table, buffers, buffers)
        pieces = slots_module.SlotArrivals(table, torch.zeros(2, WORLD, dtype=torch.int32), 128)
        whole = torch.zeros(m, n, dtype=BF16)
        slots = whole.view(WORLD, -1, n)
        summed = {
            average: gemm.Addition(slots[0], slots, pieces, RANK, average)
            for average in (False, True)
        }
        straight = torch.zeros(n, k, dtype=BF16).t()
        for case, extras, weight in (  # noqa: B007  (`launch` reads it)
            ("plain", {}, straight),
            ("plain, [K, N]", {}, torch.zeros(k, n, dtype=BF16)),
            ("plain, without TMA", {}, torch.zeros(n, k + 1, dtype=BF16).t()[:k]),
            ("waiting", {"arrivals": gemm.Arrivals(table, RANK)}, straight),
            ("tracking", {"track": track}, straight),
            ("summing", {"track": track, "addition": summed[False]}, straight),
            ("averaging", {"track": track, "addition": summed[True]}, straight),
            ("with an addend", {"track": track, "addition": summed[False], "addend": whole},
             straight),
        ):  # fmt: skip
            x = torch.zeros(m, k, dtype=BF16)
            gemm.gemm(x, weight, order[: (m // 128) * (n // 256)], shards=WORLD, **extras)
        case = "summing, ragged"
        odd, some = slots_module.SlotArrivals(table, table.view(2, WORLD), 128), n - 8
        cut = whole.view(-1)[: m * some].view(WORLD, -1, some)
        addition = gemm.Addition(cut[0], cut, odd, RANK)
        gemm.gemm(x, straight[:, :some], order[:16], shards=WORLD, track=track, addition=addition)
        case = "an average of three ranks"
        addition = gemm.Addition(slots[0], slots[:3], pieces, RANK, True)
        gemm.gemm(x[: 3 * 256], straight, order[:12], shards=3, track=track, addition=addition)
        for average in (False, True):
            case = "average" if average else "sum"
            gathered = torch.zeros(WORLD, ROWS, SIZE, dtype=BF16)
            slots_module.sum_slots(gathered, torch.zeros(ROWS, SIZE, dtype=BF16), average)
        case, own = "sum with the own part", (RANK, torch.zeros(ROWS, SIZE, dtype=BF16))
        slots_module.sum_slots(gathered, torch.zeros(ROWS, SIZE, dtype=BF16), own=own)
        waits = slots_module.SlotArrivals(arrived, torch.zeros(2, WORLD, dtype=torch.int32), 128)
        for case, arrivals in (("there", None), ("waiting", waits)):  # noqa: B007
            gathered = torch.zeros(WORLD, ROWS, SIZE, dtype=BF16)
            made = [torch.zeros(ROWS, SIZE, dtype=BF16) for _ in range(3)]
            gain = torch.zeros(SIZE, dtype=BF16)
            slots_module.land_slots(gathered, made[0], gain, 1e-5, (made[1], made[2]), arrivals)
        push_all(allocate, cases)
        cases("a mark")
        clock.stamp(torch.zeros(clock.SMS, 2, dtype=torch.int64), 4)
    return found


def all_shots(shots: Any, x: torch.Tensor, cases: Any) -> None:
    """Both shots, and each alone. cases(name) names the launches that follow."""
    shots(x, False)
    shard = x.view(WORLD, -1)
    cases(f"{str(x.dtype).removeprefix('torch.')}, alone")
    shots.gather(shard[0].clone())
    shots.scatter(shard, average=True)
    shots.gather_sums(
        shard.repeat(1, 2).unflatten(1, (2, -1)), 2, x.new_zeros(2 * WORLD, SIZE // WORLD)
    )


def push_all(allocate: Any, cases: Any) -> None:
    """The kernels that push bags and rows. cases(name) names the launches that follow."""
    from ladder.kernels import bags, gemm, grouped, rows

    words = allocate((2 * WORLD * bags.MAX_PROGRAMS,), torch.int32)
    firsts, table = torch.zeros(WORLD + 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    for dtype, kind, dim in ((FP32, torch.int64, 256), (BF16, torch.int32, 128)):
        weights = [torch.zeros(100, dim, dtype=dtype)] * 2
        offsets = torch.zeros(2 * WORLD * 16 + 1, dtype=kind)
        out = torch.zeros(16, 2 * WORLD * dim, dtype=dtype)
        slots = allocate((out.numel(),), torch.int32)
        for order in bags.ORDERS[:: 1 if dtype == FP32 else 2]:
            cases(f"{str(dtype).removeprefix('torch.')}, {order}")
            bags.push_bags(
                weights, table, offsets, offsets, "mean", firsts, out, slots, words,
                programs=64, order=order, lent=order == "oblivious",
            )  # fmt: skip
    x = torch.zeros(1000, SIZE, dtype=BF16)
    owners, counter = torch.zeros(1000, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    counts, overflow = torch.zeros(WORLD, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    pieces = torch.zeros(WORLD, 64, SIZE, dtype=BF16)
    slots = allocate((pieces.numel(),), torch.int32)
    cases("bfloat16")
    places = rows.place(owners, owners, 64, words)
    bits, received = rows.as_bits(x), rows.as_bits(pieces)
    memory = slots, words
    rows.push_rows(bits, places, owners, received, counts, overflow, *memory, counter)
    rows.receive_rows(received, counts, *memory, counter)
    rows.push_pieces(received, *memory, counter)
    rows.gather_rows(received, places, owners, bits, *memory, counter)
    h, ends = torch.zeros(512, 256, dtype=BF16), torch.zeros(9, dtype=torch.int64)
    out = torch.zeros(WORLD, 64, 512, dtype=BF16)
    for name, W, tiling in (
        ("[experts, k, n]", torch.zeros(8, 256, 512, dtype=BF16), gemm.Tiling()),
        ("[experts, n, k]", torch.zeros(8, 512, 256, dtype=BF16).mT, gemm.Tiling()),
        ("without TMA", torch.zeros(8, 240, 512, dtype=BF16), gemm.Tiling()),
        ("of odd rows", torch.zeros(8, 512, 255, dtype=BF16).mT, gemm.Tiling(halves=False)),
    ):
        cases(name)
        x = h[:, : W.shape[1]].contiguous()
        where = places, owners, out, counts, overflow, *memory, counter
        grouped.grouped_push(x, W, ends, *where, tiling)


def main(everything: bool, few: bool) -> None:
    # Without CUDA `ladder.jit` would leave Triton alone.
    with mock.patch.object(torch.backends.cuda, "is_built", return_value=True):
        from ladder import jit
    from tests.kernels import steps
    from tests.kernels.standin import Gpu, functions, odd_defaults, unread

    gpu, ptx, primitives = Gpu(), {}, {}
    gc.disable()  # a tenth of the time, and nothing to collect
    with gpu.present():
        if not everything:
            ptx, primitives = machine_code(gpu, few)
        if not few:
            steps.run_all(gpu, everything)
    if few:
        json.dump({"kinds": jit.KERNELS, "ptx": ptx, "primitives": primitives}, sys.stdout)
        return
    made = {
        launch: {"shared": machine.shared, "spilled": machine.spilled}
        for launch, machine in gpu.compiled.items()
        if machine.ptx
    }
    found = functions()
    checks = {
        "kinds": jit.KERNELS,
        "made": made,
        "unread": [line for each in found for line in unread(each, gpu.entered)],
        "defaults": [line for each in found for line in odd_defaults(each)],
    }
    json.dump(checks | {"ptx": ptx, "primitives": primitives}, sys.stdout)


def machine_code(gpu: Gpu, few: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The PTX of each launch of `launches`, or of FEW, and of each of tests.primitives'."""
    from tests import primitives as one_each

    for gpu.case, kernel, args, meta in launches():
        if not few or f"{kernel.__name__}: {gpu.case}" in FEW:
            kernel.run(*args, grid=(1,), warmup=True, **meta)
    ptx = {launch: machine.ptx for launch, machine in gpu.compiled.items()}
    primitives = {}
    for name, (kernel, args, meta) in one_each.launches().items():
        gpu.case = "a primitive"
        primitives[name] = kernel.run(*args, grid=(1,), warmup=True, **meta).ptx
    return ptx, primitives


if __name__ == "__main__":
    main(everything="--everything" in sys.argv, few="--few" in sys.argv)
