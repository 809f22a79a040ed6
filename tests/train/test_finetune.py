"""Fine-tuning on conversations: the loop of pretraining, with targets that windows differ in."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import checkpoints, load_model, newest, read_config, read_stop_tokens
from ladder.cli import main
from ladder.config import configs_folder
from ladder.convert.command import convert
from ladder.data.mix import open_sources
from ladder.data.prepared import open_data
from ladder.models import UserError, resolve_plan
from ladder.models.documents import starts_of
from ladder.train import state
from ladder.train.config import TrainConfig, load_train_config
from ladder.train.loop import train
from tests.chats import make_chats, prepare_chats
from tests.distributed import Pools
from tests.train.runs import losses, recipe, recorded, run_on_ranks, untimed, weights

SEQ = 128


@pytest.fixture(scope="module")
def chats(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats")
    return prepare_chats(folder, corpus.parent / "tokenizer", make_chats(90))


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of plain text, to be fine-tuned."""
    run = tmp_path_factory.mktemp("base") / "run"
    train(recipe(corpus, run, plan="standard", steps=30), device="cpu")
    return run


def tuning(chats: Path, base: Path, out: Path, **changes: Any) -> TrainConfig:
    settings = {"seq_len": SEQ, "plan": "hybrid", "lr": 3e-3, "model": None, "init": str(base)}
    return recipe(chats, out, **settings | changes)


def test_the_loss_is_the_mean_over_answers(chats: Path, base: Path, tmp_path: Path) -> None:
    """The mean is over the targets of the whole step; a mean over windows is another number."""
    config = tuning(chats, base, tmp_path / "run", steps=3)
    train(config, device="cpu", stop_after=1)
    data = open_data(chats)
    windows = data.windows("train", SEQ)
    drawn = windows.order(0, config.batch_size, config.seed)
    tokens, targets = windows.read(drawn)
    begins = windows.begins(drawn, tokens, None)
    assert begins is not None
    model = load_model(newest(base))
    plan = resolve_plan("hybrid", model.config.num_layers)
    found = model(tokens, targets, documents=starts_of(begins), plan=plan)
    wanted = found.sum() / (targets >= 0).sum()
    by_window = (found.sum(1) / (targets >= 0).sum(1)).mean()
    assert losses(tmp_path / "run")[0] == pytest.approx(wanted.item(), abs=1e-5)
    assert abs(by_window - wanted) > 1e-4


