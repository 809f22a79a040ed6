"""Byte-level BPE tokenizers: training, loading, and the bytes of text per token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from ladder.config import parse_json
from ladder.files import hub_hint, make_folder, write_text
from ladder.models.errors import UserError, reason

FILE = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"  # the format of older Llamas
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # optional, beside FILE
SPECIAL_TOKENS = "special_tokens_map.json"  # optional, of older versions of transformers
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")  # that templates use
EOS = "<|endoftext|>"
# End-of-text tokens of byte-level tokenizers (Llama 3, RoBERTa), in the order that they are tried.
EOS_TOKENS = (EOS, "<|end_of_text|>", "</s>")
SMALLEST_VOCAB = 257  # the 256 bytes and EOS
LARGEST_VOCAB = 2**24  # far beyond any in use
PIECE = 2**17  # characters
# Normalisers that turn one character into a few at most.
TAME = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt",
     "BertNormalizer", "ByteLevel", "Prepend")
)  # fmt: skip
GROWTH, BLOCK = 32, 1024  # most characters made from one; characters that are checked at once


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's tokenizer_config.json, or {}. Raises UserError if it is damaged."""
    return _object(folder / TOKENIZER_CONFIG)


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of a folder's special tokens, by their names in SPECIAL_NAMES.

    As in transformers, those of special_tokens_map.json come before a tokenizer_config.json without
    a list of added tokens, as older versions wrote it; beside one with such a list they are not
    read. Raises UserError for a damaged file.
    """
    config, older = tokenizer_config(folder), _object(folder / SPECIAL_TOKENS)
    config = config if "added_tokens_decoder" in config else config | older
    found = {}
    for name in SPECIAL_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}); copy it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} does not hold a JSON object; copy it again")
    return found


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: Path) -> int:
    """Train a byte-level BPE tokenizer and save it as `out`/tokenizer.json, all or nothing.

    It is lossless: decoding an encoded text gives the text back. `<|endoftext|>` has id 0, the
    bytes have ids 1 to 256. The same texts, in any order, give the same file.

    Returns the vocabulary's size, below `vocab_size` if the texts have too few pairs to merge.
    Raises UserError if `vocab_size` is below 257 or above 2**24, or `out` cannot be written.
    """
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    path = tokenizer_file(out)
    make_folder(path.parent)
    write_text(path, tokenizer.to_str(pretty=True))
    return int(tokenizer.get_vocab_size())


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError unless a tokenizer of that many tokens can be trained."""
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(
            f"vocab_size={vocab_size} is too small for the 256 bytes and {EOS}; give "
            f"{SMALLEST_VOCAB} or more"
        )
    if vocab_size > LARGEST_VOCAB:
        raise UserError(f"vocab_size={vocab_size} is too large; give {LARGEST_VOCAB} or less")


def tokenizer_file(path: str | Path) -> Path:
    """The tokenizer's file: `path` itself if it ends in .json, else `path`/tokenizer.json."""
    path = Path(path)
    return path if path.suffix == ".json" else path / FILE


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, given as a file or its folder.

    A special token's name inside a text is encoded as plain text, so no document can contain an
    end-of-text token. Truncation and padding, which some files set, are off. Raises UserError if
    the file is missing or broken.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        named = Path(path).name == SENTENCEPIECE  # the file itself, not its folder
        beside = Path(path).parent if named else file.parent
        if (beside / SENTENCEPIECE).is_file():
            if (beside / FILE).is_file():
                raise UserError(f"{path} is SentencePiece's; give {beside / FILE}, beside it")
            raise UserError(
                f"{beside} has {SENTENCEPIECE}, which is SentencePiece's, and no {FILE}: make "
                f'one with transformers, AutoTokenizer.from_pretrained("{beside}")'
                f'.save_pretrained("{beside}"), which needs pip install sentencepiece protobuf'
            )
        raise UserError(
            f"no tokenizer at {file}; train one, or give a folder that holds {FILE}{hub_hint(path)}"
        )
    try:
        with panics("read"):
            return parse_tokenizer(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file} is not a tokenizer ({error}); train or copy it again") from error


