"""The rules of the function transforms: how an operation is differentiated, pushed forward and batched.

A rule is kept under the id of the operation's symbol in Thunder.  An operation without a rule is taken apart into the operations
it consists of, so rules are only needed for primitives, and wherever one is better than what its decomposition gives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from thunder_norm.errors import MissingTransformRuleError, TransformError, TransformTypeError, with_details
from thunder_norm.tracing.hooks import torch_functions_on_proxies
from thunder_norm.tracing.locations import location_of
from thunder_norm.tracing.recording import scope
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import get_tracectx

Rule = TypeVar("Rule")


@dataclass(frozen=True)
class VjpRule:
    """Reverse mode of one operation, in two functions.

    Attributes:
        forward: ``forward(*args, **kwargs)`` returns the result and what it saves.
        backward: ``backward(saved, *cotangents)`` returns the gradient of each positional argument (None: zero, or not a
            differentiable tensor).
        check_active: ``check_active(args, active)`` refuses to differentiate by arguments the rule says nothing of; `active` are the
            names of the tensors that the inputs reach.
        takes_missing: `backward` takes None for the cotangent of a result that nothing uses; others are given zeros.
    """

    takes_missing: ClassVar[bool] = False

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    check_active: Callable[[tuple, Set[str]], None] | None = None

    def paired(self, args: tuple, kwargs: dict, gradients: Any) -> list[tuple[Any, Any]]:
        """Each argument, taken out of lists, with what `backward` returned for it; those without a gradient are left out.

        Raises:
            TransformError: there is not one for each positional argument.
        """
        if isinstance(gradients, Mapping):
            raise TransformError("gradients are returned in the order of the arguments, not by name")
        gradients = tuple(gradients) if isinstance(gradients, Sequence) else (gradients,)
        return _paired(self._in_order(args, kwargs, len(gradients)), gradients)

    def _in_order(self, args: tuple, kwargs: dict, count: int) -> tuple:
        """The arguments that gradients are for: those by keyword, and those left out, at their places if there is one for each."""
        if count == len(args):
            return args
        try:
            bound = inspect.signature(self.forward).bind(*args, **kwargs)
        except TypeError:
            return args
        bound.apply_defaults()
        return bound.args


def _paired(args: Sequence[Any], gradients: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(args) != len(gradients):
        raise TransformError(f"{len(gradients)} gradients are returned for {len(args)} arguments")
    found = []
    for a, g in zip(args, gradients, strict=True):
        if isinstance(a, Sequence) and isinstance(g, Sequence) and not isinstance(a, str):
            found.extend(_paired(a, g))
        elif g is not None:
            found.append((a, g))
    return found


class Registry(Generic[Rule]):
    """Rules of one transform, by the id of the operation's symbol."""

    def __init__(self, transform: str):
        self.transform = transform
        self._rules: dict[Hashable, Rule] = {}
        self.num_changes = 0

    def find(self, symbol: Symbol) -> Rule | None:
        """The rule for a symbol, None if there is none; an operation may carry rules of its own, in its id."""
        own = getattr(symbol.id, "rules", None)
        if own is not None:
            return own.get(self.transform)
        return self._rules.get(symbol.id) if symbol.id is not None else None

    def add(self, operation: Callable | Symbol | Hashable, rule: Rule, *, override: bool = False) -> None:
        """Register a rule.

        Raises:
            TransformError: there is one, and `override` is not given.
        """
        key = symbol_id(operation)
        if key in self._rules and not override:
            raise TransformError(
                with_details(
                    f"{key} has a {self.transform} rule already",
                    registered=_described(self._rules[key]),
                    to_replace_it="register with override=True",
                )
            )
        self._rules[key] = rule
        self.num_changes += 1

    def remove(self, operation: Callable | Symbol | Hashable) -> Rule | None:
        """Forget the rule of an operation and return it."""
        self.num_changes += 1
        return self._rules.pop(symbol_id(operation), None)

    def __contains__(self, operation: Callable | Symbol | Hashable) -> bool:
        return symbol_id(operation) in self._rules

    def ids(self) -> frozenset[Hashable]:
        """The ids of all operations that have a rule."""
        return frozenset(self._rules)


vjp_rules: Registry[VjpRule] = Registry("vjp")
jvp_rules: Registry[Callable] = Registry("jvp")
batching_rules: Registry[Callable] = Registry("batching")

