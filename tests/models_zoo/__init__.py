"""Models that others wrote, and what becomes of them: `MODELS`."""

from . import (
    transformers_language,
    transformers_other,
    transformers_vision,
    vision_libraries,
    written,
    written_after_papers,
    written_estimators,
    written_for_science,
    written_more,
    written_recurrences,
    written_sequences,
    written_thresholds,
)
from .case import MODELS, Built, Model, built

__all__ = [
    "MODELS",
    "Built",
    "Model",
    "built",
    "transformers_language",
    "transformers_other",
    "transformers_vision",
    "vision_libraries",
    "written",
    "written_after_papers",
    "written_estimators",
    "written_for_science",
    "written_more",
    "written_recurrences",
    "written_sequences",
    "written_thresholds",
]
