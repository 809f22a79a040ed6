"""Model folders: config.json, safetensors files, tokenizer.json.

A folder is ours (model_type `ladder`, with the residual plan) or Hugging Face's (see
ladder.convert.huggingface); both hold the same tensor names and layouts. Files hold full tensors,
or in a checkpoint of several ranks each rank's shards (see ladder.train.shards): any parallelism
reads its slices of either, and no process ever holds the whole model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ladder.config import parse_json
from ladder.convert.huggingface import config_from_huggingface, stop_tokens
from ladder.files import checksum, usual_mode, write_text
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel import launch
from ladder.parallel.sharding import local_parameters, place

SHARD_BYTES = 2**30  # a file of a checkpoint holds about this much, or one tensor
WEIGHTS = "model"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# The rotary frequencies, which follow from the config; older transformers stored them.
OLD_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
TIED_ROWS = 2**14  # of those two that are in memory at once, to compare them
GENERATION = "generation_config.json"  # Hugging Face's: what ends a text, how to sample
CHECKSUMS = "checksums.json"  # of a run's checkpoint: the SHA-256 of every file, see `digest`
RECORD = "train.json"  # of a run's checkpoint: how far it is
SHA256 = re.compile("[0-9a-f]{64}")
SHARDING_INFO = "DCP_SHARDING_INFO"  # in a file of shards: where in its tensor each begins
DTYPES = {  # the types of weights, by safetensors' names
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}


@dataclass(frozen=True)
class Entry:
    """A full tensor to be written; `fetch` returns it, and is called once, on every rank."""

    name: str
    nbytes: int
    fetch: Callable[[], Tensor]


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the file is damaged") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a JSON object; the file is damaged")
    return data


def read_config(folder: Path) -> ModelConfig:
    """The model config of a folder, ours or Hugging Face's."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no model folder: it has no config.json")
    data = read_json(path)
    if data.get("model_type") == "ladder":
        model = data.get("model")
        if not isinstance(model, dict):
            raise UserError(f"{path} has model={model!r}, no object of fields; the file is damaged")
        return ModelConfig.from_dict(model, where=str(path))
    return config_from_huggingface(data, str(path))


def read_stop_tokens(folder: Path) -> list[int]:
    """Token ids that end a generation, as the folder's configs give them."""
    found: list[int] = []
    for name in (GENERATION, "config.json"):
        if (path := folder / name).is_file():
            found += stop_tokens(read_json(path), str(path))
    return sorted(set(found))


def huggingface_config(data: dict[str, Any]) -> dict[str, Any] | None:
    """What a model with this config.json, ours or theirs, had as Hugging Face's; None: nothing."""
    return data.get("huggingface") if data.get("model_type") == "ladder" else data


def write_config(
    folder: Path,
    config: ModelConfig,
    eos_token_id: int | list[int] | None,
    huggingface: Mapping[str, Any] | None = None,
) -> None:
    """Write our config.json. huggingface: the one that the model was converted from, kept there."""
    data: dict[str, Any] = {"model_type": "ladder", "eos_token_id": eos_token_id}
    data["model"] = config.to_dict()
    if huggingface is not None:
        data["huggingface"] = huggingface
    write_text(folder / "config.json", json.dumps(data, indent=1) + "\n")


