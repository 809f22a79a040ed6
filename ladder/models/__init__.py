"""The model: residual plans, layers, the one Transformer. Imports torch and itself only."""

from ladder.models.config import ModelConfig, RopeScaling
from ladder.models.documents import document_starts
from ladder.models.errors import UserError
from ladder.models.plan import Plan, Sublayer
from ladder.models.presets import resolve_plan
from ladder.models.reducer import Ranks, Reducer
from ladder.models.transformer import Transformer

__all__ = [
    "ModelConfig",
    "Plan",
    "Ranks",
    "Reducer",
    "RopeScaling",
    "Sublayer",
    "Transformer",
    "UserError",
    "document_starts",
    "resolve_plan",
]
