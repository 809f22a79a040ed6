"""Loading a model folder for inference on this process's device and ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from ladder.checkpoint import WEIGHTS, TensorReader, load_model, newest, refuse_damage
from ladder.config import DTYPES
from ladder.models.errors import UserError, unknown
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.choose import INFERENCE, pick_reducer
from ladder.parallel.mesh import make_mesh


def as_dtype(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for `auto`, as stored."""
    if name != "auto" and name not in DTYPES:
        raise UserError(f"--dtype={name} must be auto, {' or '.join(DTYPES)}")
    return None if name == "auto" else getattr(torch, name)


def check_tp(tp: int) -> None:
    """Raise UserError unless tp is 0 or the number of processes."""
    processes = launch.world_size()
    if tp < 0:
        raise UserError(f"--tp={tp} must be 0 (all ranks) or more")
    if tp not in (0, processes):
        raise UserError(f"--tp={tp} with {processes} processes: start {tp}, with --nproc {tp}")


def load_for_inference(
    folder: str | Path,
    *,
    tp: int = 0,
    reducer: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
) -> Transformer:
    """Load and shard the model of a run's folder, a checkpoint or a Hugging Face folder.

    tp: the number of processes, or 0 for the same. reducer: a name in `INFERENCE`, or `auto` for
    the fastest that can run here. dtype: a name in `DTYPES`, or `auto` for the stored one. Raises
    UserError for options that cannot be met and for damaged weights. Every rank must call it.
    """
    wanted = as_dtype(dtype)
    if reducer not in ("auto", *INFERENCE):
        raise unknown("reducer", reducer, ("auto", *INFERENCE))
    joined = launch.join(device)
    processes = launch.world_size()
    check_tp(tp)
    if processes == 1 and reducer not in ("auto", "async"):
        raise UserError(
            f"--reducer={reducer} with one process, which has nothing to reduce: leave it out, or "
            f"start more processes with --nproc"
        )
    mesh = make_mesh(joined, processes)
    found = newest(Path(folder))
    launch.agree({"model": str(found)})
    refuse_damage(TensorReader(found, WEIGHTS), "use another checkpoint of the run")
    model = load_model(
        found,
        None if mesh is None else mesh["tp"],
        device=joined,
        dtype=wanted,
        reducer=pick_reducer(processes) if reducer == "auto" else reducer,
    )
    model.config.refuse_no_comm()
    model.eval()
    return model