# Gathering a tensor that two dimensions of a mesh shard takes two steps; it warns of that.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def full(value: Tensor) -> Tensor:
    """The whole of a tensor that may be a DTensor, on the CPU; collective over its mesh."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def model_entries(model: Transformer) -> list[Entry]:
    """Of a model that is whole here: on one process, or placed with dtensors=True."""
    assert not model.cut_parameters(), "it would write this rank's shards alone"
    return [entry(name, parameter) for name, parameter in model.named_parameters()]


def entry(name: str, value: Tensor) -> Entry:
    """The Entry of a tensor that may be a DTensor."""
    return Entry(name, value.numel() * value.element_size(), lambda: full(value))


def write_tensors(folder: Path, stem: str, entries: Iterable[Entry], writer: bool) -> None:
    """Write tensors to `stem`.safetensors, or to numbered files with an index beyond SHARD_BYTES.

    Every rank that holds shards must call this; those that are not the `writer` only take part in
    the gathering. At most one file's tensors are in memory at a time.
    """
    files: list[list[Entry]] = [[]]
    size = total = 0
    for each in entries:
        if files[-1] and size + each.nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.nbytes
        total += each.nbytes
    index: dict[str, str] = {}
    for i, file in enumerate(files, start=1):
        numbered = f"{stem}-{i:05d}-of-{len(files):05d}.safetensors"
        name = f"{stem}.safetensors" if len(files) == 1 else numbered
        tensors = {}
        for each in file:
            tensor = each.fetch()
            if writer:
                tensors[each.name] = tensor
                index[each.name] = name
        if writer:
            save(folder / name, tensors, {"format": "pt"})
    if writer and len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        write_text(folder / f"{stem}.safetensors.index.json", text)


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write one safetensors file, for whoever may read the files beside it."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # its own type for what is an OSError
        raise OSError(f"{path.name}: {error}") from error
    usual_mode(path)


@dataclass(frozen=True)
class Chunk:
    """Where a tensor lies, or a box of it that begins at `start`; None: all of it."""

    file: str
    start: tuple[int, ...] | None = None


class TensorReader:
    """Reads parts of the tensors of a folder's `stem` files; opens each file once, until `close`.

    files: the chunks of each tensor. What it returns may be a view of a file that is mapped. Where
    there is one file beside an index of several, it is the file, as transformers has it.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        index = folder / f"{stem}.safetensors.index.json"
        single = folder / f"{stem}.safetensors"
        self.handles: dict[str, Any] = {}
        self.files: dict[str, list[Chunk]] = {}
        if single.is_file():
            names = self._open(single.name).keys()
            self.files = {name: [Chunk(single.name)] for name in names}
        elif index.is_file():
            self.files = {name: [Chunk(file)] for name, file in _weight_map(index).items()}
        elif shards := sorted(folder.glob(f"shard-*-{stem}-*.safetensors")):
            for shard in shards:
                for name, start in self._starts(shard.name).items():
                    self.files.setdefault(name, []).append(Chunk(shard.name, start))
        else:
            pickled = next(folder.glob(f"pytorch_{stem}*.bin"), None)
            remedy = "fetch its weights as well, or give another folder"
            if pickled is not None:
                remedy = (
                    f"{pickled.name} is pickled: make safetensors of it with transformers, "
                    f"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
                )
            raise UserError(f"{folder} has neither {single.name} nor {index.name}; {remedy}")

    def close(self) -> None:
        """Let go of the files, and of the memory that what was read of them takes, once unused."""
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
        """Where the boxes of a file of shards begin."""
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
                f"{self.folder / file} does not say which shards it holds ({SHARDING_INFO}); the "
                f"file is damaged"
            ) from error

    def _chunks(self, name: str) -> list[Chunk]:
        if name not in self.files:
            raise UserError(f"{self.folder} lacks the tensor {name!r}; it is another model's")
        return self.files[name]

    def _view(self, name: str, chunk: Chunk | None = None) -> Any:
        """The tensor, or chunk, in its file; without `chunk` the first."""
        file = (chunk or self._chunks(name)[0]).file
        try:
            view = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / file} lacks the tensor {name!r}, which the index says it holds; "
                f"fetch the folder again"
            ) from error
        if view.get_dtype() not in DTYPES:
            raise UserError(
                f"{self.folder / file}: tensor {name!r} has the type {view.get_dtype()}, and "
                f"quantised weights cannot be loaded; use a folder in one of {', '.join(DTYPES)}"
            )
        return view

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._view(name).get_dtype()]

    def part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A slice of tensor `name`, from its files."""
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

    def fill(self, model: Transformer) -> None:
        """Copy into the model's parameters; each process reads its own slices only."""
        with torch.no_grad():
            for name, local, part in local_parameters(model):
                self._check_shape(name, model.shapes[name])
                local.copy_(self.part(name, part))

    def _check_shape(self, name: str, shape: Iterable[int]) -> None:
        if self.shape(name) != tuple(shape):
            raise UserError(
                f"{self.folder}: tensor {name!r} has the shape {list(self.shape(name))} but the "
                f"model needs {list(shape)}"
            )

    def check(self, model: Transformer) -> None:
        """Raise UserError unless the tensors are the model's, by name and shape, and no others."""
        spare = {name for name in self.files if OLD_ROTARY.fullmatch(name)}
        if model.config.tie_embeddings:
            spare.add(HEAD)  # some store it all the same
        extra = set(self.files) - {*model.shapes, *spare}
        if extra:
            raise UserError(
                f"{self.folder} holds tensors that the model does not have: {_some(extra)}; it is "
                f"another model's"
            )
        missing = {repr(name) for name in model.shapes if name not in self.files}
        if missing:
            raise UserError(
                f"{self.folder} lacks the tensor {_some(missing)}; it is another model's, or a "
                f"file is missing"
            )
        for name, shape in model.shapes.items():
            self._check_shape(name, shape)
        if model.config.tie_embeddings and HEAD in self.files:
            self._check_tied(*model.shapes[EMBEDDING])

    def _check_tied(self, rows: int, columns: int) -> None:
        """A head that is stored although it is tied must be the embedding: which one is meant?"""
        self._check_shape(HEAD, (rows, columns))
        for start in range(0, rows, TIED_ROWS):
            part = slice(start, min(start + TIED_ROWS, rows)), slice(0, columns)
            if not torch.equal(self.part(HEAD, part), self.part(EMBEDDING, part)):
                raise UserError(
                    f"{self.folder}: {HEAD} differs from {EMBEDDING} but its config.json ties "
                    f"them; set tie_word_embeddings to false there, or remove the tensor"
                )


