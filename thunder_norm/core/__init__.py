"""Kinds of norms, their algebra, the registry of rules, and running a rule; torch only."""

from thunder_norm.core import dispatch as _dispatch  # runs operations on the tensors  # noqa: F401
