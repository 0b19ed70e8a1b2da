"""Rules for calls of operations whose gradients are kernels of torch's, and what they have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

import torch

from thunder_norm.functions.programs import is_differentiable
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.extend import OperatorExecutor

# In no executor list: what is written here carries it.
operations = OperatorExecutor("thunder_norm_kernels", version="1")

Joint = Callable[..., Any]  # of an operation's arguments: writes it and its gradients, as Thunder's ``grad_transform`` does
# From which arguments are to get gradients, and the arguments, all of them in order; None where this call is not for it.
_Rule = Callable[..., Joint | None]
_RULES: dict[Hashable, tuple[_Rule, inspect.Signature]] = {}


def kernels(symbol: Symbol, signature: inspect.Signature | None = None) -> Callable[[_Rule], _Rule]:
    """Register the rule of an operation; `signature` is its arguments', where its symbol does not know them."""

    def register(rule: _Rule) -> _Rule:
        _RULES[symbol.id] = rule, signature or inspect.signature(symbol.meta)
        return rule

    return register


def has_any(bsym: BoundSymbol) -> bool:
    """Whether there is a rule for some calls of an operation."""
    return bsym.sym.id in _RULES


def joint_of(bsym: BoundSymbol, moving: Set[str] | None) -> Joint | None:
    """What differentiates an operation by kernels of torch's; None if they are not for this call.

    `moving` are the names of what is differentiated; None if that may be anything.
    """
    found = _RULES.get(bsym.sym.id)
    if found is None:
        return None
    rule, signature = found
    joint = rule(wanted(moving), *arguments_of(bsym))
    return None if joint is None else lambda *args, **kwargs: joint(*_in_order(signature, args, kwargs))


def arguments_of(bsym: BoundSymbol) -> tuple:
    """All arguments of an operation that there is a rule for, in order."""
    _, signature = _RULES[bsym.sym.id]
    return _in_order(signature, bsym.args, bsym.kwargs)


def wanted(moving: Set[str] | None) -> Callable[[Any], bool]:
    """Whether an argument is to get a gradient; `moving` as for `joint_of`."""
    return lambda p: is_differentiable(p) and (moving is None or p.name in moving)


def _in_order(signature: inspect.Signature, args: tuple, kwargs: dict) -> tuple:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def like(t: TensorProxy) -> TensorProxy:
    """A new proxy with the metadata of another."""
    return TensorProxy(like=t, requires_grad=False)


def are_floats(*tensors: TensorProxy | None) -> bool:
    """Whether tensors are real numbers of one dtype, with entries."""
    present = [t for t in tensors if t is not None]
    is_real = len({t.dtype for t in present}) == 1 and dtypes.is_float_dtype(present[0].dtype)
    return is_real and all(0 not in t.shape for t in present)


def put(tensors: Sequence[TensorProxy | None], mask: Sequence[bool], found: Sequence[TensorProxy]) -> None:
    """Put what was found for those of the tensors that the mask marks."""
    for t, g in zip([t for t, is_wanted in zip(tensors, mask, strict=True) if is_wanted], found, strict=True):
        prims.put_grad(t, g)


def like_wanted(tensors: Sequence[TensorProxy | None], mask: Sequence[bool]) -> tuple[TensorProxy, ...]:
    """The gradients of those of the tensors that the mask marks."""
    return tuple(like(t) for t, is_wanted in zip(tensors, mask, strict=True) if t is not None and is_wanted)


def given(found: Sequence[torch.Tensor | None], mask: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """What a kernel found for those of its tensors that the mask marks."""
    return tuple([t for t, is_wanted in zip(found, mask, strict=True) if t is not None and is_wanted])
