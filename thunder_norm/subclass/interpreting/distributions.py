"""What ``torch.distributions`` checks of parameters and values: eager PyTorch looks at them, and a trace looks at them in every call."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributions import distribution

from thunder_norm.errors import DataDependentError, with_details
from thunder_norm.subclass.interpreting.assertions import is_checked_in_calls
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.lookasides import instead_of, instead_of_named
from thunder_norm.tracing.python.assertions import asserted
from thunder_norm.tracing.torch_functions import known_values
from thunder.core.interpreter import INTERPRETER_SIGNALS, WrappedValue, _interpret_call, do_raise, wrap_const
from thunder.core.proxies import TensorProxy


def _all_asserted(valid: torch.Tensor, message: str) -> bool:
    return asserted(valid.all(), True, "ValueError", message)


@instead_of_named("torch.distributions.distribution", "_all_true_or_runtime_assert")
def _all_true(valid: WrappedValue, message: WrappedValue) -> Any:
    """The distribution is taken for a valid one while the program is traced; a call in which it is not raises as eager PyTorch does."""
    is_known = isinstance(valid.value, TensorProxy) and known_values.value_of(valid.value) is not None
    if is_checked_in_calls() or is_known:
        return _interpret_call(_all_asserted, valid, message)
    return do_raise(
        DataDependentError(
            with_details(
                "the values of tensors are needed for the checks of a distribution",
                at=location_of_user(),
                why="the program is traced once for all values of its tensors, so none is known",
                instead="validate_args=False for the distribution; or SubclassTransform or NormTransform, which check in every call",
            )
        )
    )


if not hasattr(distribution, "_all_true_or_runtime_assert"):  # before torch 2.15 distributions ask this of what they check

    @instead_of(torch._is_all_true)
    def _is_all_true(valid: WrappedValue) -> Any:
        holds = _all_true(valid, wrap_const("Expected parameter or value argument to satisfy its distribution constraint."))
        return holds if holds is INTERPRETER_SIGNALS.EXCEPTION_RAISED else _interpret_call(_as_torch, holds, valid)


def _as_torch(holds: bool, valid: torch.Tensor) -> torch.Tensor:
    return torch.tensor(holds, device=valid.device)


def _is_positive_definite(constraint: Any, value: torch.Tensor) -> torch.Tensor:
    """torch's looks for a factor where all matrices are symmetric; this looks for one of each."""
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1) & torch.linalg.cholesky_ex(value).info.eq(0)


@instead_of_named("torch.distributions.constraints", "_PositiveDefinite.check")
def _positive_definite(constraint: WrappedValue, value: WrappedValue) -> Any:
    return _interpret_call(_is_positive_definite, constraint, value)
