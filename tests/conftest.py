"""Fixtures of all tests: one thread, and pools of real ranks that live as long as the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.data.tokenizer import train_tokenizer
from tests.corpus import make_corpus
from tests.distributed import Pools
from tests.documents import write_documents
from tests.evaluation import make_llama, make_texts


def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`: none where there are GPUs, whose tests would disturb each other."""
    return 0 if torch.cuda.is_available() else min(os.cpu_count() or 1, 8)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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
