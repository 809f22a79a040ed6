"""Fixtures of all tests: one thread, and pools of real ranks that live as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.corpus import make_corpus
from tests.distributed import Pools
from tests.evaluation import make_llama, make_texts


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
