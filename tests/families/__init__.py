"""Small models of every architecture that transformers, timm and torchvision have, made from their configurations alone.

Nobody chose these: `python -m tests.families` shows what of `tests.models_zoo`'s columns fails for whom.
"""

from .names import families, family

__all__ = ["families", "family"]
