"""Helpers of the tests of evaluation: some texts, and a Llama in Hugging Face's format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.corpus import VOCAB_SIZE, WORDS

CONTEXT = 192


def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")


def make_texts(folder: Path) -> Path:
    source = random.Random(1)
    for i in range(4):
        words = [source.choice(WORDS) + str(source.randrange(40)) for _ in range(400)]
        lines = [" ".join(words[at : at + 9]) for at in range(0, len(words), 9)]
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def make_llama(folder: Path, corpus: Path) -> Path:
    """A random Llama, with the corpus's tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        eos_token_id=0, bos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    end = Tokenizer.from_file(str(corpus / "tokenizer.json")).id_to_token(0)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"), eos_token=end, pad_token=end
    ).save_pretrained(folder)
    return folder
