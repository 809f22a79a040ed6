"""`ladder doctor`: what this machine and installation can run.

Nothing but the standard library is imported up front: the doctor also examines an installation
without torch.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ladder.doctor import installation, machine
from ladder.doctor.check import DoctorCheck, run_check, run_check_with_torch
from ladder.next_step import free, say_next


def examine() -> list[DoctorCheck]:
    """Run every check; errors are part of the results, and not raised.

    This process joins no process group, and runs one tiny model on each kind of device.
    """
    return [
        run_check("python", installation.probe_python, core=True),
        DoctorCheck("platform", "ok", f"{platform.platform()}, {platform.machine()}"),
        run_check("ladder", installation.probe_ladder, core=True),
        *(
            run_check(each.name, partial(installation.probe_package, each), core=True)
            for each in installation.CORE
        ),
        run_check_with_torch("model", partial(installation.probe_model, "cpu"), core=True),
        run_check_with_torch("gloo", installation.probe_group, core=True),
        run_check("cpu", machine.probe_cpu),
        run_check("memory", machine.probe_memory),
        run_check_with_torch("torch threads", machine.probe_threads),
        run_check_with_torch("cuda", machine.probe_cuda),
        run_check("nvidia driver", machine.probe_driver),
        *machine.gpu_checks(),
        run_check_with_torch("model on gpu", machine.probe_model_on_gpu),
        run_check_with_torch("nccl", machine.probe_nccl),
        run_check("gpu links", machine.probe_links),
        run_check_with_torch("peer access", machine.probe_peers),
        run_check_with_torch("symmetric memory", machine.probe_symmetric_memory),
        run_check_with_torch("machine file", machine.probe_description),
        run_check_with_torch("bf16", machine.probe_bf16),
        run_check_with_torch("fp8 weights", machine.probe_fp8),
        run_check_with_torch("decode kernels", machine.probe_decode_kernels),
        *(
            run_check(each.name, partial(installation.probe_package, each))
            for each in installation.OPTIONAL
        ),
        run_check("launch", machine.probe_launch, core=True),
        *machine.environment_checks(os.environ),
    ]


def report(checks: Iterable[DoctorCheck]) -> str:
    """The report: an aligned table of the checks, and a last line that sums them up."""
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
    failed = [check.name for check in _failed(checks)]
    verdict = f"ladder cannot work here: {', '.join(broken)}" if broken else "ladder works here"
    if failed and not broken:
        verdict += f", except {', '.join(failed)}"
    return "\n".join((*lines, "", f"{verdict} ({counts})"))


def _failed(checks: Iterable[DoctorCheck]) -> list[DoctorCheck]:
    return [check for check in checks if check.status == "failed"]


def main(as_json: bool = False) -> int:
    """Print the report and what to do next; as JSON: {"ok": ..., "checks": [...]}. Returns 0 if all
    core checks are ok, else 1."""
    checks = examine()
    ok = all(check.status == "ok" for check in checks if check.core)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(report(checks))
        if failed := _failed(checks):
            print(f"next: mend {failed[0].name}: {failed[0].detail}")
        elif ok:
            out = free(Path("runs/tokenizer"))
            say_next("tokenizer", "train", "--vocab-size", 1024, "--out", out)
    return 0 if ok else 1
