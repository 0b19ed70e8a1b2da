"""Tensor subclasses that others wrote, as a table of programs: `ZOO`."""

from . import masked_cases, nested_cases, normed_cases, opaque_cases, page, torch_cases, torchao_cases
from .case import ROLES, ZOO, Case, built, differentiable, gradients

__all__ = [
    "ROLES",
    "ZOO",
    "Case",
    "built",
    "differentiable",
    "gradients",
    "masked_cases",
    "nested_cases",
    "normed_cases",
    "opaque_cases",
    "page",
    "torch_cases",
    "torchao_cases",
]
