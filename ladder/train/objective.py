"""Training objectives: cross-entropy, alone or mixed with the divergence from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ladder.checkpoint import WEIGHTS, TensorReader, load_model, read_config, refuse_damage
from ladder.config import naming
from ladder.data.prepared import TokenData, check_tokenizer
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.layers import vocabulary_start
from ladder.models.loss import teacher_losses, token_losses
from ladder.models.plan import Plan
from ladder.models.transformer import Transformer
from ladder.train.config import TrainConfig
from ladder.train.prefetch import MicroBatch

# Returns sums over the tokens of a micro-batch, [n]: first the loss, with gradients, then other
# metrics. The plan is the one in force; None: the model's own.
Objective = Callable[[Transformer, MicroBatch, Plan | None], Tensor]


def cross_entropy(model: Transformer, part: MicroBatch, plan: Plan | None) -> Tensor:
    losses = model(part.tokens, part.targets, documents=part.documents, plan=plan)
    return losses.sum().unsqueeze(0)


class Distillation:
    """(1 - w) cross-entropy + w temperature^2 KL(teacher || student), after Hinton et al. (2015).

    KL compares the distributions at that temperature; its gradients shrink with the square of the
    temperature, hence the factor. The teacher uses the student's TP and the recipe's dtype, is not
    sharded over data-parallel ranks, and has no gradients. folder: the folder of the teacher.
    """

    names = ("cross_entropy", "divergence")

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        student: ModelConfig,
        data: TokenData,
        mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self.weight, self.temperature = config.distill_weight, config.distill_temperature
        named = f"teacher={config.teacher}"
        with naming(named):
            theirs = read_config(folder)
            theirs.refuse_no_comm()
        if theirs.vocab_size != student.vocab_size:
            raise UserError(
                f"{named} has vocab_size={theirs.vocab_size}, the student "
                f"{student.vocab_size}: they must share a vocabulary; choose another teacher"
            )
        if theirs.max_seq_len < config.seq_len:
            raise UserError(
                f"seq_len={config.seq_len} is longer than the max_seq_len={theirs.max_seq_len} of "
                f"{named}; lower it"
            )
        check_tokenizer(data, folder, f"data={config.data}", named)
        with naming(named):
            reader = TensorReader(folder, WEIGHTS)
            refuse_damage(reader, "use another checkpoint of the run as teacher")
            self.teacher = load_model(
                folder,
                None if mesh is None else mesh["tp"],
                device=device,
                dtype=getattr(torch, config.dtype),
            )
        self.teacher.requires_grad_(False)

    def __call__(self, model: Transformer, part: MicroBatch, plan: Plan | None) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(part.tokens, documents=part.documents, gather=False)
        logits = model(part.tokens, documents=part.documents, gather=False, plan=plan)
        first = vocabulary_start(model.config.vocab_size, model.reducer.ranks)
        hard = token_losses(logits, part.targets, first, model.reducer, model.runtime.losses).sum()
        soft = teacher_losses(logits, wanted, part.targets, self.temperature, model.reducer).sum()
        loss = (1 - self.weight) * hard + self.weight * self.temperature**2 * soft
        return torch.stack((loss, hard, soft))
