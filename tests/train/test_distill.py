"""Learning from a teacher: the divergence, over a split vocabulary too, and training by it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.checkpoint import (
    CHECKSUMS,
    WEIGHTS,
    model_entries,
    model_hash,
    newest,
    read_config,
    write_config,
    write_tensors,
)
from ladder.convert.command import convert
from ladder.models import Ranks, Reducer, UserError
from ladder.models import loss as losses_module
from ladder.models.loss import teacher_losses
from ladder.parallel.reducers import AsyncReducer
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from ladder.train.resuming import refuse_changes
from tests.chats import make_chats, prepare_chats
from tests.corpus import swap_two_tokens
from tests.distributed import Pools, tp_mesh
from tests.samples import full_model, small_config
from tests.train.runs import (
    fail_on_ranks,
    flip,
    recipe,
    recorded,
    run_on_ranks,
    seal,
    stored,
    untimed,
    weights,
)

VOCABULARY = 301  # divides unevenly


def sample(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of a student and a teacher, targets of which some are to be ignored, weights."""
    source = torch.Generator().manual_seed(5)
    student, teacher = 4 * torch.randn(2, 3, 7, VOCABULARY, generator=source, dtype=torch.float64)
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=source)
    targets[0, :3] = -100
    scale = torch.rand(3, 7, generator=source, dtype=torch.float64) + 0.5
    return student.to(dtype), teacher.to(dtype), targets, scale


def reference(temperature: float) -> tuple[Tensor, Tensor]:
    student, teacher, targets, scale = sample(torch.float64)
    student.requires_grad_()
    own, wanted = (F.log_softmax(each / temperature, -1) for each in (student, teacher))
    found = (wanted.exp() * (wanted - own)).sum(-1).where(targets >= 0, 0.0)
    (found * scale).sum().backward()
    assert student.grad is not None
    return found.detach(), student.grad