def test_resume_is_bitwise(chats: Path, base: Path, tmp_path: Path) -> None:
    """Over the end of an epoch, of which there are two."""
    settings: dict[str, Any] = {"epochs": 2, "eval_interval": 3, "eval_windows": 0}
    train(tuning(chats, base, tmp_path / "whole", **settings), device="cpu")
    steps = len(losses(tmp_path / "whole"))
    windows = len(open_data(chats).windows("train", SEQ))
    assert steps == -(-2 * windows // 4) > 4
    config = tuning(chats, base, tmp_path / "run", **settings)
    for stop in (1, steps // 2 + 1, None):
        train(config, device="cpu", resume=stop != 1, stop_after=stop)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name
    with pytest.raises(UserError, match="has finished"):
        train(config, device="cpu", resume=True)


@pytest.mark.parametrize(("tp", "dp_shard", "micro"), [(2, 1, 1), (1, 1, 1), (1, 0, 0)])
def test_ranks_train_as_one_process(
    chats: Path, base: Path, tmp_path: Path, pools: Pools, tp: int, dp_shard: int, micro: int
) -> None:
    """TP, DDP, FSDP. Catches means over each rank's own answers, which differ in number."""
    alone = tuning(chats, base, tmp_path / "alone")
    train(alone, device="cpu")
    changes = {"out": str(tmp_path / "ranks"), "tp": tp, "dp_shard": dp_shard}
    settings = alone.to_dict() | changes | {"micro_batch_size": micro}
    pools(2).run(run_on_ranks, settings, None)
    for key, allowed in (("loss", 1e-4), ("gradient_norm", 1e-3), ("heldout_loss", 1e-4)):
        curves = [recorded(tmp_path / run, key) for run in ("alone", "ranks")]
        assert curves[1] == pytest.approx(curves[0], abs=allowed), key
    after = weights(tmp_path / "ranks")
    for name, value in weights(tmp_path / "alone").items():
        assert (value - after[name]).abs().max() < 2e-4, name


def test_it_learns_and_its_checkpoints_are_models_for_chat(
    chats: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tuning(chats, base, run, steps=30), device="cpu")
    assert losses(run)[-1] < losses(run)[0] - 0.3
    said = capsys.readouterr().out
    assert "conversations in" in said
    assert "truncated" in said
    names = {path.name for path in newest(run).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert read_stop_tokens(newest(run)) == [0]


def test_a_model_of_chats_stops_where_their_answers_end(
    chats: Path, base: Path, tmp_path: Path
) -> None:
    """Also in transformers, which reads generation_config.json first."""
    init, data = tmp_path / "init", tmp_path / "data"
    shutil.copytree(newest(base), init)
    (init / "generation_config.json").write_text('{"eos_token_id": 0}')
    shutil.copytree(chats, data)
    index = json.loads((data / "index.json").read_text())
    (data / "index.json").write_text(json.dumps({**index, "answer_end_id": 7}))
    train(tuning(data, init, tmp_path / "run", plan="standard", steps=3), device="cpu")
    convert(newest(tmp_path / "run"), tmp_path / "back", to="hf")
    for folder in (newest(tmp_path / "run"), tmp_path / "back"):
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == [7, 0]


def test_a_mixture_with_plain_text(corpus: Path, chats: Path, base: Path, tmp_path: Path) -> None:
    """Its windows of text are whole, and all of their tokens count."""
    both = [{"path": str(corpus), "weight": 1}, {"path": str(chats), "weight": 3}]
    train(tuning(chats, base, tmp_path / "run", data=both, steps=4), device="cpu")
    windows = open_sources(both).windows("train", SEQ)
    drawn = windows.order(0, 4, 0)
    tokens, targets = windows.read(drawn)
    begins = windows.begins(drawn, tokens, None)
    assert begins is not None
    texts = [n for n in range(4) if (targets[n] >= 0).all()]
    assert [int(begins[n].sum()) for n in texts] == [1]
    assert windows.targets(drawn) == int((targets >= 0).sum())


def test_a_mixture_with_plain_text_gives_a_model_for_chats(
    corpus: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any order of the sources it has the template, and stops where either of them ends."""
    other = tmp_path / "other"
    shutil.copytree(chats, other)
    index = json.loads((other / "index.json").read_text())
    index["eos_id"] = 7  # as a tokenizer with a token for the ends of turns
    (other / "index.json").write_text(json.dumps(index))
    for n, order in enumerate(((corpus, other), (other, corpus))):
        data = [{"path": str(path), "weight": 1 + 2 * (path == other)} for path in order]
        config = recipe(corpus, tmp_path / f"run{n}", data=data, seq_len=SEQ, steps=4)
        train(config, device="cpu")
        folder = newest(tmp_path / f"run{n}")
        assert {*read_stop_tokens(folder)} == {0, 7}
        assert (folder / "chat_template.jinja").read_bytes() == (
            chats / "chat_template.jinja"
        ).read_bytes()
        said = capsys.readouterr().out
        for path, share in ((corpus, 1), (other, 3)):
            passes = 4 * share / len(open_data(path).windows("train", SEQ))
            assert f"{path}: {passes:.2g}" in said
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match="made with different chat templates; prepare one again"):
        open_sources([{"path": str(path), "weight": 1} for path in (chats, other)])


def test_the_command(chats: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"data: {chats}\nout: {tmp_path / 'run'}\nplan: hybrid\n")
    words = ["finetune", str(tmp_path / "r.yaml"), "epochs=1", f"seq_len={SEQ}", "warmup_steps=1"]
    assert main([*words, "--device", "cpu"]) == 2  # init is missing
    assert main([*words, f"init={base}", "tensorboard=false", "--device", "cpu"]) == 0
    assert state.verified(checkpoints(tmp_path / "run"))["config"]["epochs"] == 0
    assert read_config(newest(tmp_path / "run")).plan.name == "hybrid"
    with pytest.raises(UserError, match="steps=3 with epochs=2"):
        load_train_config(str(tmp_path / "r.yaml"), ["steps=3", "epochs=2"])


def test_a_plan_is_that_of_init_unless_it_is_asked_for(tmp_path: Path) -> None:
    """A recipe for pretraining has a plan for its own model, one for fine-tuning for any."""
    assert load_train_config("tiny", []).plan == "ladder"
    from_init = load_train_config("tiny", ["init=runs/hybrid"])
    assert (from_init.plan, from_init.tp_degree, from_init.model) == (None, None, None)
    assert load_train_config("tiny", ["init=runs/hybrid", "plan=hybrid"]).plan == "hybrid"
    recipe = tmp_path / "sft.yaml"
    recipe.write_text("data: runs/data\nout: runs/sft\nplan: hybrid\n")
    assert load_train_config(str(recipe), ["init=runs/b"]).plan == "hybrid"


def test_the_plan_of_init_may_be_named_when_the_run_resumes(
    chats: Path, base: Path, tmp_path: Path
) -> None:
    """And left out again. Another plan is refused, and so is none where one was asked for."""
    run = tmp_path / "run"
    train(tuning(chats, base, run, plan=None), device="cpu", stop_after=1)
    with pytest.raises(UserError, match=r"^plan='hybrid' differs .* started with plan=null; "):
        train(tuning(chats, base, run, plan="hybrid"), device="cpu", resume=True)
    train(tuning(chats, base, run, plan="standard"), device="cpu", resume=True, stop_after=2)
    train(tuning(chats, base, run, plan=None), device="cpu", resume=True, stop_after=3)
    assert len(losses(run)) == 3
    train(tuning(chats, base, tmp_path / "asked"), device="cpu", stop_after=1)
    with pytest.raises(UserError, match=r"^plan=null differs .* started with plan='hybrid'; "):
        train(tuning(chats, base, tmp_path / "asked", plan=None), device="cpu", resume=True)


def test_a_plan_of_ones_own_recipe_is_not_dropped(tmp_path: Path) -> None:
    """Of a recipe with a model, which `init` replaces: only its writer knows what it is for."""
    path = tmp_path / "mine.yaml"
    text = "data: runs/data\nout: runs/x\nmodel: tiny\nplan: desync-2x\ntp_degree: 2\n"
    path.write_text(text)
    load = functools.partial(load_train_config, str(path))
    assert (load([]).plan, load([]).tp_degree) == ("desync-2x", 2)
    asked = "add plan=desync-2x tp_degree=2 to train the weights with it, or plan=null"
    with pytest.raises(
        UserError, match=f"init=runs/b replaces the model of .* whose plan and .*; {asked}"
    ):
        load(["init=runs/b"])
    with pytest.raises(UserError, match=r"whose tp_degree may .* or tp_degree=null to keep"):
        load(["init=runs/b", "plan=hybrid"])
    found = load(["init=runs/b", "plan=desync-2x", "tp_degree=2"])
    assert (found.init, found.plan, found.tp_degree) == ("runs/b", "desync-2x", 2)
    for words in (["plan=null", "tp_degree=null"], ["plan=hybrid", "tp_degree=null"]):
        found = load(["init=runs/b", *words])
        assert (found.model, found.tp_degree) == (None, None)
        assert found.plan == (None if words[0] == "plan=null" else "hybrid")
    assert (load(["init="]).model, load(["init="]).plan) == ("tiny", "desync-2x")
    path.write_text(text.replace("plan: desync-2x\ntp_degree: 2\n", ""))
    assert load(["init=runs/b"]).plan is None
    path.write_text(text.replace("desync-2x\ntp_degree: 2", "standard"))
    assert load(["init=runs/b"]).plan is None
    shipped = configs_folder() / "train" / "tiny.yaml"
    assert load_train_config(str(shipped), ["init=runs/b"]).plan is None
