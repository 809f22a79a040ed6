"""The SLURM script, run by stand-ins for SLURM's commands: what it starts, and a preempted job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ladder.train.metrics import read_metrics
from tests import ROOT
from tests.distributed import PATIENCE
from tests.train.runs import recipe

SCRIPT = ROOT / "docs/train.sbatch"
# One process a task, as srun starts them; a signal goes to every task.
SRUN = """#!/bin/bash
if [[ " $* " != *" --cpus-per-task=${SLURM_CPUS_PER_TASK:-1} "* ]]; then
  echo "srun does not inherit --cpus-per-task" >&2
  exit 3
fi
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -TERM "${pids[@]}"' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
done
exit $code
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of one machine and two tasks."""
    commands = {
        "srun": SRUN,
        "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NTASKS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(SCRIPT), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow  # four processes that import torch; tests/train/test_faults.py sends SIGTERM, too
def test_a_job_that_is_preempted_goes_on(
    corpus: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    """SIGTERM while it trains: saved, exit code 0; the same job again resumes and finishes."""
    config = recipe(corpus, tmp_path / "unused", steps=100, tp=2)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config.to_dict()))
    run = tmp_path / "run"
    arguments = [str(tmp_path / "recipe.yaml"), "plan=ladder", f"out={run}"]
    job = start(arguments, slurm)
    limit = time.monotonic() + PATIENCE
    while not (run / "metrics.jsonl").exists() or not read_metrics(run):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 0, printed
    assert "told to stop (SIGTERM)" in printed
    steps = [record["step"] for record in read_metrics(run)]
    assert 0 < steps[-1] < 100
    assert (run / f"checkpoints/step-{steps[-1]:06d}").is_dir()

    job = start([*arguments, "steps=100"], slurm)
    printed, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, printed
    assert "held-out:" in printed
    assert [r["step"] for r in read_metrics(run) if "heldout_loss" in r] == [100]


def test_tasks_get_their_cores(tmp_path: Path, slurm: dict[str, str]) -> None:
    """And the script ends with srun's code, also where it is not 0."""
    (tmp_path / "bin/python").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS: $*"\nexit 7\n')
    environment = slurm | {"SLURM_CPUS_PER_TASK": "3"}
    job = start(["paper-1b", f"out={tmp_path}"], environment)
    printed, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 7, printed
    assert printed == f"3: -m ladder train paper-1b out={tmp_path}\n" * 2


def test_a_folder_is_asked_for(slurm: dict[str, str]) -> None:
    job = start(["paper-1b", "plan=ladder"], slurm)
    printed, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 2
    assert "give out=FOLDER" in printed
