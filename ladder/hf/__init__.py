"""Hugging Face transformers: importing this registers our models with its Auto classes.

    import ladder.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("a-folder-of-ours")
    model = ladder.hf.LadderForCausalLM.from_pretrained("a-llama-folder", plan="ladder@8-15")

`save_pretrained` and `export` write folders that transformers loads without ladder, too, by
`trust_remote_code=True`.
"""

import importlib.metadata

from ladder.models.errors import UserError

try:
    from transformers import AutoConfig, AutoModelForCausalLM

    from ladder.hf.model import LadderForCausalLM, export, parallelize
    from ladder.hf.modeling import LadderConfig
except ImportError as error:
    # No ImportError: what imports this as a plugin may go on without it after one.
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    raise UserError(
        f"ladder.hf needs transformers 5.16 or later, and found {found}: {error}; pip install "
        f"'ladder[hf]', or, with a version that is right, look for a file that hides a module"
    ) from error

AutoConfig.register(LadderConfig.model_type, LadderConfig)
AutoModelForCausalLM.register(LadderConfig, LadderForCausalLM)

__all__ = ["LadderConfig", "LadderForCausalLM", "export", "parallelize"]
