"""Whether a converted folder holds what it is to hold, and computes what transformers does."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ladder.checkpoint import WEIGHTS, TensorReader, load_model
from ladder.models.errors import UserError

MOST_PARAMETERS = 2**28  # of a model whose logits are compared: 1 GiB in float32, held twice
TOLERANCE = 1e-4  # of the largest logit, in float32


def checksum(value: Tensor) -> str:
    """The SHA-256 of a tensor's type, shape and bytes."""
    found = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode())
    found.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def verify_checksums(
    folder: Path, sums: Mapping[str, str], on_tensor: Callable[[str], None]
) -> None:
    """Raise UserError unless the folder's files hold the tensors of those checksums, and no others.

    on_tensor: called with the name of each, once it is compared.
    """
    reader = TensorReader(folder, WEIGHTS)
    wrong = sorted(set(reader.files) ^ set(sums))
    for name in sums:
        if name not in wrong and checksum(reader.whole(name)) != sums[name]:
            wrong.append(name)
        reader.close()
        on_tensor(name)
    if wrong:
        raise UserError(
            f"{', '.join(wrong[:3])}: what was written differs from what was to be; the disk or "
            f"the memory is faulty, convert to another place"
        )


def cannot_compare(parameters: int) -> str | None:
    """Why logits are not compared with transformers', or None where they can be."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if parameters > MOST_PARAMETERS:
        return f"{parameters / 1e9:.1f}B parameters are more than {MOST_PARAMETERS / 1e9:.1f}B"
    return None


@torch.no_grad()
def compare_logits(ours: Path, theirs: Path) -> float:
    """The largest difference of the logits of our folder and Hugging Face's, of random tokens.

    In units of the largest logit, in float32. Raises UserError where it is above TOLERANCE.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = load_model(ours, dtype=torch.float32)
    try:
        other = AutoModelForCausalLM.from_pretrained(
            theirs, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        ).eval()
    except Exception as error:  # it raises what it likes
        raise UserError(
            f"transformers cannot load {theirs} ({' '.join(str(error).split())[:300]}), so that "
            f"the logits cannot be compared; mend its config.json"
        ) from error
    shape = (2, min(64, model.config.max_seq_len))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    expected = other(tokens).logits
    difference = (model(tokens) - expected).abs().max() / expected.abs().max()
    if not difference <= TOLERANCE:
        raise UserError(
            f"the logits differ from transformers' by {difference:.1e} of the largest: the "
            f"config.json asks for something that one of the two does not compute; nothing was "
            f"written"
        )
    return float(difference)
