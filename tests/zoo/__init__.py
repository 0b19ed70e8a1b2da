"""Tensor subclasses that others wrote, as a table of programs: `ZOO`."""

from . import (
    complex_cases,
    distributed_cases,
    masked_cases,
    nested_cases,
    normed_cases,
    opaque_cases,
    page,
    torch_cases,
    torchao_cases,
    torchao_prototype_cases,
)
from .case import ROLES, ZOO, Case, built, differentiable, gradients

__all__ = [
    "ROLES",
    "ZOO",
    "Case",
    "built",
    "complex_cases",
    "differentiable",
    "distributed_cases",
    "gradients",
    "masked_cases",
    "nested_cases",
    "normed_cases",
    "opaque_cases",
    "page",
    "torch_cases",
    "torchao_cases",
    "torchao_prototype_cases",
]
