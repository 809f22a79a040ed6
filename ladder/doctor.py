"""What this machine and installation can do: `ladder doctor`.

Every check runs the thing that it reports on. What that raises is what the check reports, so here,
and nowhere else, exceptions are caught whatever they are. Nothing but the standard library is
imported up front: the doctor also examines an installation without torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, permutations
from pathlib import Path

PYTHON = (3, 11)


@dataclass(frozen=True)
class Check:
    """One line of the report.

    status: `ok`; `missing`, which is not here (detail: what it would unlock, and how to get it);
    `failed`, which is here and does not work (detail: its error). detail: one line. core: whether
    ladder needs it on every machine.
    """

    name: str
    status: str
    detail: str
    core: bool = False


@dataclass(frozen=True)
class Package:
    """A distribution, the module it installs, the lowest version and what it is good for.

    install: the command that gets it; pip with the lowest version by default.
    """

    name: str
    minimum: str = ""
    unlocks: str = "needed by every command"
    module: str = ""
    install: str = ""


# As in pyproject.toml (a test compares): a checkout has no metadata, a wheel no pyproject.toml.
CORE = (
    Package("torch", "2.11"),
    Package("numpy", "2.0"),
    Package("pyyaml", "6.0", module="yaml"),
    Package("safetensors", "0.5"),
    Package("tokenizers", "0.21"),
    Package("rich", "13.7"),
    Package("tensorboard", "2.18"),
    Package("jinja2", "3.1"),
)
OPTIONAL = (
    Package("triton", "3.6", "fused GPU kernels; comes with CUDA builds of torch on Linux"),
    Package("transformers", "5.16", "Hugging Face integration and its parity tests"),
    Package("matplotlib", "3.9", "figures in report pages"),
    Package("lm_eval", "0.4.13", "`ladder eval`: tasks of lm-evaluation-harness"),
    Package("pyarrow", "18.0", "data prepared from Parquet files"),
    Package("datasets", "4.0", "data prepared from Hugging Face datasets"),
    Package(
        "axolotl",
        unlocks="fine-tuning through Axolotl, which pins its own torch and transformers",
        install="pip install axolotl, in an environment of its own",
    ),
)

ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1 keeps NCCL off NVLink and PCIe peer access: slower all-reduces",
    "NCCL_NVLS_ENABLE": "0 keeps NCCL off NVLink multicast",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1 keeps symmetric memory off NVLink multicast",
    "CUDA_VISIBLE_DEVICES": "the GPUs that torch sees, and their order",
    "OMP_NUM_THREADS": "CPU threads of each process; torchrun sets 1",
    "RANK": "this process's number under torchrun; commands expect its siblings",
    "WORLD_SIZE": "the number of processes under torchrun; commands expect that many",
}

SMI_SECONDS = 10
GROUP_SECONDS = 30
# In a process of its own: nothing distributed starts in the doctor's, and nothing can hang it.
GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
value = torch.full((4,), 3.0)
dist.all_reduce(value)
dist.destroy_process_group()  # or gloo's threads, ended with the process, may have the last word
assert value.tolist() == [3.0] * 4, f"all_reduce gave {value.tolist()}"
"""

NO_GPU = "no CUDA device"
CUDA_BUILD = "pip install torch --index-url https://download.pytorch.org/whl/cu130"


class Missing(Exception):
    """What a check raises for something that is not there; the message says what to do."""


class Failed(Exception):
    """What a check raises for something that does not work, where it knows why."""


def examine() -> list[Check]:
    """Check this machine and installation; raises nothing for what it finds.

    Starts nothing distributed in this process, and runs at most one tiny model on each device.
    """
    return [
        _check("python", _python, core=True),
        Check("platform", "ok", f"{platform.platform()}, {platform.machine()}"),
        _check("ladder", _ladder, core=True),
        *(_check(each.name, partial(_package, each), core=True) for each in CORE),
        _with_torch("model", partial(_model, "cpu"), core=True),
        _with_torch("gloo", _group, core=True),
        _check("cpu", _cpu),
        _check("memory", _memory),
        _with_torch("torch threads", _threads),
        _with_torch("cuda", _cuda),
        _check("nvidia driver", _driver),
        *_gpus(),
        _with_torch("model on gpu", _model_on_gpu),
        _with_torch("nccl", _nccl),
        _check("gpu links", _links),
        _with_torch("peer access", _peers),
        _with_torch("symmetric memory", _symmetric_memory),
        _with_torch("bf16", _bf16),
        *(_check(each.name, partial(_package, each)) for each in OPTIONAL),
        *_environment(os.environ),
    ]


