"""Hugging Face transformers: importing this registers our models with its Auto classes.

    import ladder.hf
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("a-folder-of-ours")
    model = ladder.hf.LadderForCausalLM.from_pretrained("a-llama-folder", plan="ladder@8-15")

`save_pretrained` and `export` write folders that transformers loads without ladder, too, by
`trust_remote_code=True`.
"""

import importlib.util

from ladder.models.errors import UserError

if importlib.util.find_spec("transformers") is None:
    raise UserError("ladder.hf needs transformers: pip install 'ladder[hf]'")

from transformers import AutoConfig, AutoModelForCausalLM

from ladder.hf.model import LadderForCausalLM, export, parallelize
from ladder.hf.modeling import LadderConfig

AutoConfig.register(LadderConfig.model_type, LadderConfig)
AutoModelForCausalLM.register(LadderConfig, LadderForCausalLM)

__all__ = ["LadderConfig", "LadderForCausalLM", "export", "parallelize"]
