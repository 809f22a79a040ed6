"""Model folders: config.json, safetensors files, tokenizer.json.

A folder is ours (model_type `ladder`, with the residual plan) or Hugging Face's (see
ladder.hf_config); both have the same tensor names and layouts. Files hold full tensors or, in a
checkpoint of several ranks, each rank's shards (see ladder.train.shards). Any layout of ranks reads
its slices of either, and no process ever holds the whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ladder.files import checksum, usual_mode, write_text
from ladder.folders import checkpoints as checkpoints  # without torch
from ladder.folders import newest as newest
from ladder.hf_config import TOKEN_IDS, config_from_huggingface, stop_tokens
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.quantised import declare_quantised, held_as, matrices, refuse_cut_blocks
from ladder.models.storage import QUANTISED
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel import launch
from ladder.parallel.sharding import fill_in_8_bits, local_parameters, shard_model
from ladder.reader import TensorReader, read_json, some

SHARD_BYTES = 2**30  # the approximate size of a checkpoint's files; a larger tensor has its own
WEIGHTS = "model"
ARCHITECTURE = "LadderForCausalLM"  # the class of our transformers models, in config.json
QUANTISATION = "quantization_config"  # Hugging Face's key in config.json: other loaders refuse it
GENERATION = "generation_config.json"  # Hugging Face's: end-of-text tokens, sampling options
CHECKSUMS = "checksums.json"  # of a run's checkpoint: the SHA-256 of every file, see `digest`
RECORD = "train.json"  # of a run's checkpoint: its step and recipe
TOKENIZER = "tokenizer.json"
SAMPLE = 2**20  # bytes
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A full tensor to write. fetch: returns it; called once, on every rank."""

    name: str
    nbytes: int
    fetch: Callable[[], Tensor]


def read_config(folder: Path, quantised: bool = False) -> ModelConfig:
    """The model config of a folder, ours or Hugging Face's.

    quantised: also of a folder whose matrices are in 8 bits; without it that is a UserError.
    """
    config, kind = read_stored(folder)
    if kind and not quantised:
        raise UserError(
            f"{folder} holds {kind} weights, which are for inference only (generate, eval, bench "
            f"inference); give the folder that it was converted from"
        )
    return config


def read_stored(folder: Path) -> tuple[ModelConfig, str | None]:
    """The model config of a folder, and the type of its matrices in 8 bits; None: it holds none."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no model folder: it has no config.json")
    data = read_json(path)
    if data.get("model_type") != "ladder":
        return config_from_huggingface(data, str(path)), None
    model = data.get("model")
    if not isinstance(model, dict):
        raise UserError(f"{path} has model={model!r}, no object of fields; the file is damaged")
    kind = _quantised_as(data, path) if QUANTISATION in data else None
    return ModelConfig.from_dict(model, where=str(path)), kind


def quantised_as(folder: Path) -> str | None:
    """The type of a folder's matrices in 8 bits, a name in QUANTISED; None: it holds none."""
    return read_stored(folder)[1]


def _quantised_as(data: dict[str, Any], path: Path) -> str:
    found = data[QUANTISATION]
    kind = found.get("weights") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in QUANTISED:
        raise UserError(
            f"{path} has {QUANTISATION}={found!r}; ladder reads its own, with weights of "
            f"{' or '.join(QUANTISED)}: the file is damaged, or of another version"
        )
    return kind


def read_stop_tokens(folder: Path) -> list[int]:
    """The token ids that end a generation, from the folder's configs."""
    found: list[int] = []
    for name in (GENERATION, "config.json"):
        if (path := folder / name).is_file():
            found += stop_tokens(read_json(path), str(path))
    return sorted(set(found))


def generation_settings(path: Path, ends: Iterable[int]) -> bytes:
    """A generation_config.json whose end tokens include `ends`: transformers reads only these."""
    data = read_json(path)
    known = stop_tokens(data, str(path))
    if not {*ends} - {*known}:
        return path.read_bytes()
    data["eos_token_id"] = list(dict.fromkeys([*ends, *known]))
    return (json.dumps(data, indent=2) + "\n").encode()


def huggingface_config(data: dict[str, Any]) -> dict[str, Any] | None:
    """The Hugging Face config in this config.json, ours or theirs; None: it has none."""
    if data.get("model_type") != "ladder":
        return data
    kept = data.get("huggingface")
    if not isinstance(kept, dict | None):
        raise UserError(f"config.json has huggingface={kept!r}, no object; the file is damaged")
    return kept


