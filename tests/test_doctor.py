"""The doctor: what it examines, what it makes of something broken, and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ladder.doctor import command, installation, machine
from ladder.doctor.check import (
    DoctorCheck,
    Failed,
    Missing,
    run_check,
    run_check_with_torch,
)
from ladder.ops import table
from ladder.parallel import dispatch
from tests import ROOT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group's process is slow to start; one test runs it."""
    monkeypatch.setattr(installation, "GROUP", "pass")


def named(checks: list[DoctorCheck]) -> dict[str, DoctorCheck]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "two checks of one name"
    return found


def test_this_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    # and only reports: nothing distributed is left running here
    assert command.main() == 0
    assert not torch.distributed.is_initialized()
    text = capsys.readouterr().out
    *_, verdict, following = text.splitlines()
    assert verdict.startswith("ladder works here (")
    assert following.startswith("next: ladder tokenizer train ")
    lines = {line[15:33].strip(): line for line in text.splitlines() if line}
    for name in ("python", "torch", "model", "gloo", "launch"):
        assert lines[name].startswith("ok       core"), lines[name]


@pytest.mark.usefixtures("quick")
class TestMain:
    def test_a_missing_core_package_fails(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        assert command.main() == 1
        text = capsys.readouterr().out
        assert "pip install 'tensorboard>=2.18'" in text
        assert text.splitlines()[-1].startswith("ladder cannot work here: tensorboard (")

    def test_a_core_package_that_is_too_old_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "CORE", (installation.Package("torch", "99.1"),))
        check = named(command.examine())["torch"]
        assert check.status == "failed"
        assert "is older than 99.1; pip install 'torch>=99.1'" in check.detail
        assert command.main() == 1

    def test_json_has_the_same_checks(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checks = command.examine()
        monkeypatch.setattr(command, "examine", lambda: checks)
        assert command.main(as_json=True) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["ok"] is True
        assert [DoctorCheck(**entry) for entry in data["checks"]] == checks
        assert command.main() == 0
        table = capsys.readouterr().out
        assert all(f"  {check.name} " in table and check.detail in table for check in checks)

    def test_what_failed_is_named_and_mended_first(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setenv("LADDER_DISPATCH", str(tmp_path / "none"))
        assert command.main() == 0
        *_, verdict, following = capsys.readouterr().out.splitlines()
        assert verdict.startswith("ladder works here, except LADDER_DISPATCH (")
        assert following.startswith("next: mend LADDER_DISPATCH: cannot read the dispatch table ")
        assert "unset LADDER_DISPATCH" in following

    def test_missing_optional_packages_do_not_fail(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for package in installation.OPTIONAL:
            monkeypatch.setitem(sys.modules, package.name, None)
        assert command.main(as_json=True) == 0
        checks = named([DoctorCheck(**c) for c in json.loads(capsys.readouterr().out)["checks"]])
        for package in installation.OPTIONAL:
            check = checks[package.name]
            assert check.status == "missing"
            assert package.unlocks in check.detail
            assert "pip install" in check.detail

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("print('hello')\nraise RuntimeError('of two\\nlines')", "RuntimeError: of two lines"),
            ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
            ("raise SystemExit('needs a licence')", "SystemExit: needs a licence"),
        ],
    )
    def test_a_broken_optional_package_is_reported(
        self,
        code: str,
        said: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "lm_eval.py").write_text(code)
        monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert command.main(as_json=True) == 0
        # what the package printed is not in the way of the JSON
        check = next(
            entry
            for entry in json.loads(capsys.readouterr().out)["checks"]
            if entry["name"] == "lm_eval"
        )
        assert check["status"] == "failed"
        assert said in check["detail"]

    def test_a_folder_of_a_packages_name_is_not_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "axolotl").mkdir()
        monkeypatch.delitem(sys.modules, "axolotl", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        assert (
            run_check("", lambda: installation.probe_package(installation.OPTIONAL[-1])).status
            == "missing"
        )

    def test_without_torch_it_still_reports(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        # imported without torch, transformers would remember that for the tests to come
        monkeypatch.setattr(installation, "OPTIONAL", ())
        monkeypatch.setitem(sys.modules, "torch", None)
        assert command.main(as_json=True) == 1
        checks = named([DoctorCheck(**c) for c in json.loads(capsys.readouterr().out)["checks"]])
        assert checks["torch"].status == "missing"
        assert checks["model"] == DoctorCheck("model", "missing", "needs torch", core=True)

    def test_a_model_that_computes_nonsense_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ladder.models import Transformer

        def poison(self: object, parameter: torch.Tensor, *_: object) -> None:
            parameter.data.fill_(float("nan"))

        monkeypatch.setattr(Transformer, "initialise", poison)
        check = named(command.examine())["model"]
        assert check.status == "failed"
        assert "loss nan" in check.detail
        assert command.main() == 1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
    def test_without_a_gpu_each_line_says_so(self) -> None:
        checks = named(command.examine())
        for name in ("cuda", "gpu", "model on gpu", "peer access", "symmetric memory"):
            assert checks[name].status == "missing", name
            assert not checks[name].core
        for name in (
            "gpu",
            "model on gpu",
            "peer access",
            "symmetric memory",
            "bf16",
            "fp8 weights",
            "decode kernels",
        ):
            assert "no CUDA device" in checks[name].detail, name
        if torch.version.cuda is None:
            assert "built without CUDA" in checks["cuda"].detail
            assert "pip install torch" in checks["cuda"].detail
        else:
            assert "no CUDA device" in checks["cuda"].detail


class TestGroup:
    def test_a_group_that_hangs_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "GROUP", "import time; time.sleep(600)")
        monkeypatch.setattr(installation, "GROUP_SECONDS", 0.5)
        check = run_check_with_torch("gloo", installation.probe_group, core=True)
        assert check == DoctorCheck("gloo", "failed", "no answer within 0.5 s", core=True)

    def test_a_wrong_sum_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "GROUP", installation.GROUP.replace("[3.0]", "[4.0]"))
        check = run_check_with_torch("gloo", installation.probe_group, core=True)
        assert check.status == "failed"
        assert "all_reduce gave [3.0, 3.0, 3.0, 3.0]" in check.detail


