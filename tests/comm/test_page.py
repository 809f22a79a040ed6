"""docs/primitives.md: its kernel does what it says, on ranks that share files as their memory."""

from __future__ import annotations

import os
import sys
from importlib import import_module, reload
from pathlib import Path
from unittest import mock

import pytest
import torch

from ladder import jit
from ladder.models.errors import UserError
from tests import ROOT, pages
from tests.comm.mapped import shared_memory
from tests.distributed import Pools
from tests.interpreter import interpreting
from tests.kernels.support import on

PAGE = pages.parse((ROOT / "docs" / "primitives.md").read_text(encoding="utf-8"))


def run_check(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """The page's check on one rank; what it returns, and the kernels that ran.

    A single program runs ahead of the other ranks furthest; of three, each has fewer tiles.
    """
    names = ("matmul_reduce_scatter", "check_matmul")
    with (
        mock.patch.dict(os.environ, TRITON_INTERPRET="1"),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.dict(jit.KERNELS),  # the next test has its own
        interpreting() as ran,
        shared_memory(rank, world, folder),
    ):
        check = import_module("check_matmul").check
        result = sum(check(torch.device("cpu"), torch.float32, 3, programs) for programs in (1, 3))
    for name in names:
        del sys.modules[name]
    return result, ran


def test_the_pages_kernel_can_be_imported_without_triton_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace could not tell it from a kernel of its name that is declared elsewhere."""
    monkeypatch.chdir(tmp_path)
    pages.write_files(PAGE)
    name = "matmul_reduce_scatter"
    (tmp_path / "copied.py").write_text((tmp_path / f"{name}.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("triton", "tl"):
        monkeypatch.setattr(jit, module, None)
    with mock.patch.dict(jit.KERNELS), mock.patch.dict(sys.modules):
        reload(import_module(name))
        assert jit.KERNELS[f"{name}_kernel"] == "both"
        with pytest.raises(UserError, match=rf"two kernels .*/{name}\.py .*/copied\.py .*rename"):
            import_module("copied")


@pytest.mark.parametrize(
    ("device", "world"), [on("interpreter", 2), on("interpreter", 4, slow=True)]
)
def test_the_pages_kernel_sums_exactly(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted: list[str],
    device: str, world: int,
) -> None:  # fmt: skip
    """Without its wait, with one set of slots, or with a tile in another place, it fails."""
    monkeypatch.chdir(tmp_path)
    pages.write_files(PAGE)
    for result, ran in pools(world).run(run_check, str(tmp_path)):
        assert result == 0
        assert ran == ["matmul_reduce_scatter_kernel"]
        interpreted += ran
