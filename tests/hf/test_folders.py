"""Folders in transformers' layout: saved, loaded, exported with their code, and placed on ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import ladder.hf  # noqa: E402
from ladder.checkpoint import load_model  # noqa: E402
from ladder.config import model_config  # noqa: E402
from ladder.convert.command import convert  # noqa: E402
from ladder.hf import LadderForCausalLM  # noqa: E402
from ladder.hf.bundle import bundle  # noqa: E402
from ladder.hf.configuration import LadderConfig, rewired  # noqa: E402
from ladder.infer.engine import generate  # noqa: E402
from ladder.models import Transformer, UserError  # noqa: E402
from ladder.parallel.reducers import AsyncReducer  # noqa: E402
from ladder.parallel.sharding import local_parameters  # noqa: E402
from tests import folders  # noqa: E402
from tests.distributed import PATIENCE, Pools, tp_mesh  # noqa: E402
from tests.folders import LLAMA_3, TOKENS, save_llama, save_ours  # noqa: E402
from tests.hf.models import GREEDY, padded, wrapped  # noqa: E402
from tests.infer import engines  # noqa: E402
from tests.infer.engines import prompts  # noqa: E402


@pytest.mark.parametrize(
    "changes", [{}, {"plan": "desync-4x", "degree": 4}, {"tie_embeddings": True}]
)
def test_folders_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With one config.json and one set of names, which ladder reads too."""
    model = wrapped(**changes)
    model.config.eos_token_id = 3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LadderForCausalLM
    assert loaded.config.eos_token_id == 3
    assert loaded.config.resolved == model.transformer.config
    ours = load_model(tmp_path)
    with torch.no_grad():
        expected = model(TOKENS % 67).logits
        # Products of weights that lie elsewhere in memory may round otherwise.
        assert torch.allclose(loaded(TOKENS % 67).logits, expected, rtol=0, atol=1e-12)
        assert torch.allclose(ours(TOKENS % 67), expected, rtol=0, atol=1e-12)
    for each in (loaded, ours):
        assert all(map(torch.equal, each.parameters(), model.parameters()))
    names = [name for name, _ in ours.named_parameters()]
    assert [name for name, _ in loaded.named_parameters()] == names
    head, embedding = loaded.lm_head.weight, loaded.model.embed_tokens.weight
    assert (head is embedding) == changes.get("tie_embeddings", False)


def test_folders_that_ladder_wrote(tmp_path: Path) -> None:
    model = folders.make()
    save_ours(tmp_path, model)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.vocab_size, config.eos_token_id) == (2, 91, 0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS))
    assert loaded.generation_config.eos_token_id == 0


@torch.no_grad()
def test_a_llama_folder_under_another_plan(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=4, rope_parameters=LLAMA_3)
    ours = load_model(tmp_path)
    hybrid = Transformer(replace(ours.config, plan="ladder@2-3"))  # type: ignore[arg-type]
    hybrid.load_state_dict(ours.state_dict())
    model = LadderForCausalLM.from_pretrained(tmp_path, plan="ladder@2-3")
    assert model.config.eos_token_id == [3, 5]
    assert model.config.resolved == hybrid.config
    assert torch.equal(model(TOKENS).logits, hybrid(TOKENS))
    model.save_pretrained(tmp_path / "hybrid")
    assert torch.equal(load_model(tmp_path / "hybrid")(TOKENS), hybrid(TOKENS))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", plan="standard")
    assert torch.equal(back(TOKENS).logits, ours(TOKENS))
    assert not torch.equal(hybrid(TOKENS), ours(TOKENS))


