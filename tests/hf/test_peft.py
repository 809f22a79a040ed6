"""LoRA by PEFT on our models: found by the usual names, trained, merged, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from ladder.checkpoint import load_model
from ladder.hf import LadderForCausalLM
from ladder.models import UserError
from ladder.models.layers import ColumnParallelLinear, KVParallelLinear, RowParallelLinear
from tests.folders import save_llama
from tests.hf.models import wrapped
from tests.infer import engines

TOKENS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(0))
USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Adapter(nn.Module):
    """As PEFT's layers: in place of a matrix, which it holds."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.b = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.b(self.a(x))
        return y


def test_matrices_are_what_adapters_look_for() -> None:
    """nn.Linear of the whole matrix's size, under the names that every Llama has."""
    model = wrapped("ladder")
    config = model.transformer.config
    found = {
        name.rsplit(".", 1)[-1]: (each.in_features, each.out_features)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    size, inner = config.hidden_size, config.intermediate_size
    assert found == {
        "q_proj": (size, queries), "k_proj": (size, keys), "v_proj": (size, keys),
        "o_proj": (queries, size), "gate_proj": (size, inner), "up_proj": (size, inner),
        "down_proj": (inner, size), "lm_head": (size, config.vocab_size),
    }  # fmt: skip
    layer = model.model.layers[0].self_attn
    assert (type(layer.q_proj), type(layer.k_proj)) == (ColumnParallelLinear, KVParallelLinear)
    assert type(layer.o_proj) is RowParallelLinear


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "o_proj"])
@torch.no_grad()
def test_adapters_are_for_one_rank(name: str) -> None:
    """With virtual ranks PEFT's products would have other shapes, and fail in its own code."""
    one, four = wrapped("ladder"), wrapped("desync-4x", 4)
    before = one(TOKENS).logits
    assert not one.transformer.adapted
    for model in (one, four):
        layer = model.model.layers[1].self_attn
        setattr(layer, name, Adapter(getattr(layer, name)))
    assert one.transformer.adapted
    assert not torch.equal(one(TOKENS).logits, before)
    with pytest.raises(UserError, match=r"adapters support .* one rank, .* 4 \(plan 'desync-4x'"):
        four(TOKENS)


def test_a_head_that_is_replaced_is_what_computes() -> None:
    model = wrapped("ladder")
    model.lm_head = Adapter(model.lm_head)
    with torch.no_grad():
        assert torch.equal(model.transformer(TOKENS), model(TOKENS).logits)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": USUAL},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ],
)
@pytest.mark.parametrize("plan", ["ladder", "parallel"])
def test_lora_trains_merges_and_is_loaded(
    tmp_path: Path, plan: str, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    base = LadderForCausalLM.from_transformer(engines.make(plan, None).float())
    base.save_pretrained(tmp_path / "base")
    folder = str(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(LadderForCausalLM.from_pretrained(folder), config)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        assert all(each.grad is not None for each in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert not torch.allclose(expected, base(TOKENS).logits, atol=0.1)
        with model.disable_adapter():
            assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
        model.save_pretrained(tmp_path / "adapter")
        again = LadderForCausalLM.from_pretrained(folder)
        again = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter"))
        assert torch.equal(again(TOKENS).logits, expected)
        merged = model.merge_and_unload()
        assert type(merged) is LadderForCausalLM
        assert not merged.transformer.adapted
        merged.save_pretrained(tmp_path / "merged")
        ours = load_model(tmp_path / "merged")
        assert ours.config == base.transformer.config
        for logits in (merged(TOKENS).logits, ours(TOKENS)):
            assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"modules_to_save": ["lm_head"]}, True),
        ({"modules_to_save": ["embed_tokens"]}, True),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"modules_to_save": ["norm"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"trainable_token_indices": {"embed_tokens": [1, 33]}}, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
def test_embeddings_heads_and_norms_are_trained(
    tmp_path: Path, options: dict[str, Any], tied: bool
) -> None:
    """Merged and saved, they compute the same; a head that was tied may have left its embedding."""
    peft = pytest.importorskip("peft")
    model = LadderForCausalLM.from_transformer(
        engines.make("ladder", None, tie_embeddings=tied).float()
    )
    before = model(TOKENS).logits
    options = {"target_modules": ["q_proj"]} | options
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(2):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert not torch.allclose(expected, before, atol=0.1)
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path)
        again = LadderForCausalLM.from_pretrained(tmp_path)
        for logits in (merged(TOKENS).logits, again(TOKENS).logits, load_model(tmp_path)(TOKENS)):
            assert torch.allclose(logits, expected, atol=1e-4)
    apart = "modules_to_save" in options and "ensure_weight_tying" not in options
    assert again.config.tie_word_embeddings == (tied and not apart)


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
def test_an_adapter_does_not_lose_its_models_plan(tmp_path: Path) -> None:
    """Its folder names only the base model's folder, which without the plan computes another
    function."""
    peft = pytest.importorskip("peft")
    llama, adapter = str(tmp_path / "llama"), str(tmp_path / "adapter")
    save_llama(tmp_path / "llama")

    def load(plan: str) -> LadderForCausalLM:
        model = LadderForCausalLM.from_pretrained(llama, plan=plan)
        assert model.config.name_or_path == llama  # where trainers look for its tokenizer
        return model

    assert load("standard").name_or_path == llama
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config.init_lora_weights = False
    model = peft.get_peft_model(load("ladder"), config).eval()
    model.save_pretrained(adapter)
    for loader in (AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        with pytest.raises(OSError, match=r"llama under plan 'ladder': give the base model by"):
            loader.from_pretrained(adapter)
    again = peft.PeftModel.from_pretrained(load("ladder"), adapter)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    model.unload().save_pretrained(tmp_path / "ours")
    assert "_rewired" not in (tmp_path / "ours" / "config.json").read_text()
    saved = LadderForCausalLM.from_pretrained(tmp_path / "ours")
    assert saved.name_or_path == str(tmp_path / "ours")
