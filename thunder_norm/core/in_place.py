"""In-place operations on normed tensors: the out-of-place operation, whose result the target, and what shares its storage, take over."""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from thunder_norm.core import conversions
from thunder_norm.core.context import current_environment
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.registry import NormedOp, find_op, key_of
from thunder_norm.core.tensors import NormedTensor, describe, describe_call, unwatched
from thunder_norm.core.views import Layout, Part, is_reshaped, part_of, ways_through
from thunder_norm.errors import NormMismatchError, UnsupportedOpError, with_details
from thunder_norm.op_names import is_in_place, op_key, op_name
from thunder_norm.trees import map_tensors

RunRule = Callable[[NormedOp, Callable, tuple, dict], Any]


@functools.cache
def _place_of_flag(func: Callable) -> int | None:
    """The position of a function's argument `inplace`, which is its last; None if it has none."""
    if not isinstance(func, types.FunctionType):
        return None
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    return names.index("inplace") if "inplace" in names else None


def out_of_place(func: Callable, args: tuple, kwargs: dict) -> tuple[Callable | None, tuple, dict] | None:
    """What a call that works in place computes: operation (None if there is none) and arguments; None for all other calls."""
    place = _place_of_flag(func)
    if place is not None:
        if (args[place] if place < len(args) else kwargs.get("inplace")) is not True:
            return None
        return func, args[:place], {k: v for k, v in kwargs.items() if k != "inplace"}
    key = op_key(func)
    return (functional(func), args, kwargs) if isinstance(key, str) and is_in_place(key) else None


_functional: dict[Callable, NormedOp] = {}


def functional_of(func: Callable) -> Callable[[NormedOp], NormedOp]:
    """Register the out-of-place operation of an in-place one for which torch has none; it takes the same arguments."""

    def register(op: NormedOp) -> NormedOp:
        _functional[func] = op
        return op

    return register


