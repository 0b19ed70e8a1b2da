"""Calls with normed tensors that no rule can answer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thunder_norm.core.context import current_environment
from thunder_norm.core.registry import find_op, key_of
from thunder_norm.core.tensors import NormedTensor, describe_call
from thunder_norm.errors import InnerDerivativeError, MissingNormRuleError, NormMismatchError, UnsupportedOpError, with_details
from thunder_norm.op_names import op_name
from thunder_norm.trees import flat_tensors


def check_not_batched(func: Callable) -> None:
    """Refuse torch.vmap around an operation: its tensors stand for several, of which each has a norm of its own.

    Raises:
        InnerDerivativeError: there is one; programs are run operation by operation on the whole batch then.
    """
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Vmap:
        raise InnerDerivativeError(
            with_details(
                f"{op_name(func)} on a NormedTensor inside torch.vmap",
                at=current_environment().user_location(),
                instead="the operation on whole tensors, with a batch dimension",
            )
        )


def check_finalized(func: Callable, args: tuple, kwargs: dict) -> None:
    """Refuse tensors that have a norm and no entries yet."""
    for x in flat_tensors((args, kwargs)):
        if isinstance(x, NormedTensor) and not x.finalized:
            raise NormMismatchError(
                f"{op_name(func)} on an unfinalized {type(x).__name__}: give it a backing (finalize) or pass it to a norm map"
            )


def reading_values(func: Callable) -> UnsupportedOpError:
    """The error for what hands the numbers of a normed tensor to Python, where they have no norm."""
    return UnsupportedOpError(
        with_details(
            f"{op_name(func)} of a NormedTensor",
            at=current_environment().user_location(),
            why="what a program makes of its numbers outside of torch has no norm, and moves as they do",
            instead="operations of torch; comparisons of it and indices (x > 0, x.argmax()) are plain tensors, whose numbers may be read",
        )
    )


def missing_rule(func: Callable, args: tuple, kwargs: dict, decomposition: str | None = None) -> MissingNormRuleError:
    """The error for an operation no registered rule fits, and why that of its ATen decomposition does not help."""
    op = find_op(key_of(func))
    signatures = [f"{r.fn.__name__}{r.signature}" + (f"  [mode {r.mode}]" if r.mode else "") for r in op.rules] if op else []
    return MissingNormRuleError(
        with_details(
            f"no norm rule for {op_name(func)}",
            called_with=describe_call(args, kwargs),
            at=current_environment().user_location(),
            decomposition=decomposition,
            registered="\n".join(signatures) or "(none)",
            to_add_one=f'@thunder_norm.normed_op({op_name(func)}).register_norm   -- see CONTRIBUTING.md, "Adding a rule"',
        )
    )