# How an operation that Thunder has no decomposition of is written in others, for all transforms; called as the operation is.
# Some are what Thunder's own gradient rules are made of: a second transform meets them in the program that a first one made.  Others
# torch would transform wrong.  And torch's formulas for the gradients of those that draw numbers would draw others.
decompositions: Registry[Callable] = Registry("decomposition")

# How numbers are drawn in a batch: `rule(size, dim, tensor, *args)`, for each of `size` samples, first dimension of the result, or one
# for all of them if `size` is None; `dim` is 0 where the tensor has the dimension of the batch.
drawing_rules: Registry[Callable] = Registry("drawing")

# Symbols that draw numbers, and what carries them out.
drawing_kernels: dict[Symbol, Callable] = {}


def decomposed(bsym: BoundSymbol) -> list[BoundSymbol] | None:
    """What an operation consists of, by its own arguments and results; None if it has no decomposition, or none of these arguments."""
    decomposition = decompositions.find(bsym.sym)
    if decomposition is None:
        return None
    with scope(get_tracectx()) as written:
        result = decomposition(*bsym.args, **bsym.kwargs)
    if result is NotImplemented:
        return None
    pairs = zip(tree_flatten(result)[0], tree_flatten(bsym.output)[0], strict=True)
    renamed = {variableify(made): out for made, out in pairs if isinstance(made, TensorProxy)}
    return [b.from_bsym_swap_proxies(renamed) for b in written]


def missing_rule(bsym: BoundSymbol, transform: str, also: str = "", **details: str) -> MissingTransformRuleError:
    """The error for an operation that has no rule: what `also` is true of it, where it stands, and how to add one."""
    name = f"thunder.core.prims.{bsym.sym.name}" if isinstance(bsym.sym.id, prims.PrimIDs) else repr(str(bsym.sym.id))
    pair = "(forward, backward)" if transform == "vjp" else ""
    return MissingTransformRuleError(
        with_details(
            f"{bsym.sym.name} {also}has no {transform} rule",
            operation=str(bsym.sym.id),
            at=location_of(bsym),
            **details,
            to_add_one=f"thunder_norm.transforms.register_{transform}({name}){pair}; see CONTRIBUTING.md",
        )
    )


def generation() -> int:
    """A number that grows whenever a rule is registered or removed: programs compiled before may not be what they would be now."""
    return sum(registry.num_changes for registry in (vjp_rules, jvp_rules, batching_rules, decompositions))


def symbol_id(operation: Callable | Symbol | Hashable) -> Hashable:
    """The id under which Thunder records an operation: a torch function or method, a symbol, or an id itself.

    Raises:
        TransformError: Thunder records nothing under that function's name.

    >>> symbol_id(torch.sin), symbol_id(torch.Tensor.add), symbol_id(torch.nn.functional.linear)
    ('torch.sin', 'torch.add', 'torch.nn.functional.linear')
    """
    if isinstance(operation, Symbol):
        if operation.id is None:
            raise TransformError(f"the symbol {operation.name} has no id to register a rule under")
        return operation.id
    if not callable(operation):
        return operation
    known = ltorch._torch_to_thunder_function_map
    name = getattr(operation, "__name__", "")
    # some functions are mapped to one that chooses between symbols; the symbol for plain tensors has the function's name
    for found in (known.get(operation), getattr(ltorch, name, None), known.get(getattr(torch, name, None))):
        if isinstance(found, Symbol) and operation in known:
            return found.id
    recorded = getattr(operation, "__thunder_symbol__", None)  # an operation that was given a symbol of its own
    if isinstance(recorded, Symbol):
        return symbol_id(recorded)
    raise TransformError(
        with_details(
            f"{getattr(operation, '__qualname__', operation)!r} is not an operation that Thunder records",
            expected="a torch function, a thunder Symbol, or the id of one",
        )
    )


def register_vjp(operation: Callable | Symbol | Hashable, *, override: bool = False) -> Callable[[Callable, Callable], VjpRule]:
    """Register how an operation is differentiated: ``register_vjp(torch.sin)(forward, backward)``.

    ``forward(*args, **kwargs)`` returns ``(result, saved)``; ``backward(saved, *cotangents)`` returns one gradient for each
    positional argument of `forward` (a single one may be returned bare), None where there is none.  Both are written in torch
    functions and are traced; cotangents have the shapes of the results, gradients those of the arguments.

    Raises:
        TransformError: the operation is unknown, or has such a rule and `override` is not given.
        TransformTypeError: a rule is no function.

    >>> import torch
    >>> rule = register_vjp(torch.hypot)(
    ...     lambda x, y: ((r := torch.hypot(x, y)), (x / r, y / r)),
    ...     lambda saved, g: (g * saved[0], g * saved[1]),
    ... )
    >>> vjp_rules.remove(torch.hypot) is rule
    True
    """

    def register(forward: Callable, backward: Callable) -> VjpRule:
        rule = VjpRule(_in_torch(forward), _in_torch(backward))
        vjp_rules.add(operation, rule, override=override)
        return rule

    return register