class TestLinks:
    """The columns of NICs and of affinities are no GPUs, and the header's underlining no text."""

    NVLINK = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV18\tNV18\tPXB\t0-47,96-143\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tNV18\tSYS\t0-47,96-143\t0\t\tN/A\n"
        "GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A\n"
        "NIC0\tPXB\tSYS\tSYS\t X \n\n"
        "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
    )

    def test_nvlink_everywhere(self) -> None:
        assert machine.describe_links(self.NVLINK) == "NVLink: NV18 on every pair of 3 GPUs"

    def test_nvlink_between_some(self) -> None:
        rows = ("GPU0 X NV4 SYS", "GPU1 NV4 X SYS", "GPU2 SYS SYS X")
        said = machine.describe_links("\n".join(rows))
        assert said == "NVLink: NV4 on 1 of 3 pairs, SYS on 2 of 3 pairs of 3 GPUs"

    def test_no_nvlink(self) -> None:
        said = machine.describe_links("   GPU0 GPU1 NIC0\nGPU0 X PHB SYS\nGPU1 PHB X NODE\n")
        assert said == "no NVLink, PCIe only: PHB on every pair of 2 GPUs"

    def test_one_gpu_and_none(self) -> None:
        with pytest.raises(Missing, match="only one GPU"):
            machine.describe_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n")
        with pytest.raises(Failed, match="lists no GPUs"):
            machine.describe_links("Failed to initialize NVML\n")