def write_config(
    folder: Path,
    config: ModelConfig,
    eos_token_id: int | list[int] | None,
    huggingface: Mapping[str, Any] | None = None,
    weights: str | None = None,
    ids: Mapping[str, Any] | None = None,
) -> None:
    """Write our config.json. huggingface: the config.json of the original model, kept inside.

    weights: the type of the matrices, if they are in 8 bits: a name in QUANTISED. ids: holds the
    other token ids of TOKEN_IDS, if it has them.
    """
    data: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "ladder"}
    data |= {name: ids[name] for name in TOKEN_IDS if ids and name in ids}
    data["eos_token_id"] = eos_token_id
    if weights is not None:
        data[QUANTISATION] = {"quant_method": "ladder", "weights": weights}
    data["model"] = config.to_dict()
    if huggingface is not None:
        data["huggingface"] = huggingface
    write_text(folder / "config.json", json.dumps(data, indent=1) + "\n")


# It warns when a tensor that is sharded over two mesh dimensions is gathered in two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def full(value: Tensor) -> Tensor:
    """The full tensor on the CPU, of a tensor that may be a DTensor; collective over its mesh."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu().contiguous()


def model_entries(model: Transformer) -> list[Entry]:
    """The entries of a model on one process, or of one that was sharded with dtensors=True."""
    assert not model.cut_parameters(), "it would write only this rank's shards"
    return [entry(name, parameter) for name, parameter in model.named_parameters()]


def entry(name: str, value: Tensor) -> Entry:
    """The Entry of a tensor that may be a DTensor."""
    return Entry(name, value.numel() * value.element_size(), lambda: full(value))


def write_tensors(folder: Path, stem: str, entries: Iterable[Entry], writer: bool) -> None:
    """Write tensors to `stem`.safetensors, or to numbered files with an index beyond SHARD_BYTES.

    Every rank that holds shards must call this; ranks other than the `writer` only take part in the
    gathering. At most one file's tensors are in memory at a time.
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
    """Write one safetensors file, with the default mode of new files."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # the library's type for an OSError
        raise OSError(f"{path.name}: {error}") from error
    usual_mode(path)


def write_checksums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the SHA-256 of each file, and a digest of them, which reveals damage to this file."""
    found = {**sums, CHECKSUMS: digest(sums)}
    write_text(folder / CHECKSUMS, json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def read_checksums(folder: Path) -> dict[str, str]:
    """The checksums that `write_checksums` wrote. Raises UserError if the file is damaged."""
    path = folder / CHECKSUMS
    sums = read_json(path)
    own = sums.pop(CHECKSUMS, None)  # checkpoints of early versions lack it
    known = all(isinstance(each, str) and SHA256.fullmatch(each) for each in sums.values())
    if not known or own not in (None, digest(sums)):
        raise UserError(f"{path} is damaged: its checksum is wrong")
    return sums


def digest(sums: Mapping[str, str]) -> str:
    """The SHA-256 of checksums, stored in checksums.json under the file's own name."""
    text = json.dumps(dict(sorted(sums.items())))
    return hashlib.sha256(text.encode()).hexdigest()


def first_damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """The error message for the first damaged file of a run's checkpoint; None: no damage.

    names: check only these files, and the tokenizer's if it has a checksum. Every rank must call
    this and gets the same result; the ranks divide the files among them.
    """
    wrong = []
    there: list[str] = []
    sums: dict[str, str] = {}
    try:
        sums = read_checksums(folder)
        tensors = (path.name for path in folder.glob("*.safetensors"))
        needed = {"config.json", RECORD, *tensors} if names is None else {*names}
        if unknown := sorted(needed - {*sums}):
            raise UserError(f"{folder / CHECKSUMS} lacks {some(unknown)}; the file is damaged")
        there = sorted(sums if names is None else {*names, *({TOKENIZER} & {*sums})})
    except UserError as error:
        wrong.append(str(error))
    for name in there[launch.rank() :: launch.world_size()]:
        try:
            if checksum(folder / name) != sums[name]:
                wrong.append(f"{folder / name} is damaged: its checksum is wrong")
        except OSError as error:
            wrong.append(f"{folder / name} cannot be read ({error.strerror})")
    return next((each for rank in launch.gathered(wrong) for each in rank), None)


def model_hash(folder: Path) -> str:
    """A hash that tells a folder's model from others: of config.json, and of the size and SAMPLE
    bytes at both ends of each file of weights."""
    found = {"config.json": checksum(folder / "config.json")}
    with contextlib.closing(TensorReader(folder, WEIGHTS, quantised=True)) as reader:
        names = {chunk.file for chunks in reader.files.values() for chunk in chunks}
    for name in names:
        size = (folder / name).stat().st_size
        with (folder / name).open("rb") as file:
            ends = file.read(SAMPLE)
            file.seek(max(0, size - SAMPLE))
            ends += file.read(SAMPLE)
        found[name] = f"{size} {hashlib.sha256(ends).hexdigest()}"
    return digest(found)


def refuse_damage(reader: TensorReader, remedy: str) -> None:
    """Raise UserError, on every rank, if weights or the tokenizer of a run's checkpoint changed.

    Otherwise a flipped bit would silently become a weight, and tokens would stand for other text.
    Other folders have no checksums.
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
    weights: str | None = None,
) -> Transformer:
    """The model of a folder, sharded over `mesh` (None: one process), ready to run.

    dtype: None keeps the stored one (see `stored_dtype`). reducer: see `shard_model`. weights: a
    name in QUANTISED, the type in which to store the matrices while they are read; None: as they
    are. Matrices in 8 bits keep their type: another one is a UserError. Each process reads only its
    own slices.
    """
    model, reader = _opened(folder)
    held = held_as(model)
    if weights and held and weights != held:
        raise UserError(f"weights={weights}: {folder} holds {held} weights; leave weights out")
    weights = None if held else weights
    refuse_cut_blocks(model, 1 if mesh is None else mesh.size(), str(folder))
    dtype = dtype or stored_dtype(model, reader)
    where = "meta" if weights else device
    shard_model(model, mesh, device=where, dtype=dtype, reducer=reducer)
    if weights:
        fill_in_8_bits(model, weights, device, partial(_read, model, reader, 0))
    else:
        fill(model, reader)
    return model


def stored_dtype(model: Transformer, reader: TensorReader) -> torch.dtype:
    """The dtype of the model's matrices in a folder; if they differ, one that holds all values.

    Matrices in 8 bits and their scales do not count: they keep their types. Nor do norms and
    biases, which some folders have in float32 beside matrices in 16 bits.
    """
    quantised = [name for name, matrix in matrices(model) if matrix.scales is not None]
    kept = {f"{name}.{part}" for name in quantised for part in ("weight", "scales")}
    wide = [name for name, shape in model.shapes.items() if len(shape) > 1 and name not in kept]
    return reduce(torch.promote_types, map(reader.dtype, wide))


def fill(model: Transformer, reader: TensorReader, copied: Collection[str] = ()) -> None:
    """Copy the tensors into the model's parameters; each process reads only its own slices.

    copied: the parameters that have a copy of their tensor for each of the T ranks, [T, ...].
    """
    with torch.no_grad():
        for name, local, part in local_parameters(model):
            _read(model, reader, 1 if name in copied else 0, name, local, part)


def _read(
    model: Transformer, reader: TensorReader, own: int, name: str, local: Tensor,
    part: tuple[slice, ...],
) -> None:  # fmt: skip
    """Copy the slices `part` of a parameter to `local`, from the parameter's tensor in the files,
    which lacks `own` of its first dimensions."""
    reader.check_shape(name, model.shapes[name][own:])
    local.copy_(reader.part(name, part[own:]))


def check_model(folder: Path) -> None:
    """Raise the UserError that `load_model` would raise, without reading weights."""
    _opened(folder)


def _opened(folder: Path) -> tuple[Transformer, TensorReader]:
    """The model of a folder without storage, and a reader of its tensors, which were checked."""
    config, kind = read_stored(folder)
    reader = TensorReader(folder, WEIGHTS, quantised=kind is not None)
    model = meta_model(config)
    if kind is not None:
        declare_quantised(model, kind)
    reader.check(model)
    return model, reader


def trained_length(folder: Path) -> int | None:
    """The `seq_len` at which a run's checkpoint was trained; None for every other folder."""
    length = _recipe(folder).get("seq_len")
    return length if isinstance(length, int) else None


def trained_within_documents(folder: Path) -> bool:
    """Whether a run's checkpoint was trained with `mask_documents`; False for other folders."""
    return _recipe(folder).get("mask_documents") is True


def _recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run's checkpoint; empty for every other folder."""
    path = folder / RECORD
    config = read_json(path).get("config") if path.is_file() else None
    return config if isinstance(config, dict) else {}
