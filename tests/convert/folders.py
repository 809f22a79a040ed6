"""Folders to convert: written, edited, compared bit by bit, and refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from ladder.cli import main
from tests.folders import LLAMA_3, YARN
from tests.samples import fill

SHAPE = {"vocab_size": 91, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "eos_token_id": [3, 5]}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3, tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA_3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral, a window of the context": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
INDEX = "model.safetensors.index.json"


@functools.cache
def hugging_face(family: str) -> Any:
    """A model of transformers' whose every weight matters."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    fill(model, seed=3)
    return model


def save(folder: Path, family: str = "llama") -> Path:
    """Its folder, in several files, with other files of such folders."""
    hugging_face(family).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / INDEX).exists()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "README.md").write_text("no part of the model")
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: value for file in files for name, value in file.items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def assert_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], *arguments: str
) -> None:
    """Exit code 2, one line that says these words, and nothing new beside `folder`."""
    before = sorted(folder.parent.iterdir())
    capsys.readouterr()
    assert main(["convert", str(folder), "--out", str(folder.parent / "out"), *arguments]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]
    assert sorted(folder.parent.iterdir()) == before
