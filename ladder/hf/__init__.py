"""Integration with Hugging Face transformers; the import registers our models' Auto classes.

    import ladder.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("a-folder-of-ours")
    model = ladder.hf.LadderForCausalLM.from_pretrained("a-llama-folder", plan="ladder@8-15")

With `trust_remote_code=True`, transformers loads the folders that `save_pretrained` and `export`
write even without ladder.
"""

import importlib.metadata

from ladder.models.errors import UserError

try:
    from transformers import AutoConfig, AutoModelForCausalLM

    from ladder.hf.configuration import LadderConfig
    from ladder.hf.model import LadderForCausalLM, export, parallelize
except ImportError as error:
    # Not an ImportError, after which a program that imports this as a plugin may go on without it.
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    raise UserError(
        f"ladder.hf needs transformers 5.16 or later, and found {found}: {error}; pip install -e "
        f"'.[hf]' in the project's folder; if the version is right, look for a file of yours that "
        f"hides a module"
    ) from error

AutoConfig.register(LadderConfig.model_type, LadderConfig)
AutoModelForCausalLM.register(LadderConfig, LadderForCausalLM)

__all__ = ["LadderConfig", "LadderForCausalLM", "export", "parallelize"]
