"""Running an operation on normed tensors: its rule on the norms, the operation itself on the backings."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core import by_data, conversions, in_place
from thunder_norm.core.bodies import is_composite, python_body
from thunder_norm.core.composed import Call, compose, is_composed, moves
from thunder_norm.core.context import (
    Environment,
    current_environment,
    lift,
    perturbations_recorded,
    run_operation,
    run_real,
)
from thunder_norm.core.eager_calls import note_operation
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import no_larger, range_by_rule
from thunder_norm.core.local import at_data, away, from_data, is_from_data, is_within
from thunder_norm.core.nonfinite import BEYOND_FLOATS, Followed, of_floats
from thunder_norm.core.perturbations import Rest, refuse_jumps, with_details_of_jumps
from thunder_norm.core.programs import program_of
from thunder_norm.core.refused_calls import check_finalized, check_not_batched, missing_rule, reading_values
from thunder_norm.core.registry import NormedOp, NormRule, find_op, key_of
from thunder_norm.core.results import attach, follow_inside, handing_on, normed_in, track_aliases
from thunder_norm.core.running import Runner, run_by
from thunder_norm.core.tensors import NormedTensor, describe_call, has_norm
from thunder_norm.core.whole import is_followed, moves_as_one, whole
from thunder_norm.core.within import keep_near, stay_away
from thunder_norm.errors import (
    InnerDerivativeError,
    InnerDerivativeNormError,
    JumpError,
    MissingNormRuleError,
    NormMapKeyError,
    NormMismatchError,
    ThunderNormError,
    with_details,
)
from thunder_norm.op_names import METADATA, METADATA_ACCESSES, op_key, op_name
from thunder_norm.trees import flat_tensors, map_tensors, of_plain_classes


def torch_function(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A torch function called with a NormedTensor: its rule, or else its decomposition into aten ops."""
    if func in METADATA_ACCESSES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _DERIVATIVES:
        raise InnerDerivativeError(
            with_details(
                f"{func.__module__}.{func.__name__} of a NormedTensor",
                at=current_environment().user_location(),
                why="a derivative that the program takes is another function, with norms of its own, and no rule says them",
                instead="leave the penalty out of the normed call; the norm itself is differentiated by y.norm_size.backward()",
            )
        )
    if func in _READING:
        raise reading_values(func)
    if func is torch.Tensor.where:
        func, args, kwargs = torch.where, _condition_first(*args, **kwargs), {}
    func = _DEFINED.get(func, func)
    key = key_of(func)
    if key in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    call = in_place.out_of_place(func, args, kwargs)
    if call is not None:
        return in_place.run(func, *call, _run_known)
    program = program_of(key, args, kwargs)
    if program is not None:
        return _run_program(program, args, kwargs)
    op = find_op(key)
    if op is not None and op.rules:
        return run_rule(op, func, args, kwargs)
    body = None if isinstance(func, NormedOp) else python_body(func)
    if body is not None:
        with current_environment().inside_function():
            return body(*args, **kwargs)
    if isinstance(func, NormedOp) or not isinstance(key, str):
        raise missing_rule(func, args, kwargs)
    try:
        with current_environment().inside_operation(), torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except MissingNormRuleError as e:
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise
        raise missing_rule(func, args, kwargs, decomposition=str(e).partition("\n")[0]) from e


# What was in memory has no norm: a program that leaves it to chance gets zeros, which it fills as it would anything else.
_DEFINED: dict[Callable, Callable] = {
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


def _condition_first(input: Any, condition: Any, other: Any) -> tuple[Any, Any, Any]:
    """The arguments of ``input.where(condition, other)`` as the function takes them."""
    return condition, input, other


_DERIVATIVES = frozenset({torch._make_dual, torch.autograd.grad, torch.autograd.backward})
_READING = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__})


def run_registered(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run the norm rule of `func` although no argument is normed yet: plain tensors are lifted.

    Raises:
        MissingNormRuleError: no rule fits.
    """
    key = key_of(func)
    program = program_of(key, args, kwargs)
    if program is not None:
        return _run_program(program, args, kwargs)
    op = find_op(key)
    if op is None or not op.rules:
        if python_body(func) is not None or is_composite(func):  # what it calls, or is taken apart into, may have rules
            args, kwargs = map_tensors(
                lambda t: lift(t, RMSTensor) if has_norm(t) and not isinstance(t, NormedTensor) else t, (args, kwargs)
            )
            return torch_function(func, args, kwargs)
        try:
            raise missing_rule(func, args, kwargs)
        except MissingNormRuleError:
            return _by_data(func, args, kwargs)
    return run_rule(op, func, args, kwargs)


def runs_model() -> bool:
    """Whether a model is being run for its norms."""
    return type(current_environment()) is not Environment


def is_factory(func: Callable) -> bool:
    """Whether an operation, called without one, makes a tensor whose norm no other's decides: it has a rule that takes no NormedTensor."""
    op = find_op(key_of(func))
    return op is not None and op.is_factory


def torch_dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
    """An aten overload called with a NormedTensor, below autograd: its rule, run with autograd for norm sizes."""
    func = _DEFINED.get(func, func)
    key = op_key(func)
    if func._schema.is_mutable:
        with _autograd_again():
            return in_place.run(func, in_place.functional(func), args, kwargs, run_rule)
    op = find_op(key)
    with _autograd_again():
        if op is not None and op.rules:
            return run_rule(op, func, args, kwargs)
        try:
            raise missing_rule(func, args, kwargs)
        except MissingNormRuleError:
            return _by_data(func, args, kwargs)


@contextlib.contextmanager
def _autograd_again() -> Iterator[None]:
    """Let operations on norm sizes be recorded by autograd inside ``__torch_dispatch__``, which runs below it."""
    key = torch._C.DispatchKey.AutogradFunctionality
    was_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)


