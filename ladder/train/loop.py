"""The training loop: one process or many, TP and data parallel, resumable after any step."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ladder.checkpoint import checkpoints
from ladder.data.mix import open_sources
from ladder.data.verify import Verification
from ladder.lock import Lock, hold
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.apply import make_model
from ladder.parallel.choose import name_of
from ladder.parallel.data import data_parallel
from ladder.parallel.mesh import make_mesh
from ladder.progress import Progress
from ladder.train import state
from ladder.train.checkpointer import Checkpointer
from ladder.train.config import TrainConfig, due
from ladder.train.evaluate import Heldout, bits_per_byte
from ladder.train.interruption import Interruption
from ladder.train.metrics import Metrics, read_metrics
from ladder.train.objective import Distillation, Objective, cross_entropy
from ladder.train.optim import learning_rate, make_optimizer
from ladder.train.prefetch import Batch, Prefetcher, read_batch
from ladder.train.run import Run, check_run, fingerprint
from ladder.train.speed import Speed, utilisation
from ladder.train.step import Outcome, take_step, to_host

# The number of steps by which the host is ahead of the device. When an error ends the run, steps
# with an unknown outcome are not recorded.
BEHIND = {"cuda": 1, "cpu": 0}


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    device: str = "auto",
    stop_after: int | None = None,
) -> Heldout | None:
    """Train as `config` says, on every process of this launch; returns the last evaluation.

    resume: continue exactly from the run's newest checkpoint. stop_after: save and return after
    that many steps in total.
    """
    if not config.out:
        raise UserError("out='' is no folder; give the run's folder, or . for this one")
    here = launch.join(device)
    mesh = make_mesh(here, config.tp, config.dp_shard)
    launch.agree(config.to_dict())
    with ExitStack() as stack:  # the lock, entered first, is released last
        held = hold(Path(config.out) / state.LOCK, f"out={config.out}")
        lock = launch.on_first(lambda: stack.enter_context(held))
        data = open_sources(config.data)
        launch.agree({"data": fingerprint(data)})
        shards = stack.enter_context(Verification(data, launch.rank(), launch.world_size()))
        left = launch.from_first(lock is not None and lock.inherited)
        run = check_run(config, data, mesh, here, resume, left)
        return _train(run, shards, lock, stop_after)


def _train(
    run: Run, shards: Verification, lock: Lock | None, stop_after: int | None
) -> Heldout | None:
    """`train` for a run that has been checked. lock: the lock of its folder, on rank 0."""
    config, main = run.config, launch.rank() == 0
    model = make_model(
        run.model,
        getattr(torch, config.dtype),
        run.mesh,
        run.device,
        sequence_parallel=config.sequence_parallel,
        activation_checkpointing=config.activation_checkpointing,
        compile=config.compile,
        reducer=config.reducer,
        # For the reducer `auto`, whose operators were timed in steps of one pass only.
        shape=(run.micro, config.seq_len) if run.micro == config.batch_size else (0, 0),
    )
    optimizer = make_optimizer(model, config)
    objective, recorded = _objective(run)
    if run.checkpoint is None:
        run.source.fill(model, config.seed)
    else:
        state.restore(run.checkpoint, model, optimizer, run.start, run.model_after(run.start))
    _say(*run.going_on())
    for damage in launch.gathered(shards.soon()):
        if damage:
            raise UserError(damage)
    remote = launch.on_first(run.begin)
    _say(_header(run, model), *run.notes())

    def read(step: int) -> Batch:
        shards.check()
        dp, rank = data_parallel(run.mesh)
        return read_batch(run.windows, config, step, rank, dp, run.micro, run.data.eos_id)

    last = min(config.steps, stop_after or config.steps)
    with (
        Metrics(run.folder, config.tensorboard, run.start, main, remote) as metrics,
        Progress("train", config.steps, "steps", quiet=not main, start=run.start) as progress,
        Interruption() as interruption,
        Checkpointer(
            run.folder, model, optimizer, run.data, run.mesh, config.keep_checkpoints,
            run.source.folder, lock,
        ) as checkpointer,
        Prefetcher(read, range(run.start, last), run.device) as batches,
    ):  # fmt: skip
        trainer = Trainer(
            run, model, optimizer, objective, recorded,
            batches, metrics, progress, checkpointer, interruption,
        )  # fmt: skip
        result = trainer.train(last)
    if result is not None:
        _say(
            f"held-out: {result.bits_per_byte:.4f} bits per byte, loss {result.loss:.4f} "
            f"({result.tokens:,} tokens)",
            f"run: {run.folder}",
        )
    return result


def _objective(run: Run) -> tuple[Objective, tuple[str, ...]]:
    """The run's objective, and the names of its sums after the loss, which are recorded."""
    if run.teacher is None:
        return cross_entropy, ()
    folder = Path(run.teacher["folder"])
    distillation = Distillation(run.config, folder, run.model, run.data, run.mesh, run.device)
    return distillation, distillation.names


