"""Writing a checkpoint's tensors through torch.distributed.checkpoint (DCP).

Every rank writes its own shards, in DCP's layout of safetensors files: a file holds one box of each
of its tensors, and its header has the offsets of the box (DCP_SHARDING_INFO). TensorReader reads
them for any layout, and so does torch's HuggingFaceStorageReader. Full tensors are never gathered,
and each number is written once, for any number of ranks. DCP plans the save (it refuses boxes that
overlap or leave gaps) and sends the failure of any rank to all ranks.

The planner and the writer are ours. DCP's planner gets the offsets of shards from DTensor; ours
gets them from the sharding table, which also works for one process. DCP's HuggingFaceStorageWriter
builds each file in memory while it holds Python's global lock, which blocks training; it writes no
checksums and consolidates on one rank. DCP's FileSystemWriter uses pickle.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ladder.checkpoint import SHARD_BYTES, WEIGHTS, save
from ladder.files import checksum, sync
from ladder.reader import SHARDING_INFO

OPTIMIZER = "optimizer"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """A box of a tensor, on the CPU. start: its offsets in the full tensor, which has `shape`."""

    value: Tensor
    start: tuple[int, ...]
    shape: torch.Size


class ShardPlanner(DefaultSavePlanner):
    """Plans the saving of a state dict of Shards. One planner serves all saves of a run.

    The layout never changes within a run, so only the first save is planned. With 64 ranks planning
    takes seconds on rank 0, while training runs.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.final: SavePlan | None = None

    def create_local_plan(self) -> SavePlan:
        if self.final is not None:
            return SavePlan([])
        return SavePlan([_item(name, shard) for name, shard in self.state_dict.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.final is None:
            all_plans, _ = super().create_global_plan(all_plans)
        return all_plans, Metadata({})  # the files' headers have all metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.final = self.final or new_plan
        return self.final

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn].value


def _item(name: str, shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.start), shard.value.shape)
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.value.dtype), shard.shape)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _box(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(_box(item).sizes) * item.tensor_data.properties.dtype.itemsize


class ShardWriter(StorageWriter):
    """Writes shards to `folder`, which rank 0 creates.

    commit: called on rank 0 with the checksum of each file when every rank has written; its
    exception is raised on every rank.
    """

    def __init__(self, folder: Path, commit: Callable[[dict[str, str]], None]) -> None:
        self.folder = folder
        self.commit = commit

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:  # the other ranks write after they have received its plan
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the names and items of its files; only in the first save."""
        files: list[dict[str, list[WriteItem]]] = [{} for _ in plans]
        for stem in (WEIGHTS, OPTIMIZER):
            groups = [
                _by_size(item for item in plan.items if _stem(item) == stem) for plan in plans
            ]
            lone = sum(map(len, groups)) == 1  # one file of whole tensors, named as in any folder
            for rank, group in enumerate(groups):
                for n, items in enumerate(group, start=1):
                    of = f"{n:05d}-of-{len(group):05d}"
                    name = stem if lone else f"shard-{rank + 1:05d}-{stem}-{of}"
                    files[rank][f"{name}.safetensors"] = items
        return [replace(plan, storage_data=each) for plan, each in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for name, items in plan.storage_data.items():
            tensors = {item.index.fqn: planner.resolve_data(item) for item in items}
            starts = {item.index.fqn: list(_box(item).offsets) for item in items}
            write_file(self.folder / name, tensors, starts)
            size = sum(map(_nbytes, items))
            sums = (name, checksum(self.folder / name))
            results.append(WriteResult(items[0].index, size, sums))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.commit(dict(result.storage_data for rank in results for result in rank))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _stem(item: WriteItem) -> str:
    return OPTIMIZER if item.index.fqn.split(".")[0] in MOMENTS else WEIGHTS


def _by_size(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """The items in groups of about SHARD_BYTES, in order."""
    groups: list[list[WriteItem]] = []
    size = 0
    for item in items:
        if not groups or size + _nbytes(item) > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += _nbytes(item)
    return groups


def write_file(path: Path, tensors: dict[str, Tensor], starts: Mapping[str, list[int]]) -> None:
    """Write boxes of tensors to a file. starts: the offsets of each box in its tensor."""
    info = json.dumps({name: {"saved_offsets": start} for name, start in starts.items()})
    save(path, tensors, {"format": "pt", "DCP_VERSION": "1.0", SHARDING_INFO: info})
    sync(path)