def _run_known(op: NormedOp, func: Callable, args: tuple, kwargs: dict) -> Any:
    """By the program that the operation is written as, if this call is, or else by its rule."""
    program = program_of(key_of(func), args, kwargs)
    return run_rule(op, func, args, kwargs) if program is None else _run_program(program, args, kwargs)


def _run_program(program: Callable, args: tuple, kwargs: dict) -> Any:
    with current_environment().inside_function():
        return program(*args, **kwargs)


def run_rule(op: NormedOp, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Find the rule, run the operation on the backings and the rule on the norms, and put them together."""
    in_place.refuse_out(func, kwargs)
    check_not_batched(func)
    check_finalized(func, args, kwargs)
    try:
        found = op.find(*at_data((args, kwargs)))
        if found is None:
            args, kwargs = map_tensors(_read, of_plain_classes((args, kwargs)))
            found = op.find(*at_data((args, kwargs)))
        if found is None:
            raise missing_rule(func, args, kwargs)
        return apply_rule(op, *found, func, args, kwargs)
    except (NormMapKeyError, JumpError):
        raise
    except (MissingNormRuleError, NormMismatchError):
        return _by_data(func, args, kwargs)


def _read(t: torch.Tensor) -> Any:
    """The number in a plain tensor of one integer, which torch takes for a size or a dimension, where there is data, or a trace asks for it."""
    is_integer = t.ndim == 0 and not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
    return int(t) if type(t) in (torch.Tensor, FakeTensor) and is_integer and not t.is_meta else t


def _by_data(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result by the data at hand, where that is asked for, or the error that is being handled."""
    body = func.body if isinstance(func, NormedOp) else func
    call = (lambda a, k: body(*a, **k)) if isinstance(func, NormedOp) else functools.partial(run_operation, body)
    out = by_data.found(func, args, kwargs, body, call)
    if out is None:
        out = _without_norm(func, args, kwargs, call)
    if out is None:
        raise
    for y in flat_tensors(out):
        if isinstance(y, NormedTensor):
            track_aliases(y, y.backing, args, kwargs)
    return out


def _without_norm(func: Callable, args: tuple, kwargs: dict, call: Callable[[tuple, dict], Any]) -> Any | None:
    """What an operator that nobody gave a rule returns if that is integers and bools alone, as of `argmax`; None if it is not."""
    has_rules = (op := find_op(op_key(func))) is not None and op.rules
    if has_rules or not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if not all(str(r.type) in ("Tensor", "Tensor[]") for r in func._schema.returns):
        return None
    try:
        out = call(unwrap(args), unwrap(kwargs))
    except ThunderNormError:
        raise
    except Exception:  # noqa: BLE001 - what torch refuses, whose result would have a norm, perhaps: that there is no rule comes first
        return None
    return None if any(map(has_norm, flat_tensors(out))) else out


def apply_rule(
    op: NormedOp, rule: NormRule, bound: inspect.BoundArguments, func: Callable, args: tuple, kwargs: dict, made: Any = None
) -> Any:
    """Run this rule of `op` on the norms of arguments that fit it, and the operation on the backings.

    Where that has run, `made` is what it made of them: its rule runs once more, and nobody is told.
    """
    is_told = made is None
    normed_given = normed_in((args, kwargs))
    if not rule.takes_jumps:
        refuse_jumps(normed_given)
    if is_told and type(current_environment()) is Environment:  # neither traced nor analysed
        note_operation()
    try:
        given = dict(bound.arguments)
        with perturbations_recorded():
            prepared = rule.prepare(bound)
            if is_told:
                current_environment().note_call(op, rule, (args, kwargs), given, prepared.arguments)
            sizes = list(_sizes(prepared))
            with Followed(n for _, n in sizes) as followed:
                result = rule.run(prepared)
    except NormMapKeyError:  # a parameter's name is not the operation's affair
        raise
    except (NormMismatchError, ArithmeticError) as e:
        why = e if isinstance(e, NormMismatchError) else BEYOND_FLOATS
        error = type(e) if isinstance(e, JumpError | InnerDerivativeNormError) else NormMismatchError
        raise error(_why_refused(why, func, args, kwargs)) from e
    body = func.body if isinstance(func, NormedOp) else func
    run = current_environment().run_body if isinstance(func, NormedOp) else run_operation
    real = run(body, unwrap(args), unwrap(kwargs)) if made is None else made
    found = range_by_rule(op, args, kwargs)
    with perturbations_recorded():
        result = no_larger(op, handing_on(result, prepared, sizes, followed), found, getattr(real, "dtype", None))
        stated = normed_in(result)
        out = attach(op, rule, prepared, result, real, args, kwargs)
        if op.fact_rule is not None and isinstance(out, NormedTensor):
            out._facts = of_floats(op.fact_rule, prepared.args, prepared.kwargs, out)
        with_details_of_jumps(normed_in(out), lambda why: _why_refused(why, func, args, kwargs))
        of_parameters = all(x._is_of_parameters for x in normed_given)
        for x in normed_in(out):
            x._is_of_parameters = of_parameters and x.perturbation_size is not None
        if is_composed():
            compose(op.movement_rule, Call(args, kwargs, given, normed_in(out), body), Rest(op, rule, prepared, stated))
    if op.condition_rule is not None:
        op.condition_rule(args, kwargs, out)
    if op.range_rule is not None:
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, NormedTensor):
                x._range = None if found is None else found.rounded(x.dtype)
    if is_told and is_within():
        _follow_whole(op, func, args, kwargs, real, normed_in(out))
    if is_within() and not is_from_data():
        _follow_away(op, func, args, kwargs, real, normed_in(out))
    with perturbations_recorded():
        if is_told:
            follow_inside(op, func, args, kwargs, real, stated, normed_in(out))
        for x in normed_in(out):
            if is_within():
                keep_near(x)
            if is_told:
                current_environment().note(op.body, x)
    if op.sums_rule is not None and isinstance(out, NormedTensor):
        args, kwargs = at_data((args, kwargs))
        out._sums = of_floats(op.sums_rule, args, kwargs, out)
    return out