@pytest.mark.parametrize(
    ("access", "capability", "peers", "symmetric"),
    [
        (lambda a, b: True, (9, 0), "ok", "ok"),
        (lambda a, b: (a, b) != (2, 0), (9, 0), "missing", "missing"),
        (lambda a, b: True, (8, 0), "ok", "missing"),
    ],
)
def test_peer_access_and_symmetric_memory(
    access: Callable[[int, int], bool],
    capability: tuple[int, int],
    peers: str,
    symmetric: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", access)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    found = run_check("peers", machine.probe_peers)
    assert found.status == peers
    assert ("2 to 0" in found.detail) == (peers == "missing")
    assert run_check("symmetric", machine.probe_symmetric_memory).status == symmetric


@pytest.mark.parametrize(
    ("gpu", "count", "status", "said"),
    [
        ("NVIDIA H200", 4, "ok", "h200x4 describes 4 x NVIDIA H200"),
        ("NVIDIA H200", 3, "missing", "ladder bench machine --nproc 3 --out machine.json"),
        ("NVIDIA H200", 7, "missing", "7 x NVIDIA H200 (h200x4 describes 4 of them)"),
        ("NVIDIA H200", 8, "ok", "which nobody has measured (ladder bench machine --nproc 8 does)"),
        ("NVIDIA H100 80GB HBM3", 4, "ok", "h100x4 describes 4 x NVIDIA H100 80GB HBM3, which"),
        ("NVIDIA A100-SXM4-80GB", 4, "missing", "no shipped file describes 4 x NVIDIA A100-SXM4"),
    ],
)
def test_the_file_that_describes_this_machine(
    gpu: str, count: int, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name=gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = run_check("machine file", machine.probe_description)
    assert found.status == status
    assert said in found.detail
    if (gpu, count) == ("NVIDIA H200", 4):
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        apart = run_check("machine file", machine.probe_description).detail
        assert f"{count}-no-p2p describes {count} x {gpu}" in apart


@pytest.mark.parametrize(
    ("found", "without"), [([9, 9], False), ([8], False), ([10], True), ([9, 10], True)]
)
def test_decode_kernels_name_what_runs_without_them(
    monkeypatch: pytest.MonkeyPatch, found: list[int], without: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (found[index], 0))
    said = machine.probe_decode_kernels()
    assert "fused kernels in Triton" in said
    assert "biases of outputs or MLPs" in said
    assert ("need Hopper" in said) == without


def test_environment_lists_what_is_set() -> None:
    checks = machine.environment_checks({"NCCL_P2P_DISABLE": "1", "HOME": "/root"})
    assert [check.name for check in checks] == ["NCCL_P2P_DISABLE"]
    assert checks[0].detail.startswith("'1': 1 keeps NCCL off")
    assert [check.name for check in machine.environment_checks({})] == ["environment"]


@pytest.mark.parametrize(
    ("name", "packaged"),
    [("LADDER_DISPATCH", dispatch.PACKAGED), ("LADDER_OPS_TABLE", table.PACKAGED)],
)
def test_a_table_that_commands_cannot_read_fails(name: str, packaged: Path, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("[1]")
    for file, status in ((packaged, "ok"), (tmp_path / "none", "failed"),
                         (tmp_path / "table.json", "failed")):  # fmt: skip
        (check,) = machine.environment_checks({name: str(file)})
        assert (check.name, check.status) == (name, status)
    assert f"unset {name}" in check.detail


def test_the_interpreter_of_triton_is_listed() -> None:
    (check,) = machine.environment_checks({"TRITON_INTERPRET": "1"})
    assert "very slow" in check.detail


@pytest.mark.parametrize("value", ["abc", "0", "", "-1", "1.5"])
def test_a_number_of_threads_that_is_none_is_said(value: str) -> None:
    """Commands run with it: OpenMP ignores it."""
    (check,) = machine.environment_checks({"OMP_NUM_THREADS": value})
    assert check.status == "ok"
    assert "give 1 or more, or unset it" in check.detail
    for right in ("4", "2,1"):
        assert "unset it" not in machine.environment_checks({"OMP_NUM_THREADS": right})[0].detail


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        ({}, "ok", "one process"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "failed", "RANK=5 with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "x"}, "failed", "WORLD_SIZE=x, which is no whole number"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "failed", "WORLD_SIZE=2 without MASTER_ADDR"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"},
            "ok", "rank 1 of 2",
        ),
    ],
)  # fmt: skip
def test_the_launch_is_judged_as_commands_do(
    values: dict[str, str], status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an environment called ok with which every command is refused."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    check = run_check("launch", machine.probe_launch)
    assert check.status == status
    assert words in check.detail


def test_lowest_versions_are_pyproject_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [f"{each.name}>={each.minimum}" for each in installation.CORE] == project["dependencies"]
    extras = {
        name.split(";")[0] for names in project["optional-dependencies"].values() for name in names
    }
    for each in installation.OPTIONAL:
        stated = [name for name in extras if name.startswith(f"{each.name}>=")]
        assert stated == ([f"{each.name}>={each.minimum}"] if each.minimum else [])
    assert project["requires-python"] == f">={'.'.join(map(str, installation.PYTHON))}"


def test_importing_it_imports_no_package() -> None:
    code = (
        "import sys, ladder.doctor.command\n"
        "print({'torch', 'numpy', 'rich', 'yaml'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("older", "newer"), [("2.9.1", "2.11"), ("2.11", "2.13.0+cpu"), ("2.10.0a0+git1", "2.11.0a0")]
)
def test_versions_compare_as_numbers(older: str, newer: str) -> None:
    assert installation._numbers(older) < installation._numbers(newer)
