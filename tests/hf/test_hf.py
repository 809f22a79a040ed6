"""transformers' interface: our numbers, and its own Llama's, through all that it adds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import ladder.hf  # noqa: E402
from ladder.checkpoint import load_model  # noqa: E402
from ladder.hf import LadderConfig, LadderForCausalLM  # noqa: E402
from ladder.hf.attending import attended, packed  # noqa: E402
from ladder.infer.engine import generate  # noqa: E402
from ladder.models import UserError, document_starts  # noqa: E402
from tests.folders import SCALINGS, TOKENS, save_llama  # noqa: E402
from tests.hf.models import GREEDY, padded, wrapped  # noqa: E402
from tests.infer import engines  # noqa: E402
from tests.infer.engines import PLANS, prompts  # noqa: E402


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
    # Without the first real token of a row padded on the left, which is predicted from padding.
    labels = tokens.where(before * mask > 0, -100)
    given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    for more in ({}, {"use_cache": False}, {"labels": labels}):
        ours, theirs = model(**given, **more), llama(**given, **more)
        assert (ours.logits - theirs.logits)[mask > 0].abs().max() < 1e-5
    assert (ours.loss - theirs.loss).abs() < 1e-5
    assert (
        model(**given, labels=labels, num_items_in_batch=5).loss * 5 / 8 - ours.loss
    ).abs() < 1e-5
    whole = tokens.where(mask > 0, -100)
    for each in (model, llama):  # both count that token if it has a label
        apart = each(**given, labels=whole).loss - each(**given, labels=labels).loss
        assert (apart.abs() > 1e-3) == (side == "left")

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


def test_packed_rows_may_be_longer_than_the_context() -> None:
    """As TRL's packing makes them: each document is bounded, and gives what it gives alone."""
    model = wrapped("ladder", max_seq_len=6)
    tokens = torch.randint(1, 67, (1, 15), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[*range(6), *range(4), *range(5)]])
    numbers = torch.tensor([[1] * 6 + [2] * 4 + [3] * 5])
    with torch.no_grad():
        alone = [model(each).logits for each in tokens.split((6, 4, 5), 1)]
        for way in ({"position_ids": positions}, {"attention_mask": numbers}):
            assert torch.allclose(model(tokens, **way).logits, torch.cat(alone, 1), atol=1e-4)
        long = torch.tensor([[*range(7), *range(4), *range(4)]])
        with pytest.raises(UserError, match=r"a document of 7 tokens is longer .*max_seq_len=6"):
            model(tokens, position_ids=long)


def test_an_embedding_that_would_grow_is_refused() -> None:
    """It would grow beside the one that computes."""
    model = wrapped()
    assert model.get_input_embeddings().num_embeddings == 67
    assert model.resize_token_embeddings(67) is model.model.embed_tokens
    with pytest.raises(UserError, match="cannot be resized from 67 to 68 tokens"):
        model.resize_token_embeddings(68)


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


def test_replicas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sublayers would be the original's, of another GPU; by torch's own replicate, which can
    copy only between GPUs."""
    model = wrapped()
    theirs = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(
        theirs, "_broadcast_coalesced_reshape", lambda tensors, devices, detach=False: [tensors] * 2
    )
    for module in (model, model.model):
        with pytest.raises(UserError, match=r"start with torchrun, or set CUDA_VISIBLE_DEVICES=0"):
            torch.nn.parallel.replicate(module, [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"input_ids": None}, "inputs_embeds is not supported"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask has 3 positions for 11"),
        (
            {"attention_mask": torch.ones(2, 1, 11, 11, dtype=torch.int64)},
            r"attention_mask is \[2, 1, 11, 11\] of int64; .* of bool, .* of float, .*; give it as",
        ),
        (
            {"attention_mask": torch.ones(2, 11, 11)},
            r"is \[2, 11, 11\] of float32; expected \[B, S",
        ),
        ({"attention_mask": torch.ones(11)}, r"attention_mask is \[11\] of float32; expected"),
        ({"attention_mask": [[1] * 11] * 2}, "attention_mask is a list; expected"),
        ({"attention_mask": torch.zeros(3, 11)}, "for 2 sequences; give one row for each"),
        ({"attention_mask": torch.ones(2, 1, 11, 9)}, r"expected \[B, 1, 11, 11\], the tokens and"),
        ({"attention_mask": torch.ones(2, 1, 3, 11)}, r"expected \[B, 1, 11, 11\], the tokens and"),
        ({"input_ids": TOKENS[0]}, r"input_ids is \[11\] of int64; expected \[B, S\]"),
        (
            {"input_ids": TOKENS[0], "logits_to_keep": 1},
            r"input_ids is \[11\] of int64; expected \[B, S\]",
        ),
        (
            {"input_ids": TOKENS / 2},
            r"input_ids is \[2, 11\] of float32; expected \[B, S\] of int64",
        ),
        ({"input_ids": [[1, 2]]}, "input_ids is a list; expected"),
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