def report(checks: Iterable[Check]) -> str:
    """The checks as an aligned table of plain text, and a last line that sums them up."""
    checks = list(checks)
    width = max(len(check.name) for check in checks)
    lines = [
        f"{check.status:<7}  {'core' if check.core else '':<4}  {check.name:<{width}}  "
        f"{check.detail}"
        for check in checks
    ]
    counts = ", ".join(
        f"{sum(check.status == status for check in checks)} {status}"
        for status in ("ok", "missing", "failed")
    )
    broken = [check.name for check in checks if check.core and check.status != "ok"]
    verdict = f"ladder cannot work here: {', '.join(broken)}" if broken else "ladder works here"
    return "\n".join((*lines, "", f"{verdict} ({counts})"))


def main(as_json: bool = False) -> int:
    """Print the report, or {"ok": ..., "checks": [...]}; 0 where every core check is ok, else 1."""
    checks = examine()
    ok = all(check.status == "ok" for check in checks if check.core)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(report(checks))
    return 0 if ok else 1


# -- running a check ----------------------------------------------------------------------------


def _check(name: str, probe: Callable[[], str], core: bool = False) -> Check:
    """Run `probe`: it returns the detail, or raises Missing, Failed or the error to report."""
    try:
        with redirect_stdout(sys.stderr):  # some packages greet on import; stdout may be JSON
            detail, status = probe(), "ok"
    except Missing as lack:
        detail, status = str(lack), "missing"
    except Failed as reason:
        detail, status = str(reason), "failed"
    except (Exception, SystemExit) as error:
        detail, status = f"{type(error).__name__}: {error}", "failed"
    return Check(name, status, _one_line(detail), core)


def _with_torch(name: str, probe: Callable[[], str], core: bool = False) -> Check:
    """The same for a check that uses torch: one line says why torch is not there, not ten."""
    if sys.modules.get("torch") is None:
        return Check(name, "missing", "needs torch", core)
    return _check(name, probe, core)


