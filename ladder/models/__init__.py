"""The model: residual plans, layers, the one Transformer. Imports torch and itself only.

Names are imported on first use: code that reads only plans and configs does not import torch, which
takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ladder.models.config import ModelConfig, RopeScaling
    from ladder.models.documents import document_starts
    from ladder.models.errors import UserError
    from ladder.models.plan import Plan, SublayerRecord
    from ladder.models.presets import resolve_plan
    from ladder.models.ranks import Ranks
    from ladder.models.reducer import Reducer
    from ladder.models.transformer import Transformer

_MODULES = {
    "ModelConfig": "config",
    "Plan": "plan",
    "Ranks": "ranks",
    "Reducer": "reducer",
    "RopeScaling": "config",
    "SublayerRecord": "plan",
    "Transformer": "transformer",
    "UserError": "errors",
    "document_starts": "documents",
    "resolve_plan": "presets",
}

__all__ = [
    "ModelConfig",
    "Plan",
    "Ranks",
    "Reducer",
    "RopeScaling",
    "SublayerRecord",
    "Transformer",
    "UserError",
    "document_starts",
    "resolve_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
