"""Results without data of operations that cannot run without data themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.errors import ProfileError
from thunder_norm.profiling.flops import name_of, op_of

Rule = TypeVar("Rule", bound=Callable[..., Any])

_rules: dict[Any, Callable[..., Any]] = {}


def register_shape_rule(op: Any, *, override: bool = False) -> Callable[[Rule], Rule]:
    """Tell what a call of `op` returns, for an operation that cannot be run on tensors without data.

    >>> import torch
    >>> @torch.library.custom_op("docs::pairs", mutates_args=())
    ... def pairs(x: torch.Tensor) -> torch.Tensor:
    ...     return torch.from_numpy(x.numpy().repeat(2))
    >>> @register_shape_rule(pairs)
    ... def pairs_shape(x):
    ...     return x.new_empty(2 * x.numel())

    Args:
        op: an operation of ``torch.library`` or ``torch.ops``, or a torch function.
        override: replace the rule that `op` has.

    The rule takes what `op` takes, with tensors without data, and returns such tensors.

    Raises:
        ProfileError: `op` has a rule already, or is nothing that a program can call; the rule is no function.
    """
    key = op_of(op)

    def register(rule: Rule) -> Rule:
        if not callable(rule):
            raise ProfileError(f"a shape rule is a function, got {rule!r}")
        if not override and key in _rules:
            raise ProfileError(f"{name_of(key)} has a shape rule already; register_shape_rule(..., override=True) replaces it")
        _rules[key] = rule
        return rule

    return register


def apply(op: Any, args: tuple, kwargs: dict) -> tuple[bool, Any]:
    """Whether there is a rule for `op`, and what it says.

    Raises:
        ProfileError: the rule returns something other than tensors.
    """
    if not _rules:
        return False, None
    try:
        rule = _rules.get(op_of(op))
    except (ProfileError, TypeError):
        return False, None
    if rule is None:
        return False, None
    result = rule(*args, **kwargs)
    if not all(isinstance(v, torch.Tensor | type(None)) for v in tree_leaves(result)):
        raise ProfileError(f"the shape rule of {name_of(op)} must return tensors, got {type(result).__name__}")
    return True, result
