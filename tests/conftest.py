"""Fixtures of all tests: one thread, and pools of real ranks that live as long as the session."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import interpreter  # isort: skip  (before anything that imports a kernel)

from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.data.tokenizer import train_tokenizer
from tests.commands import start  # noqa: F401  (a fixture)
from tests.corpus import make_corpus
from tests.distributed import Pools
from tests.documents import write_documents
from tests.evaluation import make_llama, make_texts


def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`: none where there are GPUs, whose tests would disturb each other."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 8)


TESTS = Path(__file__).parent
# Helpers of a folder say what an assertion compared, as tests do.
pytest.register_assert_rewrite(
    *(f"tests.{path.parent.name}" for path in TESTS.glob("*/__init__.py"))
)
# The files that take longest, longest first, so that the last tests of all processes end together.
LONGEST = (
    "parallel/test_parity", "parallel/test_tensor_parallel", "parallel/test_sequence_parallel",
    "models/test_documents", "train/test_faults", "train/test_cluster", "parallel/test_apply",
    "parallel/test_fused", "test_checkpoint", "comm/test_all_reduce", "parallel/test_sharded",
    "kernels/test_compiled", "kernels/test_decode", "infer/test_sampling",
    "benchmarks/test_quality", "hf/test_axolotl", "test_cli", "parallel/test_data_parallel",
    "infer/test_fused", "hf/test_folders", "hf/test_hf", "parallel/test_collectives",
    "train/test_train", "train/test_resume",
)  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the garbage collector need not look at it, now or ever.

    It is most of what there is, and each look at it takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / f"{name}.py": place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in order), "LONGEST names a file that is not there"
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """A test marked so runs kernels in Triton's interpreter: the names of those that ran."""
    if request.node.get_closest_marker("interpreted") is None:
        yield []
        return
    with interpreter.interpreting() as ran:
        request.node.user_properties.append(("kernels", ran))
        yield ran
    assert ran, "no kernel was run"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests ran kernels in Triton's interpreter, and how many kernels."""
    reports = [
        report
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if "interpreted" in report.keywords
    ]
    if reports:
        ran = [dict(report.user_properties).get("kernels", []) for report in reports]
        every = interpreter.kernels().intersection(*[itertools.chain(*ran)])
        terminalreporter.write_line(
            f"Triton's interpreter ran {len(every)} of {len(interpreter.kernels())} kernels in "
            f"{sum(map(bool, ran))} tests"
        )


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(world_size).run(function, *args)`: see tests.distributed."""
    found = Pools()
    yield found
    found.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared data folder: see tests.corpus."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four texts: see tests.evaluation."""
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def llama(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face's layout: see tests.evaluation."""
    return make_llama(tmp_path_factory.mktemp("llama"), corpus)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of awkward documents: see tests.documents."""
    return write_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def tokenizer(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens, trained on them."""
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((d.text for d in open_corpus([documents]).read("train")), 400, out)
    return out


@pytest.fixture(scope="session")
def prepared(documents: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """They, prepared, in shards of 100 tokens."""
    out = tmp_path_factory.mktemp("prepared") / "data"
    prepare([documents], tokenizer, out, heldout_fraction=0.3, shard_tokens=100)
    return out
