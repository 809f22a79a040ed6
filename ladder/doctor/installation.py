"""Checks of the installation: Python, the packages, a tiny model, a process group."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import platform
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ladder.doctor.check import Failed, Missing, run_process

PYTHON = (3, 11)


@dataclass(frozen=True)
class Package:
    """A Python package that ladder uses.

    name: of the distribution. minimum: its lowest version. unlocks: the features that need it.
    module: the module to import; empty: `name`. install: how to install it; empty: by pip.
    """

    name: str
    minimum: str = ""
    unlocks: str = "needed by every command"
    module: str = ""
    install: str = ""


# As in pyproject.toml, which a test compares: a checkout has no metadata, a wheel has no
# pyproject.toml.
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

GROUP_SECONDS = 30
# Runs in a process of its own, so that it cannot hang the doctor.
GROUP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
value = torch.full((4,), 3.0)
dist.all_reduce(value)
dist.destroy_process_group()  # gloo's threads may otherwise print an error when the process ends
assert value.tolist() == [3.0] * 4, f"all_reduce gave {value.tolist()}"
"""


def probe_python() -> str:
    if sys.version_info < PYTHON:
        lowest = ".".join(map(str, PYTHON))
        raise Failed(f"{platform.python_version()} is older than {lowest}; install a newer Python")
    return f"{platform.python_version()}, {sys.executable}"


def probe_ladder() -> str:
    import ladder

    return f"{ladder.__version__}, {Path(ladder.__file__).parent}"


def probe_package(package: Package) -> str:
    module = package.module or package.name
    wanted = f"{package.name}>={package.minimum}" if package.minimum else package.name
    quoted = f"'{wanted}'" if package.minimum else wanted
    install = package.install or f"pip install {quoted}"
    spec = importlib.util.find_spec(module)
    # A folder of that name in the working directory is found too; it has no file (origin).
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
    """The numbers of a version, for comparison: 2.13.0+cpu -> (2, 13, 0); () without any."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def probe_model(device: str, half: bool = False) -> str:
    """Run a tiny ladder model forward and backward; its loss must be that of random weights."""
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
            f"loss {value} (random weights give {expected:.2f}), gradients "
            f"{'finite' if finite else 'not finite'}"
        )
    spent = time.monotonic() - started
    return f"a tiny ladder model ran forward and backward: loss {value:.2f}, {spent:.1f} s"


def probe_group() -> str:
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise Missing("this torch lacks gloo, which several ranks need; install torch from PyPI")
    started = time.monotonic()
    # -P: a torch.py in the working directory is not torch
    run_process([sys.executable, "-P", "-c", GROUP], GROUP_SECONDS)
    return f"a process group of one rank formed and all-reduced, {time.monotonic() - started:.1f} s"