def _header(run: Run, model: Transformer) -> str:
    config, count = run.config, sum(shape.numel() for shape in model.shapes.values())
    plan, ranks = run.model_after(run.start).plan, model.reducer.ranks
    virtual = f", {ranks.held} virtual ranks" if ranks.held > 1 else ""
    reducer = f", reducer {name_of(model.reducer)}" if config.tp > 1 else ""
    tokens = config.steps * config.batch_size * config.seq_len
    return (
        f"plan {plan.name}: {plan.collectives} collectives per token, {sum(plan.blocking)} "
        f"blocking; {count:,} parameters; {len(run.data.split('train')):,} training tokens, "
        f"{tokens:,} to be seen; tp {config.tp}{virtual}{reducer}, dp {run.dp}, "
        f"{config.dtype}"
    )


def _say(*lines: str) -> None:
    """Print lines on rank 0."""
    if lines and launch.rank() == 0:
        print(*lines, sep="\n", flush=True)


class Launched(NamedTuple):
    """A step in flight (0 is the first), with this rank's windows and the learning rate.

    outcome: waits for the step and returns its outcome. told: waits for the answer of all ranks,
    and returns [0] unless one of them was told to stop.
    """

    step: int
    windows: list[int]
    rate: float
    outcome: Callable[[], Outcome]
    told: Callable[[], list[float]]


