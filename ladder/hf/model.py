"""What an installation adds to the model of ladder.hf.modeling: folders with code, and ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
from ladder.reader import read_json


class LadderForCausalLM(modeling.LadderForCausalLM):
    @classmethod
    def maybe_distribute_model(cls, model: Any, *options: Any) -> Any:
        model = super().maybe_distribute_model(model, *options)
        if isinstance(model.lm_head.weight, DTensor):
            model._tp_plan = None  # or transformers warns that it has no rule for any part
        return model

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, **options: Any
    ) -> None:
        """As transformers', and the code for `trust_remote_code=True` with it.

        Of a model on several ranks, every rank must call it; the first writes.
        """
        if self.transformer.cut_parameters():
            raise UserError(
                "save_pretrained would write this rank's shards alone: the model was sharded by "
                "ladder.parallel.sharding.shard_model; give that dtensors=True, or use parallelize"
            )
        self.config.auto_map = dict(AUTO_MAP)
        if self.should_save_on_this_rank(is_main_process):
            write_code(Path(save_directory))
        if options.get("state_dict") is None and isinstance(self.lm_head.weight, DTensor):
            options["state_dict"] = {name: full(each) for name, each in self.named_parameters()}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **options)


def export(source: str | Path, out: str | Path) -> None:
    """Write a folder that transformers loads without ladder, of any that ladder generates from.

    source: a run's folder, a checkpoint (whose shards transformers could not read), or a Hugging
    Face folder. Tensors go over one by one. Raises UserError where it cannot be read, and where
    `out` exists.
    """
    folder = newest(Path(source))
    refuse_inside(Path(out), [source], "out")
    read_config(folder).refuse_no_comm()
    convert(folder, Path(out), finish=_add_code)


def _add_code(folder: Path) -> None:
    write_code(folder)
    name_end(folder)
    data = read_json(folder / "config.json") | {"auto_map": AUTO_MAP}
    write_text(folder / "config.json", json.dumps(data, indent=1) + "\n")


def parallelize(model: modeling.LadderForCausalLM, mesh: DeviceMesh) -> None:
    """Put the model's shards on `mesh` (one dimension, the TP processes), in place.

    The plan's reduces are then asynchronous and waited for where the plan lands them. The styles
    that transformers has for its TP plans cannot do that: `rowwise` sums within the matrix's own
    forward and waits, so that a ladder would compute the same and gain nothing. Ours is therefore
    one style for the whole model, which calls this before the weights are loaded:
    `from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))`, or `tp_plan="auto"`
    where transformers still has it; each process reads its own shards alone.

    Every process must be given the same tokens. In training, call sum_shared_gradients of
    ladder.parallel.sharding on `model.transformer` after the last backward of a step. Raises
    UserError where the mesh does not divide the model.
    """
    _shard(model.transformer, mesh)


def _shard(transformer: Transformer, mesh: DeviceMesh) -> None:
    empty = transformer.lm_head.weight.is_meta
    shard_model(transformer, mesh, device="meta" if empty else mesh.device_type, dtensors=True)


class WholeModel(TensorParallelLayer):
    """The style of modeling.LadderForCausalLM's TP plan, whose one rule names all of the model."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        _shard(module.transformer, mesh)
        return module


ParallelInterface.register("ladder", WholeModel())
