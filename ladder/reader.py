"""Reading a model folder's files: JSON objects, and checked tensors or parts of them.

The code is also written into Hugging Face folders (see ladder.hf.bundle), where it makes the same
checks, so its imports are few.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ladder.config import parse_json
from ladder.models.errors import UserError, is_plain_name, reason
from ladder.models.transformer import Transformer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Rotary frequencies: older versions of transformers stored them, but the config determines them.
OLD_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
TIED_ROWS = 2**14  # rows of embedding and head that are compared at once
SHARDING_INFO = "DCP_SHARDING_INFO"  # metadata of a file of shards: their offsets in the tensors
DTYPES = {  # the types of weights, by safetensors' names
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
# Written by `ladder convert --weights`: matrices in 8 bits, and (U8) the scales of their blocks.
EIGHT_BITS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8}


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}); the file is damaged: fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a JSON object; the file is damaged")
    return data


@dataclass(frozen=True)
class Chunk:
    """The file of a tensor, or of a box of it that begins at `start`; None: the whole tensor."""

    file: str
    start: tuple[int, ...] | None = None


class TensorReader:
    """Reads parts of the tensors of a folder's `stem` files; opens each file once, until `close`.

    names: files of whole tensors to read, instead of those found by `stem`. files: the chunks of
    each tensor. Returned tensors may be views of a mapped file. If the folder has both a single
    file and an index of several files, the single file is read, as in transformers. quantised:
    accept matrices in 8 bits; `check` compares their types with the model's.
    """

    def __init__(
        self, folder: Path, stem: str, names: Collection[str] = (), quantised: bool = False
    ) -> None:
        self.folder = folder
        self.dtypes = {**DTYPES, **EIGHT_BITS} if quantised else DTYPES
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        self.handles: dict[str, Any] = {}
        self.files: dict[str, list[Chunk]] = {}
        if names or single.is_file():
            for file in names or (single.name,):
                tensors = self._open(file).keys()
                self.files |= {name: [Chunk(file)] for name in tensors}
        elif index.is_file():
            self.files = {name: [Chunk(file)] for name, file in _weight_map(index).items()}
        elif shards := sorted(folder.glob(f"shard-*-{stem}-*.safetensors")):
            for shard in shards:
                for name, start in self._starts(shard.name).items():
                    self.files.setdefault(name, []).append(Chunk(shard.name, start))
        else:
            pickled = next(folder.glob(f"pytorch_{stem}*.bin"), None)
            remedy = "fetch its weights as well, or give another folder"
            if (folder / "adapter_config.json").is_file():
                remedy = (
                    "it holds an adapter: merge that into its model first (merge_and_unload of "
                    "PEFT, or axolotl merge-lora), and give the folder of the merged model"
                )
            elif pickled is not None:
                remedy = (
                    f"{pickled.name} is pickled: make safetensors of it with transformers, "
                    f"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
                )
            raise UserError(f"{folder} has neither {single.name} nor {index.name}; {remedy}")

    def close(self) -> None:
        """Close the files; their mapped memory is freed when no tensor uses it."""
        self.handles.clear()

    def _open(self, name: str) -> Any:
        if name not in self.handles:
            try:
                self.handles[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{self.folder / name} is missing or damaged ({error}); use another "
                    f"checkpoint, or fetch it again"
                ) from error
        return self.handles[name]

    def _starts(self, file: str) -> dict[str, tuple[int, ...]]:
        """The offsets of the boxes in a file of shards."""
        opened = self._open(file)
        try:
            info = json.loads((opened.metadata() or {})[SHARDING_INFO])
            found = {name: tuple(each["saved_offsets"]) for name, each in info.items()}
            for name, start in found.items():
                sizes = opened.get_slice(name).get_shape()
                if [type(each) for each in start] != [int] * len(sizes):
                    raise TypeError(start)
            return found
        except (
            KeyError, TypeError, AttributeError, SafetensorError, json.JSONDecodeError,
        ) as error:  # fmt: skip
            raise UserError(
                f"{self.folder / file} lacks valid metadata of its shards ({SHARDING_INFO}); the "
                f"file is damaged"
            ) from error

    def _chunks(self, name: str) -> list[Chunk]:
        if name not in self.files:
            raise UserError(f"{self.folder} lacks the tensor {name!r}; it is another model's")
        return self.files[name]

    def _view(self, name: str, chunk: Chunk | None = None) -> Any:
        """The safetensors slice of a chunk of tensor `name`; by default its first chunk."""
        file = (chunk or self._chunks(name)[0]).file
        try:
            view = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} lacks the tensor {name!r}, which the index lists; fetch the "
                f"folder again"
            ) from error
        if view.get_dtype() not in self.dtypes:
            raise UserError(
                f"{self.folder / file}: tensor {name!r} has the type {view.get_dtype()}, and "
                f"quantised weights cannot be loaded; use a folder in one of {', '.join(DTYPES)}"
            )
        return view

    def dtype(self, name: str) -> torch.dtype:
        return self.dtypes[self._view(name).get_dtype()]

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of tensor `name`, read from its files."""
        sizes = [each.stop - each.start for each in part]
        if not all(sizes):  # more ranks than rows
            return torch.empty(sizes)
        chunks = self._chunks(name)
        if chunks[0].start is None:
            return _cut(self._view(name), part)
        found = torch.empty(sizes, dtype=self.dtype(name))
        missing = found.numel()
        for chunk in chunks:
            view = self._view(name, chunk)
            source, target = [], []
            for wanted, begin, size in zip(part, chunk.start or (), view.get_shape(), strict=True):
                low, high = max(wanted.start, begin), min(wanted.stop, begin + size)
                source.append(slice(low - begin, high - begin))
                target.append(slice(low - wanted.start, high - wanted.start))
            if all(each.start < each.stop for each in source):
                found[tuple(target)] = _cut(view, tuple(source))
                missing -= math.prod(each.stop - each.start for each in source)
        if missing:
            raise UserError(
                f"{self.folder} lacks a part of the tensor {name!r}: a shard is missing; fetch the "
                f"folder again"
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        chunks = self._chunks(name)
        ends = []
        for chunk in chunks:
            sizes = self._view(name, chunk).get_shape()
            starts = chunk.start or (0,) * len(sizes)
            ends.append([start + size for start, size in zip(starts, sizes, strict=True)])
        return tuple(map(max, zip(*ends, strict=True)))

    def whole(self, name: str) -> Tensor:
        return self.part(name, tuple(slice(0, size) for size in self.shape(name)))

    def check_shape(self, name: str, shape: Iterable[int]) -> None:
        if self.shape(name) != tuple(shape):
            raise UserError(
                f"{self.folder}: tensor {name!r} has the shape {list(self.shape(name))} but the "
                f"model needs {list(shape)}; its weights or its config.json are another model's: "
                f"fetch or convert the folder again"
            )

    def check(self, model: Transformer) -> None:
        """Raise UserError unless the folder has exactly the model's tensors, by name and shape."""
        spare = {name for name in self.files if OLD_ROTARY.fullmatch(name)}
        if model.config.tie_embeddings:
            spare.add(HEAD)  # some folders store it nevertheless
        extra = set(self.files) - {*model.shapes, *spare}
        if extra:
            raise UserError(
                f"{self.folder} holds tensors that the model does not have: {some(extra)}; it is "
                f"another model's"
            )
        missing = {repr(name) for name in model.shapes if name not in self.files}
        if missing:
            raise UserError(
                f"{self.folder} lacks the tensor {some(missing)}; it is another model's, or a "
                f"file is missing"
            )
        for name, shape in model.shapes.items():
            self.check_shape(name, shape)
        for name, parameter in model.named_parameters() if self.dtypes is not DTYPES else ():
            found, small = self.dtype(name), EIGHT_BITS.values()
            if found != parameter.dtype and not {found, parameter.dtype}.isdisjoint(small):
                raise UserError(
                    f"{self.folder}: tensor {name!r} has the type {found}, which its config.json "
                    f"does not say; the folder is damaged, convert the model again"
                )
        if model.config.tie_embeddings and HEAD in self.files:
            self._check_tied(*model.shapes[EMBEDDING])

    def _check_tied(self, rows: int, columns: int) -> None:
        """Raise UserError if a tied head is stored and differs from the embedding."""
        self.check_shape(HEAD, (rows, columns))
        for start in range(0, rows, TIED_ROWS):
            part = slice(start, min(start + TIED_ROWS, rows)), slice(0, columns)
            if not torch.equal(self.part(HEAD, part), self.part(EMBEDDING, part)):
                raise UserError(
                    f"{self.folder}: {HEAD} differs from {EMBEDDING} but its config.json ties "
                    f"them; set tie_word_embeddings to false there, or remove the tensor"
                )


def some(names: Collection[str]) -> str:
    """Up to three of the names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _cut(view: Any, part: tuple[slice, ...]) -> Tensor:
    return view[part] if len(part) > 1 else view[part[0]]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the name of its file, from an index of several files."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index} has weight_map={files!r}, no object; the file is damaged")
    for name, file in files.items():
        if not is_plain_name(file):
            raise UserError(
                f"{index} has {file!r} as the file of {name!r}, which is no plain file name; the "
                f"index is damaged, or not to be trusted"
            )
    return files