@dataclass
class Trainer:
    """The state of a run in progress.

    recorded: the names of the objective's sums after the loss. in_flight: launched steps whose
    outcome the host does not know yet. saved: the number of steps in the last checkpoint. stopped:
    whether a rank was told to stop.
    """

    run: Run
    model: Transformer
    optimizer: torch.optim.Optimizer
    objective: Objective
    recorded: tuple[str, ...]
    batches: Prefetcher
    metrics: Metrics
    progress: Progress
    checkpointer: Checkpointer
    interruption: Interruption
    in_flight: deque[Launched] = field(default_factory=deque, init=False)
    stopped: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        config = self.run.config
        self.saved = self.run.start
        self.speed = Speed(config.batch_size * config.seq_len, self.batches, self.run.start)

    def train(self, last: int) -> Heldout | None:
        """Train up to `last` steps in total; returns the last evaluation, None if told to stop."""
        config, result = self.run.config, None
        if self.run.unevaluated:
            result = self.evaluate(self.run.start)
            if result is None:
                self.say_told(self.run.start, missed=True)
                return None
        for step, batch in zip(range(self.run.start, last), self.batches, strict=True):
            self.launch(step, batch)
            done, missed = step + 1, False
            evaluates = config.evaluates(done)
            saves = done == last or due(done, config.checkpoint_interval)
            self.settle(last, drain=evaluates or saves)
            if saves or self.stopped:  # first: if the evaluation fails, no step is lost
                self.save(done)
            if evaluates:
                result = self.evaluate(done)
                missed = result is None
            if self.stopped and (done < last or missed):
                if self.saved < done:  # told during the evaluation
                    self.save(done)
                self.say_told(done, missed)
                return None
        self.checkpointer.wait()
        return result

    def say_told(self, done: int, missed: bool) -> None:
        """Say, once it is saved, that the run was told to stop. missed: an evaluation was due."""
        self.checkpointer.wait()
        _say(
            f"told to stop (SIGTERM): saved step {done} of {self.run.config.steps}"
            f"{', not evaluated' if missed else ''}; continue with --resume",
            f"run: {self.run.folder}",
        )

    def launch(self, step: int, batch: Batch) -> None:
        """Launch a step without waiting for it."""
        run, config = self.run, self.run.config
        rate = learning_rate(step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        outcome = take_step(
            self.model,
            self.optimizer,
            batch,
            run.mesh,
            config.grad_clip,
            self.objective,
            run.source.schedule.plan(step),
        )
        told = to_host(self.interruption.on_any_rank(run.device))
        self.in_flight.append(Launched(step, batch.windows, rate, outcome, told))

    def settle(self, last: int, drain: bool) -> None:
        """Wait for steps in flight and record them, until BEHIND steps are left.

        drain: wait for all of them, as also once a rank was told to stop. last: the number of steps
        after which training ends. Raises UserError if a step's result is not finite.
        """
        ahead = BEHIND[self.run.device.type]
        while self.in_flight and (drain or self.stopped or len(self.in_flight) > ahead):
            launched = self.in_flight.popleft()
            outcome = launched.outcome()
            if not outcome.finite:
                raise self._not_finite(launched, outcome)
            self.stopped = self.stopped or launched.told() != [0]
            done = launched.step + 1
            final = not self.in_flight and (done == last or self.stopped)
            if due(done, self.run.config.log_interval) or final:
                self._log(launched, outcome)

    def evaluate(self, done: int) -> Heldout | None:
        """Measure and record the held-out loss after `done` steps; None if told to stop first."""
        if self.stopped:
            return None
        run, config = self.run, self.run.config
        result = bits_per_byte(
            self.model, run.data, config.seq_len, run.micro, config.eval_windows, run.mesh,
            config.mask_documents, run.model_after(done).plan,
            self.interruption.between(run.device),
        )  # fmt: skip
        if result is None:
            self.stopped = True
            return None
        self.metrics.write(
            done, heldout_loss=result.loss, heldout_bits_per_byte=result.bits_per_byte
        )
        self.speed.begin(done)
        return result

    def save(self, done: int) -> None:
        """Begin to save the state after `done` steps."""
        self.saved = done
        seconds = self.checkpointer.save(
            self.run.checkpoint_record(done), self.run.model_after(done)
        )
        self.metrics.write(done, checkpoint_seconds=seconds)
        self.speed.begin(done)

    def _log(self, launched: Launched, outcome: Outcome) -> None:
        run, done = self.run, launched.step + 1
        rates = self.speed.up_to(done)
        speed = rates["tokens_per_second"]
        self.metrics.write(
            done,
            **dict(zip(("loss", *self.recorded), outcome.sums, strict=True)),
            learning_rate=launched.rate,
            gradient_norm=outcome.norm,
            tokens=done * self.speed.tokens_per_step,
            **rates,
            **utilisation(run.model, run.config.seq_len, speed, run.device),
        )
        self.progress.update(done, f"loss {outcome.sums[0]:.3f}, {speed:,.0f} tokens/s")

    def _not_finite(self, launched: Launched, outcome: Outcome) -> UserError:
        """The error for a step that is not finite; saves the steps before it. A collective."""
        step = launched.step
        where = _first_not_finite(outcome.own_loss, launched.windows)
        kept = f"The run up to step {step} is saved" if step else "No step was before it"
        try:
            if self.saved < step or self.checkpointer.lost():
                config = self.run.model_after(step)
                self.checkpointer.save(self.run.checkpoint_record(step), config, keep_all=True)
            self.checkpointer.wait()
        except UserError as failed:
            kept = f"The steps before it could not all be saved: {failed}"
        return UserError(
            f"step {step + 1}: loss={outcome.sums[0]}, gradient norm={outcome.norm}: not finite"
            f"{where}. {kept}; {self._remedy(step)}"
        )

    def _remedy(self, before: int) -> str:
        """What to do about a step that is not finite, after `before` others. A collective."""
        config = self.run.config
        asked = f"start another run with a lower lr={config.lr}"
        if config.init and not before:
            asked = f"init={config.init} may hold NaN, as `ladder convert` would say; or {asked}"
        if config.lr * config.weight_decay >= 1:  # each step subtracts that share of every weight
            asked += f" or weight_decay={config.weight_decay} (their product must be below 1)"
        elif config.dtype != "float32":
            asked += ", or dtype=float32"
        healthy = None
        if launch.rank() == 0:
            with contextlib.suppress(UserError):  # of metrics.jsonl: the step is the news
                healthy = _healthy(self.run.folder)
        healthy = launch.from_first(healthy)
        return f"{asked}, perhaps from init={healthy}" if healthy else asked


def _healthy(folder: Path) -> Path | None:
    """A run's newest checkpoint after which a loss no higher than its first one was recorded."""
    losses = [(each["step"], each["loss"]) for each in read_metrics(folder) if "loss" in each]
    good = max((step for step, loss in losses if loss <= losses[0][1]), default=0)
    # The loss of a step is that of the weights before it.
    return next((path for step, path in reversed(checkpoints(folder)) if step < good), None)


def _first_not_finite(loss: float, drawn: list[int]) -> str:
    """The first rank with a loss that is not finite, and its windows, as text. A collective."""
    everyone = launch.gathered((loss, drawn))
    for rank, (value, windows) in enumerate(everyone):
        if not math.isfinite(value):
            return f"; first on rank {rank}, whose loss was {value}, of the windows {windows}"
    whole = sorted({window for _, windows in everyone for window in windows})
    return f"; every rank's loss was finite, but not the gradient, of the windows {whole}"
