"""Wrappers in functions under torch's own transforms, `torch.func.grad` and the others.

Our transforms differentiate what a class does to its inner tensors.  Torch's differentiate the operation, and ask the class for the
operations of its derivative: gradients of quantities have units, those of logarithms are logarithms.  The two agree where a class does to
each of its inner tensors what is done to the whole, and keeps nothing besides; and where ``__torch_function__`` of a class, which comes
before torch's derivatives, computes a plain tensor of a plain one and of what is inside of its instances.  Other programs are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import InnerDerivativeTransformError, TransformError, with_details
from thunder_norm.functions.interpreted import OpenWrapper, is_open
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.subclass.recording.trace import OperationId
from thunder_norm.tracing.activity import propagate
from thunder_norm.tracing.locations import location_of, location_of_user
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class OfTorch:
    """The function that a transform of torch's is given."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(*args, **kwargs)


def check_agrees(name: str, given: Any, trace: TraceCtx, moving: Sequence[tuple[TensorProxy, TensorProxy]]) -> None:
    """Refuse a function whose derivative would be another than torch's.

    Args:
        name: of the transform.
        given: the arguments that it is differentiated in.
        trace: the function's program.
        moving: the tensors of these, and what the program calls them.

    Raises:
        TransformError: a wrapper among the arguments has a context, or an operation on wrappers is not that on their inner tensors.
    """
    wrappers = [v for v in tree_flatten(given, is_leaf=is_open)[0] if is_open(v)]
    if (w := next((w for w in wrappers if _has_context(w.structure.spec)), None)) is not None:
        why = (
            f"a {w.class_name} has a context, and its gradients have that which its class gives to the operations of the backward"
        )
        raise _refused(name, f"a {w.class_name}", why, location_of_user())
    wrapper_of = {p.name: i for i, w in enumerate(wrappers) for p in w.leaves if isinstance(p, TensorProxy)}
    active = {p.name for _, p in moving}
    inside = {p.name: wrapper_of[outer.name] for outer, p in moving if outer.name in wrapper_of}  # and of which wrapper it is
    for i, bsym in enumerate(trace.bound_symbols, len(wrappers)):
        given_here = {p.name for p in bsym.flat_proxy_args} & active
        if isinstance(bsym.sym.id, OperationId) and not isinstance(bsym.sym.id.cls, str):
            _check_operation(name, bsym, given_here, inside)
            inside |= {p.name: i for p in bsym.flat_proxy_outs}
        elif given_here and inside.keys() >= given_here:  # what a transform inside has made of the operations on wrappers
            inside |= {p.name: inside[next(iter(given_here))] for p in bsym.flat_proxy_outs}
        propagate(bsym, active)


def check_maps(args: Sequence[Any], dims: Sequence[int | None]) -> None:
    """Refuse to map over wrappers whose inner tensors have other shapes than the whole, which torch maps over.

    Args:
        args: of the mapped function.
        dims: the batch dimension of each leaf of these, inner tensors among them.

    Raises:
        TransformError: there is one.
    """
    position = 0
    for v in tree_flatten(args, is_leaf=is_open)[0]:
        count = len(v.leaves) if is_open(v) else 1
        is_mapped = any(d is not None for d in dims[position : position + count])
        position += count
        if is_open(v) and is_mapped and any(shape != tuple(v.structure.spec.shape) for shape in v.structure.shapes):
            why = "its inner tensors have other shapes than the whole, and torch maps over that"
            raise _refused("vmap", f"a {v.class_name}", why, location_of_user())


def of_whole(name: str, of_inner: Sequence[Any]) -> Any:
    """The derivatives of a wrapper in the structure of the arguments, of those of its inner tensors.

    Each inner tensor hangs on the one that stands in its place (`check_agrees`), so that a wrapper's derivative with respect to another is a wrapper.

    Raises:
        TransformError: a tensor of the arguments is in no wrapper of as many inner tensors.
    """
    flat = [tree_flatten(tree, is_leaf=is_open) for tree in of_inner]
    merged = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not all(is_open(p) and len(p.leaves) == len(parts) for p in parts):
            why = "the derivative of a wrapper with respect to a plain tensor is a wrapper in torch"
            raise _refused(name, "a plain tensor and a wrapper that is returned", why, location_of_user())
        leaves = [ltorch.contiguous(p.leaves[i]) for i, p in enumerate(parts)]  # classes ask them to lie alike
        merged.append(OpenWrapper(leaves, parts[0].structure))
    return tree_unflatten(merged, flat[0][1])


def _has_context(spec: WrapperSpec) -> bool:
    return bool(spec.ctx) or any(_has_context(inner) for inner in spec.inner if inner is not None)


def _check_operation(name: str, bsym: BoundSymbol, moving: set[str], inside: dict[str, int]) -> None:
    if not moving:
        return
    what = f"{bsym.sym.id}"
    if inside.keys().isdisjoint(moving) and _is_of_function(bsym):
        return
    if not inside.keys() >= moving:
        why = "the gradient of a plain tensor beside wrappers is a wrapper in torch"
        raise _refused(name, what, why, location_of(bsym))
    parts = [_cone(p.name, bsym.subsymbols) for p in bsym.flat_proxy_outs]
    kinds = {tuple(b.sym.name for b in part) for part in parts}
    is_alone = len(parts) == 1 and _base(bsym) not in "".join(next(iter(kinds)))
    if len(kinds) != 1 or is_alone or any(_mixes(part, inside) for part in parts):
        why = "what the class does to its inner tensors is not what is done to the whole: torch would differentiate that"
        raise _refused(name, what, why, location_of(bsym))


def _is_of_function(bsym: BoundSymbol) -> bool:
    """Whether ``__torch_function__`` of a class has computed plain tensors of what is inside of wrappers, which torch then differentiates."""
    acquisition = current_acquisition()
    made = {p.name for p in bsym.flat_proxy_outs}
    return acquisition is not None and bool(made) and acquisition.of_functions >= made


def _mixes(part: Sequence[BoundSymbol], inside: dict[str, int]) -> bool:
    """Whether one result comes from several inner tensors of one wrapper."""
    wrappers = [inside[name] for name in {p.name for b in part for p in b.flat_proxy_args} if name in inside]
    return len(set(wrappers)) != len(wrappers)


def _base(bsym: BoundSymbol) -> str:
    return _SAME.get(name := bsym.sym.id.op.rstrip("_"), name)


_SAME = {"t": "permute", "T": "permute", "view": "reshape", "matmul": "m", "mm": "m", "linear": "m", "bmm": "m", "square": "pow"}


def _cone(name: str, bsyms: Iterable[BoundSymbol]) -> list[BoundSymbol]:
    """The operations that a result comes from."""
    wanted, found = {name}, []
    for bsym in reversed(list(bsyms)):
        if any(p.name in wanted for p in bsym.flat_proxy_outs):
            found.append(bsym)
            wanted |= {p.name for p in bsym.flat_proxy_args}
    return found[::-1]


def _refused(name: str, what: str, why: str, at: str | None) -> TransformError:
    return InnerDerivativeTransformError(
        with_details(
            f"torch.func.{name} of a function with {what} in it",
            at=at,
            why=why,
            instead=f"thunder_norm.transforms.{name}, which differentiates the inner tensors, or take them out of the wrapper",
        )
    )
