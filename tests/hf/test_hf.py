"""transformers' interface: our numbers, and its own Llama's, through all that it adds."""

from __future__ import annotations

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
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import ladder.hf  # noqa: E402
from ladder.checkpoint import load_model  # noqa: E402
from ladder.config import model_config  # noqa: E402
from ladder.hf import LadderConfig, LadderForCausalLM  # noqa: E402
from ladder.hf.attending import attended, packed  # noqa: E402
from ladder.hf.bundle import bundle  # noqa: E402
from ladder.hf.modeling import rewired  # noqa: E402
from ladder.infer.engine import generate  # noqa: E402
from ladder.models import Transformer, UserError, document_starts  # noqa: E402
from ladder.parallel.reducers import AsyncReducer  # noqa: E402
from ladder.parallel.sharding import local_parameters  # noqa: E402
from tests import folders  # noqa: E402
from tests.distributed import PATIENCE, Pools, tp_mesh  # noqa: E402
from tests.folders import LLAMA_3, SCALINGS, TOKENS, save_llama, save_ours  # noqa: E402
from tests.hf.models import wrapped  # noqa: E402
from tests.infer import engines  # noqa: E402
from tests.infer.engines import PLANS, prompts  # noqa: E402

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, S], with the token 7 as padding, and the mask that says where it is."""
    size = max(map(len, rows))
    tokens, mask = torch.full((len(rows), size), 7), torch.zeros(len(rows), size, dtype=torch.int64)
    for i, row in enumerate(rows):
        part = slice(size - len(row), size) if side == "left" else slice(len(row))
        tokens[i, part], mask[i, part] = torch.tensor(row), 1
    return tokens, mask


@pytest.mark.parametrize(("plan", "degree"), PLANS)
@torch.no_grad()
def test_logits_are_ours_to_the_bit(plan: str, degree: int | None) -> None:
    model = wrapped(plan, degree)
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    ours = model.transformer(tokens)
    for use_cache in (False, True):
        assert torch.equal(model(tokens, use_cache=use_cache).logits, ours)
    assert torch.equal(model(tokens, torch.ones_like(tokens)).logits, ours)
    kept = model(tokens, logits_to_keep=3, return_dict=False)[0]
    assert torch.equal(kept, ours[:, -3:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([2, 0])).logits, ours[:, [2, 0]])


@pytest.mark.parametrize(("plan", "degree"), PLANS)
@torch.no_grad()
def test_the_model_below_the_head_gives_what_the_head_reads(plan: str, degree: int | None) -> None:
    """As in transformers; trainers compute their losses of it and of lm_head."""
    model = wrapped(plan, degree)
    tokens, mask = padded(prompts(), "left")
    assert model.base_model is model.model is model.get_decoder() is model.transformer.model
    out = model.model(input_ids=tokens, attention_mask=mask, use_cache=True)
    whole = model(tokens, mask)
    assert out.last_hidden_state.shape == (*tokens.shape, model.config.hidden_size)
    assert torch.equal(model.lm_head(out.last_hidden_state), whole.logits)
    assert out.past_key_values.get_seq_length() == tokens.shape[1]
    assert model.model(tokens, mask, use_cache=False).past_key_values is None
    assert torch.equal(model.model(tokens, mask, return_dict=False)[0], out.last_hidden_state)


@torch.no_grad()
def test_the_last_hidden_state_is_transformers_llamas(tmp_path: Path) -> None:
    llama = save_llama(tmp_path)
    model = LadderForCausalLM.from_pretrained(tmp_path)
    theirs = llama.model(TOKENS).last_hidden_state
    assert (model.model(TOKENS).last_hidden_state - theirs).abs().max() < 1e-5


@pytest.mark.parametrize(("plan", "degree"), PLANS)
def test_generate_gives_the_engines_tokens(plan: str, degree: int | None) -> None:
    """Padding that is attended to, or positions that count it, fail this."""
    model = wrapped(plan, degree)
    expected = [
        result.tokens for result in generate(model.transformer, prompts(), max_new_tokens=9)
    ]
    tokens, mask = padded(prompts(), "left")
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        new = model.generate(tokens, attention_mask=mask, max_new_tokens=9, **GREEDY, **options)
        assert new[:, tokens.shape[1] :].tolist() == expected, options


def test_beams_reorder_every_virtual_rank() -> None:
    """A cache whose first dimension is ranks times batch would be reordered wrongly, or not."""
    model = wrapped("desync-4x", 4)
    tokens, mask = padded(prompts(), "left")
    options = GREEDY | {"num_beams": 3, "max_new_tokens": 8}
    cached = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(
        cached, model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, *({"rope_parameters": e} for e in SCALINGS.values())],
)
@torch.no_grad()
def test_a_standard_plan_is_transformers_llama(
    tmp_path: Path, side: str, changes: dict[str, Any]
) -> None:
    """Logits and losses, whole and in two parts with a cache, wherever there is no padding."""
    llama = save_llama(tmp_path, **changes)
    model = LadderForCausalLM.from_pretrained(tmp_path)
    rows = [[5, 80, 9, 31, 62, 7, 1], [3, 90, 12]]
    tokens, mask = padded(rows, side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    before = torch.nn.functional.pad(mask, (1, -1))
    labels = tokens.where(before * mask > 0, -100)  # nothing is predicted from padding
    given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    for more in ({}, {"use_cache": False}, {"labels": labels}):
        ours, theirs = model(**given, **more), llama(**given, **more)
        assert (ours.logits - theirs.logits)[mask > 0].abs().max() < 1e-5
    assert (ours.loss - theirs.loss).abs() < 1e-5
    assert (
        model(**given, labels=labels, num_items_in_batch=5).loss * 5 / 8 - ours.loss
    ).abs() < 1e-5

    part = {name: value[:, :4] for name, value in given.items()}
    rest = {name: value[:, 4:] for name, value in given.items()} | {"attention_mask": mask}
    cache = model(**part).past_key_values
    ours = model(**rest, past_key_values=cache)
    assert cache.get_seq_length() == 7
    assert (ours.logits - llama(**given).logits[:, 4:])[mask[:, 4:] > 0].abs().max() < 1e-5


def test_positions_that_begin_again_begin_a_document() -> None:
    """Packed rows, as data collators for fine-tuning make them: attention must not cross.

    With a mask of ones beside them, with one that numbers the documents, in evaluation, where there
    is a cache by default, and with padding after them: each of these has been a way around it.
    """
    model = wrapped("ladder")
    tokens = torch.randint(1, 67, (1, 12), generator=torch.Generator().manual_seed(0))
    tokens[0, 4] = tokens[0, 8] = 0
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    numbers = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]])
    starts = document_starts(tokens, end=0)
    jumping = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9, 10, 20, 21, 22]])  # to other places than 0
    assert torch.equal(packed(jumping, None), starts)
    padded = torch.nn.functional.pad(tokens, (0, 2)), torch.nn.functional.pad(positions, (0, 2))
    ways: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"position_ids": positions, "attention_mask": torch.ones_like(tokens)},
        {"position_ids": positions, "attention_mask": numbers},
        {"attention_mask": numbers},
    ]
    with torch.no_grad():
        expected = model.transformer(tokens, documents=starts)
        for way in ways:
            for use_cache in (False, None):
                out = model(tokens, use_cache=use_cache, **way)
                assert torch.allclose(out.logits, expected), (way, use_cache)
        for mask in (None, (numbers > 0).long()):
            mask = mask if mask is None else torch.nn.functional.pad(mask, (0, 2))
            out = model(padded[0], attention_mask=mask, position_ids=padded[1])
            assert torch.allclose(out.logits[:, :12], expected)
        plain = model(tokens, position_ids=torch.arange(12)[None], use_cache=False).logits
        assert torch.equal(plain, model.transformer(tokens))
        assert not torch.allclose(plain, expected)


def test_an_embedding_that_would_grow_is_refused() -> None:
    """It would grow beside the one that computes."""
    model = wrapped()
    assert model.get_input_embeddings().num_embeddings == 67
    assert model.resize_token_embeddings(67) is model.model.embed_tokens
    with pytest.raises(UserError, match="cannot be resized from 67 to 68 tokens"):
        model.resize_token_embeddings(68)


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


def test_a_folder_carries_its_code(tmp_path: Path, corpus: Path) -> None:
    """Loaded, run, saved and loaded again by a process that has no ladder, and no network."""
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
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", ALONE, str(out), str(again)],
        env={**os.environ, **environment}, cwd=tmp_path, check=True, timeout=PATIENCE,
    )  # fmt: skip
    tokens = torch.tensor([[3, 9, 27, 14]])
    *results, eos = torch.load(out / "results.pt", weights_only=True)
    with torch.no_grad():
        expected = model(tokens)
    new = generate(model, tokens.tolist(), max_new_tokens=5, stop={0})[0].tokens
    for logits, generated in (results[:2], results[2:]):
        assert torch.equal(logits, expected)
        assert generated[0, 4:].tolist()[: len(new)] == new
    assert eos == 0
    for folder in (out, again):  # ladder goes on with its own code, whatever lies there
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is LadderForCausalLM
        with torch.no_grad():
            assert torch.equal(load_model(folder)(tokens), expected)
    with pytest.raises(UserError, match="exists already"):
        ladder.hf.export(source, out)


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


def test_a_new_model_is_initialised_as_ours() -> None:
    """Biased statistics, or norms and biases that are not 1 and 0, fail this."""
    config = engines.make("ladder", None, attention_bias=True).config
    model = LadderForCausalLM(LadderConfig(model=config.to_dict()))
    layer = model.model.layers[1]
    assert (layer.input_layernorm.weight == 1).all()
    assert (layer.self_attn.q_proj.bias == 0).all()
    assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 6**0.5, rel=0.1)


def test_every_place_sees_something() -> None:
    """Padding too: some kernels make NaN of a softmax over nothing, which then spreads."""
    tokens, mask = padded(prompts(), "left")
    seen = attended(mask, 0, tokens, tokens.shape[1])
    assert seen.any(-1).all()
    assert not (seen & (mask == 0)[:, None, None, :])[mask[:, None] > 0].any()


def test_gradient_checkpointing_changes_no_gradient() -> None:
    model = wrapped("desync-4x", 4).train()
    tokens, mask = padded(prompts(), "left")
    calls = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        calls.clear()
        model.zero_grad()
        out = model(tokens, mask, labels=tokens.where(mask > 0, -100), use_cache=True)
        out.loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    assert len(calls) == 3
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert all(map(torch.equal, gradients(), expected))
    assert len(calls) == 6
    model.gradient_checkpointing_disable()
    assert all(map(torch.equal, gradients(), expected))
    assert len(calls) == 3


def test_trainer_trains(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = engines.make("ladder", None).config
    model = LadderForCausalLM(LadderConfig(model=config.to_dict()))
    data = [{"input_ids": row, "labels": row} for row in torch.arange(8 * 12).view(8, 12) % 67]
    options = transformers.TrainingArguments(
        tmp_path, max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_steps=6, report_to=[], use_cpu=True, disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, options, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(4.2, abs=0.1)
    assert losses[-1] < losses[0] - 0.3
    saved = load_model(tmp_path / "checkpoint-6")
    assert torch.equal(saved.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"input_ids": None}, "inputs_embeds is not supported"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask has 3 positions for 11"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrapped()(**{"input_ids": TOKENS % 67, **options})


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}])
def test_nothing_is_generated_past_the_longest_sequence(options: dict[str, Any]) -> None:
    """The last token of all is not read: 40 are, of 41. transformers itself only warns."""
    model, tokens = wrapped(), TOKENS[:1].repeat(1, 4)[:, :38] % 67
    assert model.generate(tokens, max_new_tokens=3, **GREEDY, **options).shape[1] == 41
    with pytest.raises(UserError, match=r"40 tokens in the cache and 1 more .*max_seq_len=40"):
        model.generate(tokens, max_new_tokens=4, **GREEDY, **options)


def test_configs_without_a_model_are_refused() -> None:
    with pytest.raises(UserError, match="model=None"):
        ladder.hf.LadderConfig()