def functional(func: Callable) -> Callable | None:
    """The out-of-place operation of ``x.mul_``, ``torch.relu_`` or ``aten.add_.Tensor``, if there is one."""
    if func in _functional:
        return _functional[func]
    if isinstance(func, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"), None)
        return getattr(packet, func._overloadname, packet)
    name = op_key(func).rstrip("_")
    homes = (torch.Tensor, torch, torch.nn.functional, torch.ops.aten)
    if getattr(torch.Tensor, func.__name__, None) is not func:  # torch.dropout_: a function, with a function's arguments
        homes = (torch, torch.nn.functional, torch.Tensor, torch.ops.aten)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def refused(func: Callable, args: tuple, kwargs: dict) -> UnsupportedOpError:
    """The error for an in-place call that has no rule, or a target that none may write into."""
    return UnsupportedOpError(
        with_details(
            f"in-place {op_name(func)} with a NormedTensor",
            called_with=describe_call(args, kwargs),
            at=current_environment().user_location(),
            instead="use the out-of-place operation and assign its result",
        )
    )


def run(func: Callable, operation: Callable | None, args: tuple, kwargs: dict, run_rule: RunRule) -> Any:
    """Run an in-place call by the rule of its out-of-place `operation`.

    Raises:
        UnsupportedOpError: there is no such rule, the target is no normed tensor nor a buffer of a model that is run, was given from outside, shares a part of its
            storage only with another tensor, or would have to become one of another shape or dtype.
    """
    target = args[0] if args else None
    if op_key(func) == "requires_grad_" and isinstance(target, NormedTensor):  # set as an attribute
        return target.requires_grad_(*args[1:])
    if _changes_plainly(func, target):
        plain_args, plain_kwargs = map_tensors(lambda t: t.backing if isinstance(t, NormedTensor) else t, (args, kwargs))
        return func(*plain_args, **plain_kwargs)
    op = None if operation is None else find_op(key_of(operation))
    if not isinstance(target, NormedTensor) or operation is None or op is None or not op.rules:
        raise refused(func, args, kwargs)
    aliases = target.aliases()
    before = target._aliases
    result = run_rule(op, operation, args, kwargs)
    if op_key(func) in _VIEWS and isinstance(result, NormedTensor):
        return _turned(target, result)
    if not isinstance(result, NormedTensor) or (result.shape, result.dtype) != (target.shape, target.dtype):
        raise UnsupportedOpError(f"in-place {op_name(func)} would turn {describe(target)} into {describe(result)}")
    for x in (target, *aliases):  # the result may be the target itself, of which it is then no alias
        x._aliases = before
    if result.backing is target.backing:
        return target
    new = None
    with contextlib.suppress(UnsupportedOpError):
        new = _changed(target, aliases, result, run_rule, func, args)
    if new is None:
        if aliases and not target._is_leaf_value:  # a view that nobody holds any more may wait for the garbage collector
            del x, aliases
            gc.collect()
            aliases = target.aliases()
        new = _changed(target, aliases, result, run_rule, func, args)
    for x in (target, *aliases):
        x._assign(new[id(x)])
        x._aliases = before
    return target


_VIEWS = frozenset(
    "squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)  # they change no entry, nor what others see of them


def _turned(target: NormedTensor, view: NormedTensor) -> NormedTensor:
    """The target as another view of its own storage; what shares it stays as it is."""
    if view.backing is target.backing:
        return target
    if target._is_leaf_value:
        raise _refused(target, "was given from outside")
    return target._assign(view)


def _changed(
    target: NormedTensor, aliases: list[NormedTensor], result: NormedTensor, run_rule: RunRule, func: Callable, args: tuple
) -> dict[int, NormedTensor]:
    """What the target and those that share its storage are with `result` of an in-place call in the target's place, by identity.

    Where some are parts of others, one has them all; what is written there, and what each becomes of that, goes on sharing a storage.
    """
    _check(target, aliases)
    is_written = func in _functional
    tensors = [target, *aliases]
    layouts = [Layout.of(x.backing) for x in tensors]
    if all(is_reshaped(layout, layouts[0]) for layout in layouts):
        return {id(x): _in_place_of(x, result, run_rule, is_written) for x in tensors}
    ways = ways_through(layouts)
    if ways is None:
        raise _refused(target, "shares its storage with another tensor, of other elements or in another order")
    up, below = ways
    changed = written = _in_place_of(target, result, run_rule, is_written)
    claims = {}
    for place, part in up:
        claims[id(tensors[place])] = written = _with_part(tensors[place], part, written)
    is_apart = _apart_from(_place_written(func, args), layouts)
    new = {}
    for x, layout, down in zip(tensors, layouts, below, strict=True):
        if is_apart(layout):  # nothing but its storage is another one
            now, claim = written.backing, x
            for part in down:
                now = part.taken_from(now, _operation)
        else:
            taken = written
            for part in down:
                taken = part.taken_from(taken)
            now = taken.backing
            part = part_of(layout, layouts[0])
            if is_reshaped(layout, layouts[0]):
                claim = _in_place_of(x, result, run_rule, is_written)
            else:
                claim = claims.get(id(x), taken if part is None else part.taken_from(changed))
        out = type(claim)._wrap(now, claim.norm_size, claim.perturbation_size, claim.elem_dims)
        out._facts, out._range, out._spread, out._sums = claim._facts, claim._range, claim._spread, claim._sums
        out._inside, out._is_of_parameters, out._jump = claim._inside, claim._is_of_parameters, claim._jump
        new[id(x)] = out
    return new


def _operation(func: Callable, *args: Any) -> Any:
    return current_environment().run_operation(func, args, {})


def _place_written(func: Callable, args: tuple) -> Layout:
    """Where an in-place operation changes entries: everywhere, but for ``x[items] = v`` with slices."""
    whole = Layout.of(args[0].backing)
    if func is not torch.Tensor.__setitem__:
        return whole
    items = args[1]
    if not all(map(_is_plain_item, items if isinstance(items, tuple) else (items,))):
        return whole
    with unwatched():
        stand_in = torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device="meta")
        written = Layout.of(stand_in[items])
    return written._replace(offset=written.offset + whole.offset)


def _is_plain_item(item: Any) -> bool:
    numbers = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
    return item is ... or all(i is None or type(i) is int for i in numbers)


def _apart_from(target: Layout, layouts: list[Layout]) -> Callable[[Layout], bool]:
    """Whether a tensor is known to have no entry in common with another one: as parts of a third."""
    wholes = [(whole, part) for whole in dict.fromkeys(layouts) if (part := part_of(target, whole)) is not None]

    def is_apart(x: Layout) -> bool:
        return any((other := part_of(x, whole)) is not None and not part.meets(other, whole) for whole, part in wholes)

    return is_apart


def _with_part(whole: NormedTensor, part: Part, value: NormedTensor) -> NormedTensor:
    """The whole with a value at a part of it, by the rule of ``x[items] = v``."""
    with_entries = _functional[torch.Tensor.__setitem__]
    return part.put_into(whole, value, with_entries)


def _changes_plainly(func: Callable, target: Any) -> bool:
    """Whether a plain tensor is changed by normed ones and stays plain: a buffer's running mean, which outlives the call."""
    is_plain = isinstance(target, torch.Tensor) and not isinstance(target, NormedTensor)
    return is_plain and current_environment().lets_change(target, func)


def _check(target: NormedTensor, aliases: list[NormedTensor]) -> None:
    """Refuse to change what others look at, who would not know."""
    if target._is_leaf_value:
        raise _refused(target, "was given from outside")
    if any(x._is_leaf_value for x in aliases):
        raise _refused(target, "shares its storage with one that was given from outside")
    storage = target.backing.untyped_storage()._cdata
    if any(x.backing.untyped_storage()._cdata != storage for x in aliases):
        raise _refused(target, "shares its entries with another tensor, which earlier in-place operations moved elsewhere")


def _refused(target: NormedTensor, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"in-place operation on a {type(target).__name__} that {why}",
            at=current_environment().user_location(),
            why="the norm of the other owner would silently become wrong",
            instead="write y = x + ... in place of x += ..., or work on x.clone()",
        )
    )


def _in_place_of(x: NormedTensor, result: NormedTensor, run_rule: RunRule, is_written: bool) -> NormedTensor:
    """`result` in the shape and the kind of x, which it is to replace; what is written into a constant may say its kind."""
    try:
        if x.shape != result.shape:
            op = find_op("reshape")
            assert op is not None, "it has a rule"
            result = run_rule(op, torch.reshape, (result, tuple(x.shape)), {})
        if type(result) is type(x) or is_written and type(x) is LinfTensor and type(result) is RMSTensor:
            return result
        converted = conversions.convert(result, type(x), x.elem_dims)
    except NormMismatchError as e:
        raise UnsupportedOpError(f"in-place operation would turn {describe(x)} into {describe(result)}: {e}") from e
    converted._sums = result._sums  # of the same numbers
    return converted


def refuse_out(func: Callable, kwargs: Mapping[str, Any]) -> None:
    """Refuse to write a result into a tensor that is given for it, whose norm is another one afterwards.

    Raises:
        UnsupportedOpError: `out` is given.
    """
    if kwargs.get("out") is not None:
        raise UnsupportedOpError(
            with_details(
                f"{op_name(func)}: out= is not possible with a NormedTensor, nor with parameters where they have norms",
                at=current_environment().user_location(),
                instead="assign the result",
            )
        )
