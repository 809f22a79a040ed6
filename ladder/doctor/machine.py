"""Checks of the machine: CPU, memory, GPUs and the links between them, environment variables."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import combinations, permutations
from pathlib import Path

from ladder.doctor.check import (
    DoctorCheck,
    Failed,
    Missing,
    one_line,
    run_check,
    run_check_with_torch,
    run_process,
)
from ladder.doctor.installation import probe_model
from ladder.models.errors import UserError
from ladder.parallel.environment import check_environment, whole_number

THREADS = "OMP_NUM_THREADS"
# Files that commands read: what each is, and the module whose `read_table` reads it.
TABLES = {
    "LADDER_DISPATCH": ("a table of all-reduces", "ladder.parallel.dispatch"),
    "LADDER_OPS_TABLE": ("a table of operators", "ladder.ops.table"),
}
ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1 keeps NCCL off NVLink and PCIe peer access: slower all-reduces",
    "NCCL_NVLS_ENABLE": "0 keeps NCCL off NVLink multicast",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1 keeps symmetric memory off NVLink multicast",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch sees, and their order",
    THREADS: "CPU threads of each process; torchrun sets 1",
    "RANK": "the rank of this process, set by torchrun; commands wait for the other ranks",
    "WORLD_SIZE": "the number of ranks, set by torchrun; commands wait for all of them",
    **{name: f"{what}, before the packaged one" for name, (what, _) in TABLES.items()},
    "TRITON_INTERPRET": "1 runs Triton's kernels in its interpreter, on CPUs: very slow",
}

SMI_SECONDS = 10
NO_GPU = "no CUDA device"
CUDA_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


def probe_cpu() -> str:
    cores = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return f"{cores} cores" if usable == cores else f"{cores} cores, {usable} for this process"


def probe_memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return "the size of memory cannot be read on this platform"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    free = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    available = f", {int(free[1]) / 2**20:.1f} GiB available" if free else ""
    return f"{total / 2**30:.1f} GiB{available}"


def probe_threads() -> str:
    import torch

    return (
        f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} across"
    )


def probe_cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise Missing(
            f"torch {torch.__version__} is built without CUDA, so everything runs on the CPU; for "
            f"GPUs: {CUDA_BUILD}"
        )
    if not torch.cuda.is_available():
        raise Missing(
            f"{NO_GPU}, though torch is built for CUDA {torch.version.cuda}: see nvidia-smi, the "
            f"driver and CUDA_VISIBLE_DEVICES"
        )
    return f"torch is built for CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"


def probe_driver() -> str:
    return ", ".join(
        sorted(set(_smi("--query-gpu=driver_version", "--format=csv,noheader").split()))
    )


def _smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise Missing("no nvidia-smi here; GPUs need NVIDIA's driver: nvidia.com/drivers")
    return run_process([command, *arguments], SMI_SECONDS)


def gpu_checks() -> list[DoctorCheck]:
    """A check of each GPU that torch sees, or one check that there is none."""
    unlocks = "GPU training, GPU kernels and the CUDA-graph engine need one"
    count = run_check_with_torch("gpu", lambda: str(_gpu_count(1, unlocks)))
    if count.status != "ok":
        return [count]
    return [
        run_check(f"gpu {index}", partial(probe_gpu, index)) for index in range(int(count.detail))
    ]


def _gpu_count(needed: int, unlocks: str) -> int:
    """The number of GPUs that torch sees. Raises Missing, with `unlocks`, if below `needed`."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < needed:
        raise Missing(f"{'only one GPU' if count else NO_GPU}: {unlocks}")
    return count