def self_adjoint(function: Callable) -> tuple[Callable, Callable]:
    """The vjp rule of a linear function that is its own transpose, ``<f(x), y> = <x, f(y)>``: forward and backward.

    `check_vjp` finds out whether it is.  Further arguments are the same in both directions and get no gradient.

    Raises:
        TransformTypeError: no function.

    >>> import torch
    >>> rule = register_vjp(torch.fliplr)(*self_adjoint(torch.fliplr))
    >>> vjp_rules.remove(torch.fliplr) is rule
    True
    """
    if not callable(function):
        raise TransformTypeError(f"self_adjoint takes a function, got {function!r}")

    def forward(x: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return function(x, *args, **kwargs), (args, kwargs)

    def backward(saved: Any, cotangent: Any) -> Any:
        args, kwargs = saved
        return (function(cotangent, *args, **kwargs), *[None] * len(args))

    return forward, backward


def register_jvp(operation: Callable | Symbol | Hashable, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Register how an operation pushes tangents forward, as a decorator of the rule.

    ``rule(primals, tangents, **kwargs)`` returns ``(result, tangent of the result)``.  `primals` are the positional arguments,
    `tangents` is as long, with None for what is not a tensor or does not move; a tangent has its primal's shape and dtype.  A
    tangent of None says that the result does not move.

    Raises:
        TransformError: the operation is unknown, or has such a rule and `override` is not given.
        TransformTypeError: a rule is no function.

    >>> import torch
    >>> @register_jvp(torch.special.bessel_j0)
    ... def bessel_j0(primals, tangents):
    ...     (x,), (dx,) = primals, tangents
    ...     return torch.special.bessel_j0(x), -torch.special.bessel_j1(x) * dx
    >>> jvp_rules.remove(torch.special.bessel_j0).__name__
    'bessel_j0'
    """

    def register(rule: Callable) -> Callable:
        jvp_rules.add(operation, _in_torch(rule), override=override)
        return rule

    return register


def register_batching(operation: Callable | Symbol | Hashable, *, override: bool = False) -> Callable[[Callable], Callable]:
    """Register how an operation is batched, as a decorator of the rule.

    ``rule(axis_size, in_dims, *args, **kwargs)`` returns ``(result, out_dim)``.  `args` are the operation's arguments with the
    batch dimension, of size `axis_size`, still in them; `in_dims` mirrors `args`: an int where a tensor has a batch dimension, None
    where it has not, and a tuple of these for a list of tensors.  `out_dim` says where the result has it: one int (or None) for
    all results, or a tuple with one for each.  A rule may return NotImplemented: then the operation is taken apart.

    Raises:
        TransformError: the operation is unknown, or has such a rule and `override` is not given.
        TransformTypeError: a rule is no function.

    >>> import torch
    >>> @register_batching(torch.trace)
    ... def trace(axis_size, in_dims, a):
    ...     return torch.diagonal(a.movedim(in_dims[0], 0), dim1=1, dim2=2).sum(-1), 0
    >>> batching_rules.remove(torch.trace).__name__
    'trace'
    """

    def register(rule: Callable) -> Callable:
        batching_rules.add(operation, _in_torch(rule), override=override)
        return rule

    return register


def _in_torch(rule: Callable) -> Callable:
    """A rule of the user's, written in torch's functions and called on proxies.

    Raises:
        TransformTypeError: it is no function.
    """
    if not callable(rule):
        raise TransformTypeError(f"a rule of a transform is a function, got {rule!r}")

    @functools.wraps(rule)
    def in_torch(*args: Any, **kwargs: Any) -> Any:
        with torch_functions_on_proxies():
            return rule(*args, **kwargs)

    return in_torch


def _described(rule: Any) -> str:
    functions = (rule.forward, rule.backward) if isinstance(rule, VjpRule) else (rule,)
    return ", ".join(f"{f.__module__}.{getattr(f, '__qualname__', repr(f))}" for f in functions)
