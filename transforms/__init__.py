"""Transforms for ``thunder.jit(transforms=[...])`` and transforms of functions."""