def test_a_converted_folder_keeps_the_ids_of_its_original(tmp_path: Path) -> None:
    """Those that its own config.json lacks, by either way of transformers."""
    save_llama(tmp_path / "llama", bos_token_id=7, pad_token_id=9)
    convert(tmp_path / "llama", tmp_path / "out", "ladder")
    path = tmp_path / "out" / "config.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "eos_token_id": 4, "pad_token_id": 8}))
    for config in (LadderConfig, AutoConfig):
        found = config.from_pretrained(tmp_path / "out")
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (7, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "desync-2x", "tp_degree": 2}, "'desync-2x' has other norms .* ladder convert"),
        ({"plan": "parallel"}, "'parallel' has other norms"),
        ({"plan": "none", "tp_degree": 2}, "plan='none' has no communication"),
        ({"plan": "leader"}, "unknown plan 'leader'"),
        ({"plan": "ladder", "tp_degree": 2}, "tp_degree=2 with plan 'ladder'"),
        ({"tp_degree": 2}, "tp_degree=2 goes with a plan"),
    ],
)
def test_plans_that_a_folder_cannot_take(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save_llama(tmp_path)
    with pytest.raises(UserError, match=message):
        LadderForCausalLM.from_pretrained(tmp_path, **options)


def test_another_number_of_norms_is_refused() -> None:
    """The same reads of the same kinds, and norms for two ranks where four are wanted."""
    two = model_config("tiny", "desync-2x", 2, vocab_size=64)
    with pytest.raises(UserError, match=r"'desync-2x' has other norms .* ladder convert"):
        rewired(two.to_dict(), "desync-2x", 4)


ALONE = """
import sys, torch

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ladder":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, again, tokens = sys.argv[1], sys.argv[2], torch.tensor([[3, 9, 27, 14]])

def run(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    new = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)
    return model, [model(tokens).logits.detach(), new]

model, results = run(folder)
model.save_pretrained(again)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
torch.save([*results, *run(again)[1], tokenizer.eos_token_id], folder + "/results.pt")
"""


def check_alone(
    out: Path, again: Path, model: Transformer, tokens: torch.Tensor, expected: torch.Tensor
) -> None:
    """By ALONE, which saves it as `again`: logits and tokens of both, and the end token."""
    environment = {
        "HF_HOME": str(out.parent / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", ALONE, str(out), str(again)],
        env={**os.environ, **environment}, cwd=out.parent, check=True, timeout=PATIENCE,
    )  # fmt: skip
    *results, eos = torch.load(out / "results.pt", weights_only=True)
    new = generate(model, tokens.tolist(), max_new_tokens=5, stop={0})[0].tokens
    for logits, generated in (results[:2], results[2:]):
        assert torch.equal(logits, expected)
        assert generated[0, 4:].tolist()[: len(new)] == new
    assert eos == 0


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_folder_carries_its_code(tmp_path: Path, corpus: Path, alone: bool) -> None:
    """alone: loaded, run, saved and loaded again by a process that has no ladder, and no network,
    which imports torch and transformers; else by ladder, which goes on with its own code."""
    source, out, again = tmp_path / "ours", tmp_path / "out", tmp_path / "again"
    source.mkdir()
    model = engines.make("desync-4x", 4)
    save_ours(source, model)
    shutil.copy(corpus / "tokenizer.json", source)
    ladder.hf.export(source, out)
    assert "import ladder" not in "".join(bundle().values())
    assert "from ladder" not in "".join(bundle().values())
    needed = ("ladder_models", "ladder_hf", "ladder_convert", "ladder_reader", "ladder_config")
    assert all(name.startswith(needed) for name in bundle())
    tokens = torch.tensor([[3, 9, 27, 14]])
    with torch.no_grad():
        expected = model(tokens)
    if alone:
        check_alone(out, again, model, tokens, expected)
    for folder in (out, again) if alone else (out,):  # whatever code lies there
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is LadderForCausalLM
        with torch.no_grad():
            assert torch.equal(load_model(folder)(tokens), expected)
    with pytest.raises(UserError, match="exists already"):
        ladder.hf.export(source, out)
    ladder.hf.export(source, tmp_path / "cast", dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path / "cast")
    assert {each.dtype for each in cast.parameters()} == {torch.bfloat16}


def test_an_export_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its code, the config.json that names it, or its end token, it would be no export."""
    source = tmp_path / "ours"
    source.mkdir()
    save_ours(source, engines.make("ladder", None))

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ladder.hf.model.write_code", full)
    with pytest.raises(UserError, match="No space left on device"):
        ladder.hf.export(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


def on_rank(rank: int, world: int, folder: Path) -> list[Any]:
    """Logits, tokens, and how many numbers are held: of a model placed after loading, and while."""
    tokens, mask = padded(prompts(), "left")
    model = LadderForCausalLM.from_pretrained(folder)
    ladder.hf.parallelize(model, tp_mesh(world))
    models = [model]
    if find_spec("accelerate"):  # which transformers needs for it
        config = DistributedConfig(tp_size=world)
        models.append(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))
    found: list[Any] = []
    for i, model in enumerate(models):
        assert type(model.transformer.reducer) is AsyncReducer
        with torch.no_grad():
            logits = model(tokens, mask).logits
        new = model.generate(tokens, attention_mask=mask, max_new_tokens=5, **GREEDY)
        held = sum(local.numel() for _, local, _ in local_parameters(model.transformer))
        found.append((logits, new, held))
        model.save_pretrained(folder / f"from_ranks_{i}")
    placed = load_model(folder, tp_mesh(world))
    with pytest.raises(UserError, match="only this rank's shards"):
        LadderForCausalLM.from_transformer(placed).save_pretrained(folder / "cut")
    assert not (folder / "cut").exists()
    return found


@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-4x", 4)])
def test_two_ranks_are_one_process(
    tmp_path: Path, pools: Pools, plan: str, degree: int | None
) -> None:
    model = wrapped(plan, degree, tie_embeddings=plan == "ladder")
    model.save_pretrained(tmp_path)
    tokens, mask = padded(prompts(), "left")
    with torch.no_grad():
        expected = model(tokens, mask).logits
    new = model.generate(tokens, attention_mask=mask, max_new_tokens=5, **GREEDY)
    size = sum(parameter.numel() for parameter in model.parameters())
    for rank in pools(2).run(on_rank, tmp_path):
        for logits, generated, held in rank:
            assert torch.allclose(logits, expected, rtol=0, atol=1e-9)
            assert torch.equal(generated, new)
            assert held < 0.6 * size
    for saved in tmp_path.glob("from_ranks_*"):
        again = AutoModelForCausalLM.from_pretrained(saved)
        assert all(map(torch.equal, again.parameters(), model.parameters()))