def probe_gpu(index: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    return (
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability "
        f"{gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs"
    )


def probe_description() -> str:
    """The shipped machine file that describes this machine, for `ladder predict`."""
    import torch

    from ladder.perf.nodes import describing, names

    count = _gpu_count(1, "predictions take --machine, a shipped file or one of another machine")
    gpus = {torch.cuda.get_device_properties(index).name for index in range(count)}
    alike = describing(gpus, count)
    for known in alike:
        if known.gpus == count:
            said = f"{known.name} describes {count} x {known.gpu}"
            if known.name in names():
                said += f", which nobody has measured (ladder bench machine --nproc {count} does)"
            return f"{said}: ladder predict MODEL --machine {known.name}"
    below = [known for known in alike if known.gpus < count]
    part = max(below, key=lambda known: known.gpus, default=None)
    some = f" ({part.name} describes {part.gpus} of them)" if part else ""
    raise Missing(
        f"no shipped file describes {count} x {', '.join(sorted(gpus))}{some}; measure it: ladder "
        f"bench machine --nproc {count} --out machine.json"
    )


def probe_model_on_gpu() -> str:
    _gpu_count(1, "a tiny model would run on one in bf16")
    return probe_model("cuda", half=True)


def probe_nccl() -> str:
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        raise Missing("this torch lacks NCCL, for all-reduces between GPUs; CUDA builds have it")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{version}: all-reduces between GPUs"


def probe_links() -> str:
    return describe_links(_smi("topo", "-m"))


def describe_links(text: str) -> str:
    """One line about the links between GPUs, from the output of `nvidia-smi topo -m`.

    Raises Missing if it lists one GPU, and Failed if it lists none.
    """
    rows: dict[int, list[str]] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():  # the header is underlined
        words = line.split()
        # The header begins with GPU0, too, but has no X.
        if len(words) > 1 and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            rows[len(rows)] = words[1:]
    if not rows:
        raise Failed("nvidia-smi topo -m lists no GPUs")
    if len(rows) == 1:
        raise Missing("only one GPU: tensor parallelism needs two")
    pairs = list(combinations(rows, 2))
    kinds = Counter(rows[a][b] for a, b in pairs)
    nvlink = any(re.fullmatch(r"NV\d+", kind) for kind in kinds)
    found = ", ".join(f"{kind} on {count} of {len(pairs)} pairs" for kind, count in kinds.items())
    if len(kinds) == 1:
        found = f"{next(iter(kinds))} on every pair"
    return f"{'NVLink' if nvlink else 'no NVLink, PCIe only'}: {found} of {len(rows)} GPUs"


def probe_peers() -> str:
    count = _gpu_count(2, "peer access, which symmetric memory needs, takes two GPUs")
    lacking = _lacking_peers(count)
    if lacking:
        pairs = ", ".join(f"{a} to {b}" for a, b in lacking)
        raise Missing(f"no access from GPU {pairs}: symmetric memory needs it, NCCL does not")
    return f"every GPU reads and writes the memory of the other {count - 1}"


def _lacking_peers(count: int) -> list[tuple[int, int]]:
    import torch

    pairs = permutations(range(count), 2)
    return [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def probe_symmetric_memory() -> str:
    import torch

    importlib.import_module("torch.distributed._symmetric_memory")
    count = _gpu_count(2, "symmetric memory, for the fastest all-reduces, takes two GPUs")
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 9:
            raise Missing(
                f"GPU {index} has compute capability {major}.{minor}; fast all-reduces over "
                f"symmetric memory need 9.0, NCCL does not"
            )
    if _lacking_peers(count):
        raise Missing("needs peer access between all GPUs; NCCL does not")
    return f"{count} GPUs of compute capability 9.0 or more, with peer access"


def probe_bf16() -> str:
    import torch

    ones = torch.ones(8, 8, dtype=torch.bfloat16)
    if (ones @ ones).sum().item() != 512:
        raise Failed("a product of bf16 matrices is wrong on this CPU")
    if not torch.cuda.is_available():
        return f"works on the CPU; {NO_GPU}"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Missing("the GPU emulates it; compute capability 8.0 or more has it")
    return "works on the CPU, native on the GPU"


def probe_fp8() -> str:
    """Whether weights in fp8 work. Weights in int8 need nothing special."""
    import torch

    from ladder.models.storage import FP8_CAPABILITY

    values = torch.tensor([0.0, 1.125, -448.0])
    if not torch.equal(values.to(torch.float8_e4m3fn).float(), values):
        raise Failed("a conversion to fp8 (e4m3) is wrong on this CPU")
    if not torch.cuda.is_available():
        return f"--weights fp8 works on the CPU; {NO_GPU}"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < FP8_CAPABILITY:
            raise Missing(
                f"GPU {index} has compute capability {major}.{minor}, and --weights fp8 needs 8.9; "
                f"--weights int8 does not"
            )
    return "--weights fp8 works on the CPU and on the GPUs, whose kernels convert it"


def probe_decode_kernels() -> str:
    """What decodes by fused kernels on the GPUs, and which models decode without them."""
    import torch

    from ladder.models.storage import FP8_CAPABILITY

    if not torch.cuda.is_available():
        raise Missing(f"{NO_GPU}: plain modules decode on the CPU")
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    converted = any(each[0] != 9 and each >= FP8_CAPABILITY for each in found)
    return (
        "fused kernels in Triton; models with biases of outputs or MLPs, adapters, "
        "mixers or feed-forwards of your own, or that compute in another dtype than their weights' "
        "decode by plain modules"
        + ("; products in 8 bits by pieces, which are faster, need Hopper" if converted else "")
    )


def probe_launch() -> str:
    """Which rank the environment makes of a command. Raises Failed if commands refuse it."""
    try:
        check_environment()
    except UserError as error:
        raise Failed(str(error)) from error
    world = whole_number("WORLD_SIZE", 1)
    return "one process" if world == 1 else f"rank {whole_number('RANK', 0)} of {world}"


def environment_checks(values: Mapping[str, str]) -> list[DoctorCheck]:
    """A check of each variable in ENVIRONMENT that is set, or one check that none is."""
    found = []
    for name, meaning in ENVIRONMENT.items():
        if name not in values:
            continue
        if name in TABLES and values[name] and importlib.util.find_spec("torch"):
            try:
                importlib.import_module(TABLES[name][1]).read_table(Path(values[name]))
            except UserError as error:
                found.append(DoctorCheck(name, "failed", one_line(str(error))))
                continue
        # OpenMP takes a number for each level of nesting.
        if name == THREADS and not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", values[name].strip()):
            meaning = "no number of CPU threads, and so ignored; give 1 or more, or unset it"
        found.append(DoctorCheck(name, "ok", one_line(f"{values[name]!r}: {meaning}")))
    return found or [
        DoctorCheck("environment", "ok", "no variable is set that changes what ladder does")
    ]