def parse_tokenizer(definition: str) -> Tokenizer:
    """The tokenizer that the text of a tokenizer.json defines, set up as by `load_tokenizer`."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


@contextmanager
def panics(what: str) -> Iterator[None]:
    """Turn a panic of the library's Rust code, which is no Exception, into a UserError.

    For example, a pattern that backtracks endlessly panics.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which cannot be imported
            raise
        raise UserError(
            f"the tokenizer fails to {what} ({' '.join(str(error).split())}); use another "
            f"tokenizer, or correct the patterns in its {FILE}"
        ) from None


def encode(tokenizer: Tokenizer, text: str, what: str, special: bool = True) -> list[int]:
    """The token ids of a short text, such as a prompt. special: add the tokenizer's special tokens.

    Raises UserError, naming the text as `what`, for invalid Unicode and if the library fails.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what}={text!r} is not UTF-8 (character {error.start}); convert it"
        ) from error
    with panics(f"tokenise {what}"):
        return list(tokenizer.encode(text, add_special_tokens=special).ids)


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """The encodings of texts, without special tokens around them.

    Raises UserError if the library fails or would need unbounded memory.
    """
    with panics("tokenise the text"):
        _check_growth(tokenizer, texts)
        found: list[Encoding] = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return found


def growth(normaliser: Mapping[str, Any]) -> float:
    """The most characters that a normaliser, given as JSON, makes of one; inf: unbounded.

    Where this bound suffices, the costly check of the real text is skipped.
    """
    if normaliser["type"] == "Sequence":
        return math.prod(map(growth, normaliser["normalizers"]))
    if normaliser["type"] == "Replace":
        return 1 + len(normaliser["content"])  # plus one: an empty match inserts the content
    return 1 if normaliser["type"] in TAME else math.inf


def _check_growth(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Raise UserError for a normaliser that makes a text more than GROWTH times as long."""
    normaliser = tokenizer.normalizer
    if normaliser is None:
        return
    if growth(json.loads(normaliser.__getstate__())) <= GROWTH:
        return
    for text in texts:
        for at in range(0, len(text), BLOCK):
            before = text[at : at + BLOCK]
            after = len(normaliser.normalize_str(before))
            if after > GROWTH * (len(before) + 1):
                raise UserError(
                    f"the tokenizer's normaliser makes {after:,} characters of "
                    f"{len(before):,}, more than {GROWTH} times as many; remove it, or use another "
                    f"tokenizer"
                )


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document. Raises UserError if there is none."""
    for token in EOS_TOKENS:
        found = tokenizer.token_to_id(token)
        if found is not None:
            return int(found)
    raise UserError(
        f"the tokenizer has no end-of-text token ({', '.join(EOS_TOKENS)}); train one with ladder, "
        f"or add {EOS} to it as a special token"
    )


def token_byte_lengths(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """The bytes of text per token: int32 [vocabulary]; 0 for special tokens.

    The lengths of a text's tokens sum to its length in UTF-8, as bits per byte requires. Raises
    UserError if the tokenizer is not byte-level.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # one character for each byte
    largest = max(vocab.values(), default=-1)
    if largest >= LARGEST_VOCAB:
        raise UserError(
            f"the tokenizer has a token of id {largest}; ids must be below {LARGEST_VOCAB}: number "
            f"its tokens from 0 on"
        )
    lengths = np.zeros(largest + 1, np.int32)  # ids may have gaps
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    for token, index in vocab.items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode("utf-8"))
        elif byte_level and alphabet.issuperset(token):
            lengths[index] = len(token)
        else:
            raise UserError(
                f"the tokenizer is not byte-level (token {index} is {token!r}), so bits per byte "
                f"are unknown; use a byte-level BPE, such as `ladder tokenizer train` makes"
            )
    return lengths


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cut a long text into pieces of at most `size` characters, to bound memory and use all cores.

    The pieces tokenise like the whole text: cuts are before single spaces, where the pre-tokenizers
    of byte-level BPE start a new word. A text without such a space is cut anywhere: other tokens,
    but no text is lost.
    """
    start = 0
    while len(text) - start > size:
        cut = start + size
        at = text.rfind(" ", start + 1, cut)
        while at > 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                cut = at
                break
            at = text.rfind(" ", start + 1, at)
        yield text[start:cut]
        start = cut
    yield text[start:]