def of_process(
    rank: int, world: int, dtype: torch.dtype, temperature: float
) -> tuple[Tensor, Tensor]:
    """The losses, and the gradient of this process's part of the vocabulary."""
    student, teacher, targets, scale = sample(dtype)
    reducer: Reducer = Reducer()
    if world > 1:
        reducer = AsyncReducer(Ranks(world, rank, 1), tp_mesh(world).get_group())
    size = -(-VOCABULARY // world)
    mine = slice(rank * size, (rank + 1) * size)
    logits = student[..., mine].contiguous().requires_grad_()
    found = teacher_losses(logits, teacher[..., mine], targets, temperature, reducer)
    (found * scale).sum().backward()
    assert logits.grad is not None
    return found.detach(), logits.grad


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_divergence_is_that_of_whole_distributions(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, world: int, temperature: float
) -> None:
    """Values and gradients in float64. Catches sums over a part of the vocabulary, the reversed
    divergence, a temperature on one side alone, gradients where no loss is wanted."""
    monkeypatch.setattr(losses_module, "ROWS", 4)
    arguments = (torch.float64, temperature)
    found = [of_process(0, 1, *arguments)] if world == 1 else pools(2).run(of_process, *arguments)
    value, grad = reference(temperature)
    for each, _ in found:
        assert torch.allclose(each, value, atol=1e-12)
    assert torch.allclose(torch.cat([each for _, each in found], -1), grad, atol=1e-12)
    assert value.min() >= 0


def test_in_bfloat16_it_is_rounded_once() -> None:
    value, grad = of_process(0, 1, torch.bfloat16, 1.0)
    student, teacher, *_ = sample(torch.bfloat16)
    own, wanted = (F.log_softmax(each.double(), -1) for each in (student, teacher))
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    exact = (wanted.exp() * (wanted - own)).sum(-1)
    assert torch.allclose(value[1:].double(), exact[1:], rtol=1e-5)
    assert torch.equal(value[0, :3], torch.zeros(3))
    same, zero = teacher.clone().requires_grad_(), torch.zeros(3, 7, dtype=torch.int64)
    nothing = teacher_losses(same, teacher, zero, 1.0, Reducer())
    assert nothing.abs().max() < 1e-5


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    train(recipe(corpus, run, plan="standard", steps=60), device="cpu")
    return run


@pytest.fixture(scope="module")
def chats(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    return prepare_chats(folder, corpus.parent / "tokenizer", make_chats(60))


def distilling(data: Path, base: Path, out: Path, **changes: Any) -> TrainConfig:
    settings = {"seq_len": 64, "plan": "ladder", "lr": 2e-3, "model": None}
    settings |= {"init": str(base), "teacher": str(base)}
    return recipe(data, out, **settings | changes)


def test_a_converted_model_comes_back_to_its_teacher(
    corpus: Path, base: Path, tmp_path: Path
) -> None:
    """The model is as large as its teacher and starts as it, wired otherwise: what is learnt is
    the wiring. The first loss is the mixture of what was recorded."""
    settings = {"distill_weight": 0.75, "distill_temperature": 2.0, "steps": 60}
    train(distilling(corpus, base, tmp_path / "run", **settings), device="cpu")
    divergence = recorded(tmp_path / "run", "divergence")
    assert divergence[0] > 1e-3
    assert divergence[-1] < 0.5 * divergence[0]
    names = ("loss", "cross_entropy", "divergence")
    for total, hard, soft in zip(*(recorded(tmp_path / "run", n) for n in names), strict=True):
        assert total == pytest.approx(0.25 * hard + 0.75 * 4 * soft, rel=1e-5)
    before = weights(base)
    train(distilling(corpus, base, tmp_path / "same", plan="standard", steps=3), device="cpu")
    assert recorded(tmp_path / "same", "divergence")[0] == pytest.approx(0, abs=1e-6)
    for name, value in weights(base).items():
        assert torch.equal(value, before[name])
    assert set(stored(tmp_path / "run" / "checkpoints" / "step-000060")) == set(before)


@pytest.mark.parametrize(("tp", "dp_shard"), [(2, 1), (1, 1), (1, 0)])
def test_ranks_distil_as_one_process(
    chats: Path, base: Path, tmp_path: Path, pools: Pools, tp: int, dp_shard: int
) -> None:
    """Conversations, where only answers count; and a run that goes on, to the bit."""
    alone = distilling(chats, base, tmp_path / "alone")
    train(alone, device="cpu")
    layout = {"out": str(tmp_path / "ranks"), "tp": tp, "dp_shard": dp_shard}
    pools(2).run(run_on_ranks, alone.to_dict() | layout | {"micro_batch_size": 1}, None)
    for name in ("loss", "cross_entropy", "divergence"):
        found = recorded(tmp_path / "ranks", name)
        assert found == pytest.approx(recorded(tmp_path / "alone", name), abs=1e-4), name
    after = weights(tmp_path / "ranks")
    for name, value in weights(tmp_path / "alone").items():
        assert (value - after[name]).abs().max() < 2e-4, name


def test_resume_is_bitwise(chats: Path, base: Path, tmp_path: Path) -> None:
    train(distilling(chats, base, tmp_path / "whole"), device="cpu")
    config = distilling(chats, base, tmp_path / "run")
    train(config, device="cpu", stop_after=3)
    train(config, device="cpu", resume=True)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


def test_the_teacher_may_move_and_not_change(corpus: Path, base: Path, tmp_path: Path) -> None:
    """Nor is `init` read again. Catches a teacher that has trained on since, and one of as many
    bytes; whole is the run that never stopped."""
    train(distilling(corpus, base, tmp_path / "whole"), device="cpu")
    moving = tmp_path / "base"
    shutil.copytree(base, moving)
    run = tmp_path / "run"
    train(distilling(corpus, moving, run), device="cpu", stop_after=3)
    last = newest(moving)
    step = last.with_name("step-000061")
    shutil.copytree(last, step)
    config = (step / "config.json").read_text()
    (step / "config.json").write_text(config.replace('"standard"', '"ladder"'))
    with pytest.raises(UserError, match=r"is .*step-000061, another model .* started with .*60;"):
        train(distilling(corpus, moving, run), device="cpu", resume=True)
    shutil.rmtree(step)
    moved = moving.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="teacher='' differs"):
        train(distilling(corpus, moved, run, teacher=""), device="cpu", resume=True)
    train(distilling(corpus, moved, run), device="cpu", resume=True)
    assert untimed(run) == untimed(tmp_path / "whole")


def test_models_are_told_apart_by_their_weights(base: Path, tmp_path: Path) -> None:
    """By sizes and both ends, wherever they lie: not by what else a checkpoint has."""
    folder = tmp_path / "model"
    shutil.copytree(newest(base), folder)
    (folder / CHECKSUMS).unlink()
    for each in folder.glob("*optimizer*"):
        each.unlink()
    assert model_hash(folder) == model_hash(newest(base))
    found = {model_hash(folder)}
    file = next(folder.glob("*model*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found.add(model_hash(folder))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"standard"', '"ladder"'))
    found.add(model_hash(folder))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill_weight": 1.5}, r"distill_weight=1.5 must be in \[0, 1\]"),
        ({"distill_temperature": 0.0}, "distill_temperature=0.0 must be above 0"),
        ({"teacher": "/nowhere"}, "^teacher=/nowhere does not exist"),
        (
            {"teacher": "", "distill_weight": 0.8},
            r"distill_weight=0.8 without a teacher: give teacher=FOLDER, or leave .* out",
        ),
        ({"teacher": "", "distill_temperature": 2.0}, "distill_temperature=2.0 without a teacher"),
    ],
)
def test_bad_options_are_refused(
    corpus: Path, base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(distilling(corpus, base, tmp_path / "run", **changes), device="cpu")
    assert not (tmp_path / "run").exists()


def test_an_old_run_that_ignored_the_weight_goes_on(corpus: Path, base: Path) -> None:
    """It was started with what is refused now, without a teacher."""
    config = distilling(corpus, base, Path("run"), teacher="")
    refuse_changes({**config.to_dict(), "distill_weight": 0.8}, config, Path("run"))
    taught = replace(config, teacher=str(base))
    with pytest.raises(UserError, match=r"distill_weight=0\.5 differs"):
        refuse_changes({**taught.to_dict(), "distill_weight": 0.8}, taught, Path("run"))


def test_another_vocabulary_is_refused(corpus: Path, base: Path, tmp_path: Path) -> None:
    model = full_model(small_config(vocab_size=310), 0, torch.float32)
    (tmp_path / "other").mkdir()
    write_config(tmp_path / "other", model.config, None)
    write_tensors(tmp_path / "other", WEIGHTS, model_entries(model), True)
    config = distilling(corpus, base, tmp_path / "run", teacher=str(tmp_path / "other"))
    with pytest.raises(UserError, match="has vocab_size=310, the student 300"):
        train(config, device="cpu")


def test_a_teacher_that_cannot_run_is_told_from_the_student(
    corpus: Path, base: Path, tmp_path: Path, pools: Pools
) -> None:
    """Before the student is made, which four ranks cannot hold either; and if its weights fail."""
    teacher = tmp_path / "teacher"
    convert(newest(base), teacher, "desync-2x", 2)
    config = distilling(corpus, base, tmp_path / "run", teacher=str(teacher))
    messages = pools(4).run(fail_on_ranks, config.to_dict() | {"tp": 4}, False)
    words = f"teacher={teacher}: plan 'desync-2x' depends on T and this model has tp_degree=2"
    assert all(each.startswith(words) for each in messages), messages
    shutil.copytree(base, tmp_path / "damaged")
    file = newest(tmp_path / "damaged") / "model.safetensors"
    flip(file)
    config = distilling(corpus, base, tmp_path / "run", teacher=str(tmp_path / "damaged"))
    with pytest.raises(UserError, match=rf"^teacher={tmp_path}/damaged: .*as teacher$"):
        train(config, device="cpu")


def test_a_teacher_that_reads_less_is_refused(corpus: Path, base: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(newest(base), teacher)
    write_config(teacher, replace(read_config(teacher), max_seq_len=63), None)
    config = distilling(corpus, base, tmp_path / "run", teacher=str(teacher))
    with pytest.raises(UserError, match="seq_len=64 is longer than the max_seq_len=63 of teacher="):
        train(config, device="cpu")


def test_another_teachers_tokenizer_is_refused(corpus: Path, base: Path, tmp_path: Path) -> None:
    """The same number of tokens, two of which have changed places; other bytes alone are none."""
    teacher = tmp_path / "teacher"
    shutil.copytree(newest(base), teacher)
    shape = replace(read_config(teacher), max_seq_len=64)  # as much as it is asked
    write_config(teacher, shape, None)
    file = teacher / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    seal(file)
    config = distilling(corpus, base, tmp_path / "run", teacher=str(teacher), steps=3)
    train(config, device="cpu", stop_after=1)
    swap_two_tokens(file)
    with pytest.raises(UserError, match=r"another vocabulary than .* of teacher="):
        train(config, device="cpu", resume=True)
