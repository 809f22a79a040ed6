"""The training loop: one process or many, TP and data parallel, resumable after any step."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ladder.checkpoint import checkpoints, read_json
from ladder.data.batches import TokenData
from ladder.data.mix import open_sources
from ladder.data.verify import Verification
from ladder.files import write_text
from ladder.lock import Lock, hold
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.apply import make_model
from ladder.parallel.data import data_parallel
from ladder.progress import Progress
from ladder.train import state
from ladder.train.checkpointer import Checkpointer
from ladder.train.config import TrainConfig, refuse_changes
from ladder.train.efficiency import flops_per_token, peak_flops
from ladder.train.evaluate import Heldout, bits_per_byte, check_heldout
from ladder.train.interruption import Interruption
from ladder.train.metrics import Metrics, check_packages, connect
from ladder.train.metrics import read as read_metrics
from ladder.train.objective import Distillation, Objective, cross_entropy
from ladder.train.optim import learning_rate, make_optimizer
from ladder.train.prefetch import Batch, Prefetcher, read_batch
from ladder.train.start import starting_point
from ladder.train.step import Outcome, take_step, to_host

# How many steps the host is ahead: on a CPU there is nothing to be ahead of. A step that is not
# known yet when an error ends the run is not recorded.
BEHIND = {"cuda": 1, "cpu": 0}


class Launched(NamedTuple):
    """A step (0 is the first), the windows that this rank drew for it, and its learning rate.

    outcome, told: wait for what it came to, and whether a rank was told to stop by then (not 0).
    """

    step: int
    windows: list[int]
    rate: float
    outcome: Callable[[], Outcome]
    told: Callable[[], list[float]]


class Speed:
    """Tokens a second, of all ranks and of each, and the share of the host's time that went into
    waiting for batches."""

    def __init__(self, tokens_per_step: int, batches: Prefetcher, step: int) -> None:
        self.tokens_per_step, self.batches = tokens_per_step, batches
        self.begin(step)

    def begin(self, step: int) -> None:
        """Count from now on, after so many steps."""
        self.step, self.since, self.waited = step, time.perf_counter(), self.batches.waited

    def up_to(self, step: int) -> dict[str, float]:
        """Of the steps up to this one; the next are counted from here."""
        seconds = time.perf_counter() - self.since
        rate = self.tokens_per_step * (step - self.step) / seconds
        found = {
            "tokens_per_second": rate,
            "tokens_per_second_per_gpu": rate / launch.world_size(),
            "data_wait": (self.batches.waited - self.waited) / seconds,
        }
        self.begin(step)
        return found


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str = "auto",
    stop_after: int | None = None,
) -> Heldout | None:
    """Train as `config` says, on every process of this launch; returns the last evaluation.

    resume: go on from the run's newest checkpoint, exactly where it stopped. stop_after: save and
    return after that many steps in all.
    """
    place_ = launch.join(device)
    mesh = launch.make_mesh(place_, config.tp, config.dp_shard)
    launch.agree(config.to_dict())
    with ExitStack() as stack:
        held = hold(Path(config.out) / state.LOCK, f"out={config.out}")
        lock = _on_first(lambda: stack.enter_context(held))
        return _train(config, resume, stop_after, place_, mesh, lock, stack)


def _train(
    config: TrainConfig,
    resume: bool,
    stop_after: int | None,
    place_: torch.device,
    mesh: DeviceMesh | None,
    lock: Lock | None,
    stack: ExitStack,
) -> Heldout | None:
    """`train`, in a run's folder that is this launch's alone, by the lock that rank 0 holds.

    stack: what is entered there ends before the lock is let go of.
    """
    run = Path(config.out)
    data = open_sources(config.data)
    content = [data.index["tokenizer_sha256"], data.index["splits"]]  # not where it came from
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    launch.agree({"data": fingerprint})
    shards = stack.enter_context(Verification(data, launch.rank(), launch.world_size()))
    windows = data.windows("train", config.seq_len)
    config = config.with_steps(len(windows))
    found = checkpoints(run)
    source = None if resume else starting_point(config, data)
    record = _check_run(run, config, fingerprint, resume, found)
    if source is None:  # a run that goes on has its model
        checkpoint = found[-1][1] if record else None
        source = starting_point(config, data, checkpoint, (record or {}).get("first_plan"))
    model_config = source.config
    recipe = config.resolved(model_config)
    if resume and not record:
        _check_restart(run, config, recipe)
    start = record["step"] if record else 0
    launch.agree({"model": model_config.to_dict()})
    launch.agree({"start": start})  # before any rank writes what another would find
    dp, dp_rank = data_parallel(mesh)
    if config.batch_size % dp:
        raise UserError(
            f"batch_size={config.batch_size} is not divisible by the {dp} data-parallel "
            f"ranks; change one of them"
        )
    share = config.batch_size // dp
    micro = config.micro_batch_size or share
    if share % micro:
        raise UserError(
            f"micro_batch_size={micro} does not divide the {share} sequences of each "
            f"rank's batch; choose a divisor"
        )
    check_heldout(data, config.seq_len, config.eval_windows)
    heldout = len(data.windows("heldout", config.seq_len).first(config.eval_windows or None))
    for sequences in (micro, heldout % micro or micro):  # the last batch is what is left
        config.check_rows(sequences)
    _on_first(lambda: check_packages(config.tensorboard, config.wandb))

    model = make_model(
        source.at(max(start - 1, 0)),  # as it was saved
        getattr(torch, config.dtype),
        mesh,
        place_,
        sequence_parallel=config.sequence_parallel,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
    )
    optimizer = make_optimizer(model, config)
    objective: Objective = cross_entropy
    recorded: tuple[str, ...] = ()
    if config.teacher:
        objective = Distillation(config, model_config, data, mesh, place_)
        recorded = objective.names
    main = launch.rank() == 0
    layout = {"tp": config.tp, "dp": dp, "dp_shard": model.data_shard[1]}
    if record:
        state.restore(found[-1][1], model, optimizer, start)
        before = _layout(config, record["config"].get("micro_batch_size"), record.get("layout"))
        if main and before != (now := _layout(config, config.micro_batch_size, layout)):
            print(
                f"resuming at {now} what ran at {before}: the same run up to rounding, not to the "
                f"bit",
                flush=True,
            )
    else:
        if main and resume:
            print("the run ended before its first checkpoint: it starts again", flush=True)
        source.fill(model, config.seed)

    for damage in launch.gathered(shards.soon()):
        if damage:
            raise UserError(damage)

    def begin() -> Any:
        state.remove_partial(run)
        remote = connect(run, config.wandb, recipe)
        write_text(run / "recipe.json", json.dumps(recipe, indent=1) + "\n")  # now it is taken
        return remote

    remote = _on_first(begin)
    if main:
        notes = (*windows.notes(), *source.schedule.notes())
        print(_header(config, model, data, dp), *notes, sep="\n", flush=True)

    last = min(config.steps, stop_after or config.steps)
    result: Heldout | None = None
    tokens_per_step = config.batch_size * config.seq_len

    def read(step: int) -> Batch:
        shards.check()
        return read_batch(windows, config, step, dp_rank, dp, micro, data.eos_id)

    with (
        Metrics(run, config.tensorboard, start, main, remote) as metrics,
        Progress("train", config.steps, "steps", quiet=not main, start=start) as progress,
        Interruption() as interruption,
        Checkpointer(
            run, model, optimizer, data, mesh, config.keep_checkpoints, source.folder, lock
        ) as checkpointer,
        Prefetcher(read, range(start, last), place_) as batches,
    ):

        def save(done: int, keep_all: bool = False) -> float:
            record = {
                "step": done,
                "data": fingerprint,
                "layout": layout,
                "config": config.to_dict(),
                **({"first_plan": source.first.to_dict()} if config.convert_layers else {}),
            }
            return checkpointer.save(record, keep_all)

        def settle(launched: Launched) -> Outcome:
            """Learn what became of a step.

            Raises UserError where it is not finite, having saved the steps before it.
            """
            outcome = launched.outcome()
            if not outcome.finite:
                step = launched.step
                where = _first_not_finite(outcome.own_loss, launched.windows)
                kept = f"The run up to step {step} is saved" if step else "No step was before it"
                try:
                    if saved < step:
                        model.config = source.at(step - 1)
                        save(step, keep_all=True)
                    checkpointer.wait()
                except UserError as failed:
                    kept = f"The steps before it could not all be saved: {failed}"
                raise UserError(
                    f"step {step + 1}: loss={outcome.sums[0]}, gradient norm={outcome.norm}: not "
                    f"finite{where}. {kept}; begin another run with a lower lr={config.lr}, or "
                    f"dtype=float32, from init={run} perhaps"
                )
            return outcome

        def write(launched: Launched, outcome: Outcome) -> None:
            known = launched.step + 1
            rates = speed.up_to(known)
            metrics.write(
                known,
                **dict(zip(("loss", *recorded), outcome.sums, strict=True)),
                learning_rate=launched.rate,
                gradient_norm=outcome.norm,
                tokens=known * tokens_per_step,
                **rates,
                **utilisation(model_config, config.seq_len, rates["tokens_per_second"], place_),
            )
            told = f"loss {outcome.sums[0]:.3f}, {rates['tokens_per_second']:,.0f} tokens/s"
            progress.update(known, told)

        speed = Speed(tokens_per_step, batches, start)
        saved = start
        stopped = False
        flying: deque[Launched] = deque()  # steps of which the host does not know yet
        for step, batch in zip(range(start, last), batches, strict=True):
            if source.schedule.plan(step) is not model.config.plan:
                model.config = source.at(step)
            rate = learning_rate(step, config)
            for group in optimizer.param_groups:
                group["lr"] = rate
            outcome = take_step(model, optimizer, batch, mesh, config.grad_clip, objective)
            told = to_host(interruption.on_any_rank(place_))
            flying.append(Launched(step, batch.windows, rate, outcome, told))

            done = step + 1
            evaluates = done == config.steps or bool(
                config.eval_interval and done % config.eval_interval == 0
            )
            due = bool(config.checkpoint_interval) and done % config.checkpoint_interval == 0
            drains = done == last or evaluates or due
            while flying and (drains or stopped or len(flying) > BEHIND[place_.type]):
                launched = flying.popleft()
                came_to = settle(launched)
                stopped = stopped or launched.told() != [0]
                final = not flying and (done == last or stopped)
                if (launched.step + 1) % config.log_interval == 0 or final:
                    write(launched, came_to)
            ended = done == last or stopped
            if evaluates:
                result = bits_per_byte(
                    model, data, config.seq_len, micro, config.eval_windows, mesh,
                    config.mask_documents,
                )  # fmt: skip
                metrics.write(
                    done,
                    heldout_loss=result.loss,
                    heldout_bits_per_byte=result.bits_per_byte,
                )
                speed.begin(done)
            if ended or due:
                saved = done
                metrics.write(done, checkpoint_seconds=save(done))
                if ended:
                    checkpointer.wait()
                speed.begin(done)
            if stopped and done < last:
                if main:
                    print(
                        f"told to stop (SIGTERM): saved step {done} of {config.steps}; go on with "
                        f"--resume\nrun: {run}",
                        flush=True,
                    )
                return None
    if main and result is not None:
        print(
            f"held-out: {result.bits_per_byte:.4f} bits per byte, loss {result.loss:.4f} "
            f"({result.tokens:,} tokens)\nrun: {run}",
            flush=True,
        )
    return result


def _check_run(
    run: Path,
    config: TrainConfig,
    fingerprint: str,
    resume: bool,
    found: list[tuple[int, Path]],
) -> dict[str, Any] | None:
    """The record of the checkpoint to go on from, None to start at step 0.

    Raises UserError where the run's folder does not fit what was asked.
    """
    begun = (run / "recipe.json").exists() or (run / "metrics.jsonl").exists()
    if not resume:
        if found or begun:
            raise UserError(
                f"out={config.out} holds a run already; add --resume to go on with it, "
                f"or choose another out"
            )
        for name in ("index.json", "config.json", "tokenizer.json"):
            if (run / name).exists():  # data, a model, a tokenizer
                raise UserError(
                    f"out={config.out} holds something else, {name}; choose another out"
                )
        return None
    if not found and begun:
        return None  # it ended before its first checkpoint
    if not found:
        raise UserError(
            f"--resume: out={config.out} has no checkpoint to go on from; leave "
            f"--resume out to start"
        )
    record = state.verified(found)
    refuse_changes(record["config"], config, run)
    if record.get("data") != fingerprint:
        raise UserError(
            f"data={config.data} has changed since the run in {run} was started; "
            f"resume with the data it was started with, several sources in their old order and "
            f"weights"
        )
    if record["step"] >= config.steps:
        raise UserError(
            f"out={config.out} has finished its steps={config.steps} already; to train its weights "
            f"further, start another run from them: init={config.out} and another out"
        )
    return record


def _on_first(action: Callable[[], Any]) -> Any:
    """What `action` gives on rank 0, where alone it is done; elsewhere None.

    Raises UserError on every rank where it does.
    """
    found, failed = None, ""
    if launch.rank() == 0:
        try:
            found = action()
        except UserError as error:
            failed = str(error)
    if failed := launch.from_first(failed):
        raise UserError(failed)
    return found


def _layout(config: TrainConfig, micro: int | None, layout: Mapping[str, int] | None) -> dict:
    """A layout, as a checkpoint has it, with the micro-batches that a rank's share is cut into."""
    layout = layout or {}
    return {**layout, "micro_batch_size": micro or config.batch_size // layout.get("dp", 1)}


def _check_restart(run: Path, config: TrainConfig, recipe: dict[str, Any]) -> None:
    """Raise UserError unless the run in that folder, which has no checkpoint, loses nothing where
    `recipe` starts it again: it must be its own, and have had no checkpoint yet."""
    path = run / "recipe.json"
    records = read_metrics(run)
    if path.is_file():
        old = read_json(path)
        refuse_changes(old, config, run)
        model = old.get("model") or {}
        if not isinstance(model, dict):
            raise UserError(
                f"{path} has model={model!r}, no object of fields: put it right, or remove {run} "
                f"to start again"
            )
        for key, before in model.items():
            if key == "rope_scaling" and isinstance(before, dict):
                before = {"rope_type": "llama3", **before}  # there once was no other
            if key != "name" and before != recipe["model"].get(key):
                raise UserError(
                    f"model.{key}={recipe['model'].get(key)!r} differs from the run in {run}, "
                    f"which was started with model.{key}={before!r}; resume with that, or start a "
                    f"new run with another out"
                )
    elif records:
        raise UserError(
            f"--resume: out={config.out} has neither a checkpoint nor recipe.json, and its "
            f"metrics.jsonl would be lost; put them back, or choose another out"
        )
    if (run / state.SAVED).exists():
        raise UserError(
            f"--resume: out={config.out} has no checkpoint, and had one, by its {state.SAVED}; put "
            f"it back, or remove {run} to start again"
        )


def _first_not_finite(loss: float, drawn: list[int]) -> str:
    """Whose loss was the first that is not finite, and on which windows; all ranks must call it."""
    everyone = launch.gathered((loss, drawn))
    for rank, (value, windows) in enumerate(everyone):
        if not math.isfinite(value):
            return f"; first on rank {rank}, whose loss was {value}, of the windows {windows}"
    whole = sorted({window for _, windows in everyone for window in windows})
    return (
        f"; every rank's loss was finite, and what is not is the gradient, of the windows {whole}"
    )


def utilisation(
    config: ModelConfig, seq_len: int, speed: float, device: torch.device
) -> dict[str, float]:
    """On GPUs: the most memory so far (GiB, this rank's), and where its peak is known the MFU.

    memory_reserved_gib: with what the allocator holds beside tensors, which decides what fits: the
    memory of a tensor that another stream used is free again only when that stream is done.
    """
    if device.type != "cuda":
        return {}
    found = {
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }
    peak = peak_flops(device)
    if peak is not None:
        found["mfu"] = speed * flops_per_token(config, seq_len) / (peak * launch.world_size())
    return found


def _header(config: TrainConfig, model: Transformer, data: TokenData, dp: int) -> str:
    count = sum(shape.numel() for shape in model.shapes.values())
    plan, ranks = model.config.plan, model.reducer.ranks
    virtual = f", {ranks.held} virtual ranks" if ranks.held > 1 else ""
    tokens: Any = config.steps * config.batch_size * config.seq_len
    return (
        f"plan {plan.name}: {plan.collectives} collectives per token, {sum(plan.blocking)} "
        f"blocking; {count:,} parameters; {len(data.split('train')):,} training tokens, "
        f"{tokens:,} to be seen; tp {config.tp}{virtual}, dp {dp}, {config.dtype}"
    )