def _why_refused(why: Any, func: Callable, args: tuple, kwargs: dict) -> str:
    """What a call is refused with."""
    return with_details(
        f"{op_name(func)}: {why}", called_with=describe_call(args, kwargs), at=current_environment().user_location()
    )


def _follow_away(op: NormedOp, func: Callable, args: tuple, kwargs: dict, made: Any, results: Sequence[NormedTensor]) -> None:
    """Let results be known as they move away from the data alone, as well: by the rule for arguments that do."""
    if not any(moves(y) and not y.backing.is_meta and y.perturbation_size.item() for y in results):
        return  # at the data itself
    args, kwargs = map_tensors(lambda x: away(x) if isinstance(x, NormedTensor) else x, (args, kwargs))
    with from_data():
        try:
            rule = op.find(args, kwargs)
            found = [] if rule is None else normed_in(apply_rule(op, *rule, func, args, kwargs, made))
        except NormMismatchError:  # no rule for these: they move no further than by those for any two points
            return
    if len(found) != len(results):
        return
    for y, other in zip(results, found, strict=True):
        if not moves(y) or not moves(other) or conversions.factor(other, type(y), y.elem_dims) is None:
            continue
        stay_away(y, conversions.convert(other, type(y), y.elem_dims))


def _follow_whole(op: NormedOp, func: Callable, args: tuple, kwargs: dict, made: Any, results: Sequence[NormedTensor]) -> None:
    """Let results be known as one row, as well, where arguments of several are: by the rule for these."""
    given = [x for x in flat_tensors((args, kwargs)) if isinstance(x, NormedTensor)]
    if not all(map(is_followed, results)) or all(whole(x) is x for x in given):
        return
    args, kwargs = map_tensors(lambda x: whole(x) if isinstance(x, NormedTensor) else x, (args, kwargs))
    try:
        rule = op.find(args, kwargs)
        found = [] if rule is None else normed_in(apply_rule(op, *rule, func, args, kwargs, made))
    except NormMismatchError:  # no rule for these: they move as their rows do
        return
    if len(found) == len(results):
        for y, other in zip(results, found, strict=True):
            moves_as_one(y, other)


def _sizes(bound: inspect.BoundArguments) -> Iterator[tuple[str, torch.Tensor]]:
    """The norm sizes among a rule's arguments, by name."""
    for name, value in bound.arguments.items():
        for v in flat_tensors(value):
            if isinstance(v, NormedTensor):
                yield name, v.norm_size


def unwrap(tree: Any) -> Any:
    """The same structure with every NormedTensor replaced by its backing."""
    return map_tensors(lambda v: v.backing if isinstance(v, NormedTensor) else v, tree)


run_by(Runner(torch_function, torch_dispatch, run_real, runs_model))
