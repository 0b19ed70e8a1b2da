"""Operations on parameters that no NormedTensor takes part in: a parameter keeps its norm through them, or is refused.

A parameter is lifted where an operation consumes it together with a NormedTensor.  What is done to it before (a split of a packed
projection, a transpose) gives a plain tensor, whose norm is not that of its data if the parameter's was given or moves.  Two modes
watch such operations: `Functions` calls of torch functions, in the program and inside those that are written in Python
(`F.multi_head_attention_forward`), `Operations` what torch's C++ code decomposes others into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.core import dispatch, registry
from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import MissingNormRuleError, with_details
from thunder_norm.norms.parameters import refuse_mutation
from thunder_norm.op_names import op_name


class Parameters(Protocol):
    """What the modes ask of a run in normed mode: which tensors are parameters, and what was made of them."""

    def concerns(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is a floating parameter, or was made from parameters alone."""
        ...

    def known(self, t: Any) -> Any:
        """The parameter that a tensor is by another name; anything else as it is."""
        ...

    def copied(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """A deep copy of a tensor, which is a parameter if it is one of a parameter."""
        ...

    def matters(self, t: torch.Tensor) -> bool:
        """Whether its norm is another than that of its data, or moves."""
        ...

    def annotated(self, t: Any) -> Any:
        """A parameter as the kind stated for it; anything else as it is."""
        ...

    def location(self) -> str | None:
        """The user's line."""
        ...

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """An operation on NormedTensors."""
        ...

    def derive(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone: run plainly, and remembered."""
        ...

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Called after an operation that neither parameters alone nor NormedTensors take part in."""
        ...

    @property
    def unknown(self) -> Unknown:
        """The tensors made from parameters and others by operations without a norm rule."""
        ...


class Unknown:
    """Tensors made from parameters and other tensors by operations without a norm rule: nobody knows their norm."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, Callable]] = {}

    def __contains__(self, t: torch.Tensor) -> bool:
        return id(t) in self._made

    def add(self, func: Callable, args: Any, result: Any) -> None:
        """Remember the floating results of `func`; what is no argument of it came from it."""
        given = {id(v) for v in tree_flatten(args)[0]}
        for t in tree_flatten(result)[0]:
            if isinstance(t, torch.Tensor) and t.is_floating_point() and id(t) not in given:
                self._made[id(t)] = t, func

    def check(self, t: torch.Tensor, location: str | None) -> None:
        """Refuse to take the values of such a tensor for its norm.

        Raises:
            MissingNormRuleError: `t` is one.
        """
        if t in self:
            raise unknown_norm(op_name(self._made[id(t)][1]), t, location)


def unknown_norm(operation: str, t: torch.Tensor, location: str | None) -> MissingNormRuleError:
    """The error for a tensor that an operation without a norm rule made from a parameter and other tensors."""
    return MissingNormRuleError(
        with_details(
            f"no norm rule for {operation}, which made a {describe(t)} of a parameter and of other tensors",
            at=location,
            why="the parameter's norm is given, or moves, and that of the result would silently be that of its values",
            to_add_one=f"@thunder_norm.normed_op({operation}).register_norm",
        )
    )


class Functions(TorchFunctionMode):
    """Takes over torch functions on parameters; NormedTensors find their rules by themselves."""

    def __init__(self, parameters: Parameters):
        super().__init__()
        self.parameters = parameters

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = self.parameters
        if not registry.is_metadata(func) and not registry.is_mutation(func, kwargs):
            args, kwargs = tree_map(known.known, (args, kwargs))
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if any(isinstance(t, NormedTensor) for t in tensors):
            return known.run(func, tree_map(known.annotated, args), tree_map(known.annotated, kwargs))
        if getattr(func, "__self__", None) is torch.Tensor.data:  # the same tensor by another name
            return func(*args, **kwargs)
        if func in _DEEP_COPIES:
            return known.copied(func, *args, **kwargs)
        has_rule = registry.has_rule(func)
        if not has_rule and registry.is_metadata(func):
            return func(*args, **kwargs)
        concerns = [known.concerns(t) for t in tensors]
        if not any(concerns) and dispatch.is_factory(func):
            return dispatch.run_registered(func, args, kwargs)
        if tensors and all(concerns):
            given = tree_map(known.annotated, (args, kwargs))
            if any(isinstance(t, NormedTensor) for t in tree_flatten(given)[0]):
                return known.run(func, *given)
            if any(map(known.matters, tensors)):
                refuse_mutation(func, args, kwargs, known.location())
            elif not has_rule:
                return func(*args, **kwargs)
            return known.derive(func, args, kwargs)
        if any(concerns) and has_rule:
            return dispatch.run_registered(func, tree_map(known.annotated, args), tree_map(known.annotated, kwargs))
        return _of_others(known, func, args, kwargs, tensors)


_DEEP_COPIES = frozenset({torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__})


class Operations(TorchDispatchMode):
    """Watches aten operations that a torch function on NormedTensors becomes."""

    def __init__(self, parameters: Parameters):
        super().__init__()
        self.parameters = parameters

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        known = self.parameters
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if any(isinstance(t, NormedTensor) for t in tensors):
            return dispatch.torch_dispatch(func, args, kwargs)
        if tensors and all(map(known.concerns, tensors)) and any(map(known.matters, tensors)):
            refuse_mutation(func, args, kwargs, known.location())
            return known.derive(func, args, kwargs)
        if any(map(known.concerns, tensors)) and registry.has_rule(func):
            return dispatch.torch_dispatch(func, args, kwargs)
        return _of_others(known, func, args, kwargs, tensors)


def _of_others(known: Parameters, func: Callable, args: tuple, kwargs: dict, tensors: Sequence[torch.Tensor]) -> Any:
    """An operation that is run plainly, also on tensors that are not parameters."""
    result = func(*args, **kwargs)
    known.follow(func, args, kwargs, result)
    if any(t in known.unknown or known.concerns(t) and known.matters(t) for t in tensors):
        known.unknown.add(func, (args, kwargs), result)
    return result