def _some(names: Collection[str]) -> str:
    """A few of the names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _cut(view: Any, part: tuple[slice, ...]) -> Tensor:
    return view[part] if len(part) > 1 else view[part[0]]


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> the name of its file, as an index of several files says."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index} has weight_map={files!r}, no object; the file is damaged")
    for name, file in files.items():
        if not isinstance(file, str):
            raise UserError(f"{index} has {file!r} as the file of {name!r}; the file is damaged")
    return files


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the SHA-256 of each file, and what tells damage to this file from damage to those."""
    found = {**sums, CHECKSUMS: digest(sums)}
    write_text(folder / CHECKSUMS, json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, str]:
    """What `write_checksums` wrote of each file; UserError where it is not that."""
    path = folder / CHECKSUMS
    sums = read_json(path)
    own = sums.pop(CHECKSUMS, None)  # the first checkpoints have none
    known = all(isinstance(each, str) and SHA256.fullmatch(each) for each in sums.values())
    if not known or own not in (None, digest(sums)):
        raise UserError(f"{path} is damaged: it is not what was written")
    return sums


def digest(sums: Mapping[str, str]) -> str:
    """The SHA-256 of checksums, which stands among them as that of their own file."""
    text = json.dumps(dict(sorted(sums.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def first_damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """What is wrong with a run's checkpoint by its checksums, in words; None where nothing is.

    names: look at these files alone. Every rank calls this and is told the same; they share the
    files out.
    """
    wrong = []
    there: list[str] = []
    sums: dict[str, str] = {}
    try:
        sums = read_checksums(folder)
        tensors = (path.name for path in folder.glob("*.safetensors"))
        needed = {"config.json", RECORD, *tensors} if names is None else {*names}
        if unknown := sorted(needed - {*sums}):
            raise UserError(f"{folder / CHECKSUMS} lacks {_some(unknown)}; the file is damaged")
        there = sorted(sums if names is None else names)
    except UserError as error:
        wrong.append(str(error))
    for name in there[launch.rank() :: launch.world_size()]:
        try:
            if checksum(folder / name) != sums[name]:
                wrong.append(f"{folder / name} is damaged: it is not what was written")
        except OSError as error:
            wrong.append(f"{folder / name} cannot be read ({error.strerror})")
    return next((each for rank in launch.gathered(wrong) for each in rank), None)


def refuse_damage(reader: TensorReader, remedy: str) -> None:
    """Raise UserError, on every rank, where the weights are a run's and not what was written.

    A flipped bit would be a weight from now on. Other folders have no checksums to tell.
    """
    if (reader.folder / CHECKSUMS).is_file():
        files = {chunk.file for chunks in reader.files.values() for chunk in chunks}
        if wrong := first_damage(reader.folder, files):
            raise UserError(f"{wrong}; copy it again, or {remedy}")


def load_model(
    folder: Path,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    reducer: str = "async",
) -> Transformer:
    """The model of a folder, its shards on `mesh` (None: one process), ready to run.

    dtype: None keeps the type that the weights are stored in. reducer: see `place`. Each process
    reads its own slices.
    """
    model, reader = _opened(folder)
    place(model, mesh, device=device, dtype=dtype or reader.dtype(EMBEDDING), reducer=reducer)
    reader.fill(model)
    return model


def check_model(folder: Path) -> None:
    """Raise the UserError that `load_model` would raise, without reading weights."""
    _opened(folder)


def _opened(folder: Path) -> tuple[Transformer, TensorReader]:
    """The model of a folder without storage, and its tensors, which are all of those it has."""
    config = read_config(folder)
    reader = TensorReader(folder, WEIGHTS)
    model = meta_model(config)
    reader.check(model)
    return model, reader


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of a run's finished checkpoints, oldest first."""
    found = []
    for folder in (run / "checkpoints").glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", folder.name):
            found.append((int(match[1]), folder))
    return sorted(found)


def newest(path: Path) -> Path:
    """`path` itself where it is a model folder, or the newest checkpoint of the run there."""
    if (path / "config.json").is_file():
        return path
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; give a model folder or a run's folder")
    found = checkpoints(path)
    if not found:
        raise UserError(
            f"{path} is neither a model folder (no config.json) nor a run with checkpoints"
        )
    return found[-1][1]
