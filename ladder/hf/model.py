"""LadderForCausalLM with saving, export and parallelism, which need ladder to be installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import ParallelInterface, TensorParallelLayer

from ladder.checkpoint import full, newest, read_config
from ladder.convert.command import convert, name_end
from ladder.files import refuse_inside, write_text
from ladder.hf import modeling
from ladder.hf.bundle import AUTO_MAP, write_code
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel.sharding import shard_model
from ladder.reader import HEAD, read_json


class LadderForCausalLM(modeling.LadderForCausalLM):
    @classmethod
    def maybe_distribute_model(cls, model: Any, *options: Any) -> Any:
        model = super().maybe_distribute_model(model, *options)
        if isinstance(model.lm_head.weight, DTensor):
            model._tp_plan = None  # otherwise transformers warns that parts have no rule
        return model

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, **options: Any
    ) -> None:
        """transformers' method, which also writes the code for `trust_remote_code=True`.

        If the model is on several ranks, every rank must call it; the first one writes.
        """
        if self.transformer.cut_parameters():
            raise UserError(
                "save_pretrained would write only this rank's shards: the model was sharded by "
                "ladder.parallel.sharding.shard_model; pass it dtensors=True, or use parallelize"
            )
        # A head listed beside the embedding that it was tied to: an adapter has trained one.
        head = dict(self.named_parameters()).get(HEAD)
        if self.transformer.config.tie_embeddings and head is not None and not head.is_meta:
            self.transformer.untie()
            self.config.model = self.transformer.config.to_dict()
        self.config.auto_map = dict(AUTO_MAP)
        if self.should_save_on_this_rank(is_main_process):
            write_code(Path(save_directory))
        if options.get("state_dict") is None and isinstance(self.lm_head.weight, DTensor):
            options["state_dict"] = {name: full(each) for name, each in self.named_parameters()}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **options)


def export(source: str | Path, out: str | Path, dtype: str | torch.dtype | None = None) -> None:
    """Write a folder that transformers loads without ladder.

    source: a run's folder, a checkpoint (whose shards transformers cannot read), or a Hugging Face
    folder. dtype: the type of the weights, as `ladder convert --dtype`; None: as in `source`. One
    tensor at a time is in memory. Raises UserError if `source` cannot be read, and if `out` exists.
    """
    folder = newest(Path(source))
    refuse_inside(Path(out), [source], "out")
    read_config(folder).refuse_no_comm()
    convert(folder, Path(out), finish=_add_code, dtype=dtype)


def _add_code(folder: Path) -> None:
    write_code(folder)
    name_end(folder)
    data = read_json(folder / "config.json") | {"auto_map": AUTO_MAP}
    write_text(folder / "config.json", json.dumps(data, indent=1) + "\n")


def parallelize(model: modeling.LadderForCausalLM, mesh: DeviceMesh) -> None:
    """Shard the model over `mesh` (one dimension, the TP processes), in place.

    Its reduces are then asynchronous and waited for where the plan says. transformers' own TP
    styles cannot do that: `rowwise` waits for its sum inside the matrix's forward, so a ladder
    would compute the same but gain nothing. So our models have one style for the whole model, which
    calls this function before the weights are loaded:
    `from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))`, or `tp_plan="auto"`
    in versions that have it. Each process reads only its own shards.

    Every process must get the same tokens. In training, call sum_shared_gradients of
    ladder.parallel.sharding on `model.transformer` after the last backward of a step. Raises
    UserError if the model cannot be split over the mesh.
    """
    _shard(model.transformer, mesh)


def _shard(transformer: Transformer, mesh: DeviceMesh) -> None:
    empty = transformer.lm_head.weight.is_meta
    shard_model(transformer, mesh, device="meta" if empty else mesh.device_type, dtensors=True)


class WholeModel(TensorParallelLayer):
    """The style in modeling.LadderForCausalLM's TP plan, one rule for the whole model."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        _shard(module.transformer, mesh)
        return module


ParallelInterface.register("ladder", WholeModel())