def _one_line(text: str, limit: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _run(command: list[str], seconds: float) -> str:
    """Standard output of `command`; raises Failed with its last words, or after `seconds`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer within {seconds:g} s") from None
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(words[-1] if words else f"ended with status {done.returncode}")
    return done.stdout


# -- the installation ---------------------------------------------------------------------------


def _python() -> str:
    if sys.version_info < PYTHON:
        lowest = ".".join(map(str, PYTHON))
        raise Failed(f"{platform.python_version()} is older than {lowest}; install a newer")
    return f"{platform.python_version()}, {sys.executable}"


def _ladder() -> str:
    import ladder

    return f"{ladder.__version__}, {Path(ladder.__file__).parent}"


def _package(package: Package) -> str:
    module = package.module or package.name
    wanted = f"{package.name}>={package.minimum}" if package.minimum else package.name
    quoted = f"'{wanted}'" if package.minimum else wanted
    install = package.install or f"pip install {quoted}"
    spec = importlib.util.find_spec(module)
    # A folder of that name in the working directory is found too, as a namespace without a file.
    if spec is None or spec.origin is None:
        raise Missing(f"{package.unlocks}; {install}")
    loaded = importlib.import_module(module)
    try:
        version = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        version = str(getattr(loaded, "__version__", "of unknown version"))
    if package.minimum and _numbers(version) < _numbers(package.minimum):
        raise Failed(f"{version} is older than {package.minimum}; {install}")
    least = f" (>= {package.minimum})" if package.minimum else ""
    return f"{version}{least}" if package in CORE else f"{version}{least}: {package.unlocks}"


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, to compare: 2.13.0+cpu -> (2, 13, 0); () where there is none."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _model(device: str, half: bool = False) -> str:
    """Forward and backward of a tiny ladder model, with the loss that a new model must have."""
    import torch

    from ladder.models import ModelConfig, Transformer

    started = time.monotonic()
    config = ModelConfig.from_dict(
        {
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "max_seq_len": 32,
            "plan": "ladder",
        }
    )
    model = Transformer(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        model.initialise(parameter, name, generator)
    model = model.to(device, torch.bfloat16 if half else torch.float32)
    tokens = torch.randint(config.vocab_size, (2, 33), generator=generator).to(device)
    loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
    loss.backward()
    finite = all(
        parameter.grad is not None and bool(parameter.grad.isfinite().all())
        for parameter in model.parameters()
    )
    value, expected = loss.item(), math.log(config.vocab_size)
    if not finite or not abs(value - expected) < 0.5:  # NaN compares false
        raise Failed(
            f"loss {value} (a new model's is {expected:.2f}), gradients "
            f"{'finite' if finite else 'not finite'}"
        )
    spent = time.monotonic() - started
    return f"a tiny ladder model ran forward and backward: loss {value:.2f}, {spent:.1f} s"


def _group() -> str:
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise Missing("this torch has no gloo: several processes need it; install torch from PyPI")
    started = time.monotonic()
    # -P: a torch.py in the working directory is not torch
    _run([sys.executable, "-P", "-c", GROUP], GROUP_SECONDS)
    return f"one process formed a group and all-reduced, {time.monotonic() - started:.1f} s"


# -- the machine --------------------------------------------------------------------------------


def _cpu() -> str:
    cores = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return f"{cores} cores" if usable == cores else f"{cores} cores, {usable} for this process"


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return "its size cannot be read on this platform"
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    free = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text()) if info.exists() else None
    available = f", {int(free[1]) / 2**20:.1f} GiB available" if free else ""
    return f"{total / 2**30:.1f} GiB{available}"


def _threads() -> str:
    import torch

    return (
        f"{torch.get_num_threads()} within an operation, {torch.get_num_interop_threads()} across"
    )


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise Missing(
            f"torch {torch.__version__} is built without CUDA, so all runs on the CPU; for GPUs: "
            f"{CUDA_BUILD}"
        )
    if not torch.cuda.is_available():
        raise Missing(
            f"{NO_GPU}, though torch is built for CUDA {torch.version.cuda}: see nvidia-smi, the "
            f"driver and CUDA_VISIBLE_DEVICES"
        )
    return f"torch is built for CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"


def _driver() -> str:
    return ", ".join(
        sorted(set(_smi("--query-gpu=driver_version", "--format=csv,noheader").split()))
    )


def _smi(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        raise Missing("no nvidia-smi here; GPUs need NVIDIA's driver: nvidia.com/drivers")
    return _run([command, *arguments], SMI_SECONDS)


def _gpus() -> list[Check]:
    """One check for each GPU that torch sees, or one that says that there is none."""
    unlocks = "GPU training, GPU kernels and the CUDA-graph engine need one"
    count = _with_torch("gpu", lambda: str(_gpu_count(1, unlocks)))
    if count.status != "ok":
        return [count]
    return [_check(f"gpu {index}", partial(_gpu, index)) for index in range(int(count.detail))]


def _gpu_count(needed: int, unlocks: str) -> int:
    """How many GPUs torch sees; raises Missing, saying what more would unlock, below `needed`."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < needed:
        raise Missing(f"{'only one GPU' if count else NO_GPU}: {unlocks}")
    return count


def _gpu(index: int) -> str:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    return (
        f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability "
        f"{gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs"
    )


def _model_on_gpu() -> str:
    _gpu_count(1, "a tiny model would run there in bf16")
    return _model("cuda", half=True)


def _nccl() -> str:
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        raise Missing("this torch has no NCCL, for all-reduces between GPUs: CUDA builds have it")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{version}: all-reduces between GPUs"


def _links() -> str:
    return describe_links(_smi("topo", "-m"))


def describe_links(text: str) -> str:
    """What `nvidia-smi topo -m` says of the links between GPUs, in one line.

    Raises Missing where it lists one GPU, Failed where it lists none.
    """
    rows: dict[int, list[str]] = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():  # the header is underlined
        words = line.split()
        # Rows start as the columns do, with the GPUs, but the header names a GPU in place of X.
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


def _peers() -> str:
    count = _gpu_count(2, "peer access, which symmetric memory needs, is between two")
    lacking = _lacking_peers(count)
    if lacking:
        pairs = ", ".join(f"{a} to {b}" for a, b in lacking)
        raise Missing(f"not from GPU {pairs}: symmetric memory needs it, NCCL works without")
    return f"every GPU reads and writes the memory of the other {count - 1}"


def _lacking_peers(count: int) -> list[tuple[int, int]]:
    import torch

    pairs = permutations(range(count), 2)
    return [(a, b) for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def _symmetric_memory() -> str:
    import torch

    importlib.import_module("torch.distributed._symmetric_memory")
    count = _gpu_count(2, "symmetric memory, for the fastest all-reduces, is between two")
    for index in range(count):
        major, minor = torch.cuda.get_device_capability(index)
        if major < 9:
            raise Missing(
                f"GPU {index} has compute capability {major}.{minor}, fast all-reduces over "
                f"symmetric memory need 9.0; NCCL works without"
            )
    if _lacking_peers(count):
        raise Missing("not without peer access between all GPUs; NCCL works without")
    return f"{count} GPUs of compute capability 9.0 or more, with peer access"


def _bf16() -> str:
    import torch

    ones = torch.ones(8, 8, dtype=torch.bfloat16)
    if (ones @ ones).sum().item() != 512:
        raise Failed("a product of bf16 matrices is wrong on this CPU")
    if not torch.cuda.is_available():
        return f"works on the CPU; {NO_GPU}"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Missing("the CPU has it, the GPU emulates it: compute capability 8.0 or more has it")
    return "works on the CPU, native on the GPU"


def _environment(values: Mapping[str, str]) -> list[Check]:
    """One check for each variable that is set and changes what ladder does, or one for none."""
    found = [
        Check(name, "ok", _one_line(f"{values[name]!r}: {meaning}"))
        for name, meaning in ENVIRONMENT.items()
        if name in values
    ]
    return found or [Check("environment", "ok", "none of the variables that matter is set")]
