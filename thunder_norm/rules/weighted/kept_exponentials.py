"""What stays an exponential, or a logistic function: e^x in another shape, a positive multiple of it, a power; sigmoid(x) in another shape.

    log_std.exp().expand_as(mean)
    torch.sigmoid(x).squeeze(-1)
    ((value - mean) ** 2) / (2 * std**2)
    std.log()

Nothing keeps an exponential away from 0 but that it is one.  Where its entries change their places the argument's do, c e^x is the
exponential of x + log c, and (e^x)^p that of p x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.core.context import current_mode, run_real
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.known_ranges import range_of
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact, moves_with, ruled, unconditional
from thunder_norm.rules._set_aside import of_any_strides
from thunder_norm.rules._shared import argument
from thunder_norm.rules.weighted import set_aside
from thunder_norm.rules.written_out._forms import ENTRY, Form, Reshaped, own_form
from thunder_norm.rules.written_out.written_out_activations import Gate
from thunder_norm.rules.written_out.written_out_exponentials import Exponential
from thunder_norm.scalars import times


def exponential_of(x: Any) -> Source | None:
    """The argument, if x is an exponential of something of RMS kind; at the data its values say more."""
    found = fact(x, Exponential)
    return None if found is None or is_local(x) or not issubclass(found.argument.kind, RMSTensor) else found.argument


def as_exponential(x: Source, out: NormedTensor, size: torch.Tensor, moved: torch.Tensor | None, dims: tuple[int, ...]) -> Any:
    """The facts about a result, and that it is an exponential, if they do not say so."""
    if fact(out, Exponential) is not None:
        return out._facts
    argument = Source(x.kind, run_real(torch.log, (out.backing,), {}), size, moved, dims)
    return Alternatives((*every_fact(out), Exponential(argument, (), argument, None)))


def _logistic(x: Any) -> tuple[Gate, Form] | None:
    """Of what x is the logistic function, or a multiple of it plus a number."""
    gate = None if is_local(x) else fact(x, Gate)
    if gate is None or gate.f is not torch.sigmoid:
        return None
    own = [f for f in gate.arguments if {p for p, c in f.terms.items() if c != 0} == {ENTRY} and issubclass(f.x.kind, RMSTensor)]
    return (gate, own[0]) if own else None


def _moved(op: Callable) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    """The argument's entries change their places as those of the exponential do."""
    # a method takes sizes one by one as well; the rule of expand, with an argument of its own, is that of broadcast_to
    method = torch.Tensor.expand if op is torch.broadcast_to else getattr(torch.Tensor, op.__name__)

    def argument_of(x: Source, args: tuple, kwargs: dict[str, Any]) -> tuple[NormedTensor, torch.Tensor | None] | None:
        """What the operation makes of x, and how far that moves."""
        return ruled(op, (x.moving(), *args[1:]), kwargs)

    def rule(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
        x = exponential_of(args[0]) if args else None
        if x is not None and (moved := argument_of(x, args, kwargs)) is not None:
            return as_exponential(x, out, moved[0].norm_size, moved[1], moved[0].elem_dims)
        found = _logistic(args[0]) if args and all(isinstance(f, Reshaped) for f in every_fact(out)) else None
        if found is None:
            return set_aside.moved(op, method, args, kwargs, out)
        if (moved := argument_of(found[1].x, args, kwargs)) is None:
            return out._facts
        gate, form = found
        backing = run_real(of_any_strides(method), (form.x.backing, *set_aside.other_arguments(op, args)), kwargs)
        x = form.x.kind._wrap(backing, moved[0].norm_size, moved[1], moved[0].elem_dims)
        assert isinstance(x, RMSTensor), "its kind has been looked at"
        own = own_form(x)
        gate = replace(gate, arguments=(replace(own, terms={ENTRY: form.of_entry(1)}),))
        return gate if out._facts is None else Alternatives((gate, *every_fact(out)))

    return rule


for _op in (
    torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.unsqueeze, torch.squeeze, torch.Tensor.view, torch.reshape,
    torch.flatten, torch.transpose, torch.permute, torch.t, torch.movedim, torch.Tensor.repeat, torch.Tensor.__getitem__, torch.clone,
    torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double,
):  # fmt: skip
    normed_op(_op).register_fact(_moved(_op))


def _power(x: Source, out: NormedTensor, p: float) -> Any:
    moved = None if x.perturbation_size is None else times(x.perturbation_size, abs(p))
    return as_exponential(x, out, times(x.norm_size, abs(p)), moved, x.elem_dims)


def _number(c: Any) -> float | None:
    """The number that an operand is, or all its entries are (``ones_like(x)``)."""
    found = range_of(c)
    return found.low if found is not None and found.low == found.high else None


def _multiple(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    x, c = (exponential_of(a), _number(b)) if _number(a) is None else (exponential_of(b), _number(a))
    if x is None or c is None or not 0 < c < math.inf:
        return out._facts
    return as_exponential(x, out, x.norm_size + abs(math.log(c)), x.perturbation_size, x.elem_dims)


def _quotient(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    a, b = argument(args, kwargs, 0, "input", "self"), _number(argument(args, kwargs, 1, "other"))
    if kwargs.get("rounding_mode") is not None or b is None or not 0 < b < math.inf:
        return out._facts
    return _multiple((a, 1 / b), {}, out)


def _of_power(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x, p = exponential_of(argument(args, kwargs, 0, "input", "self")), argument(args, kwargs, 1, "exponent")
    return _power(x, out, p) if x is not None and isinstance(p, int | float) else out._facts


def _fixed_power(p: float) -> Callable[[tuple, dict[str, Any], NormedTensor], Any]:
    return lambda args, kwargs, out: _of_power((argument(args, kwargs, 0, "input", "self"), p), {}, out)


normed_op(torch.mul).register_fact(_multiple)
normed_op(torch.div).register_fact(_quotient)
normed_op(torch.pow).register_fact(_of_power)
for _op, _p in ((torch.square, 2.0), (torch.sqrt, 0.5), (torch.rsqrt, -0.5), (torch.reciprocal, -1.0)):
    normed_op(_op).register_fact(_fixed_power(_p))


# -- limits ---------------------------------------------------------------------------------------------------------------


def _is_limited(args: dict[str, Any]) -> bool:
    """Whether no more of an exponential is left than a number that is positive."""
    low, high = args.get("min"), args["max"]
    if current_mode() == "modula" or not isinstance(high, int | float) or not 0 < high < math.inf:
        return False
    x = exponential_of(args["input"]) if low is None or isinstance(low, int | float) and low <= high else None
    return x is not None and isinstance(args["input"], RMSTensor) and x.elem_dims == args["input"].elem_dims


def _limited(input: RMSTensor, low: float | None, high: float) -> NormedTensor:
    x, result = exponential_of(input), unconditional(torch.clamp, input, low, high)
    assert x is not None, "the rule's condition has been checked"
    slope = (unconditional(torch.exp, x.tensor())._sensitivity or {})["input"]
    return moves_with(x, result, torch.as_tensor(slope).clamp(max=high), "input")


@normed_op(torch.clamp).register_norm(when=_is_limited)
def clamp_of_exponential(input: RMSTensor, min: float | None = None, max: float | None = None) -> NormedTensor:
    """e^x limited to [lo, hi]: the value of `clamp`; sensitivity hi to x, or that of e^x: where it is larger it does not move."""
    assert max is not None, "the rule's condition has been checked"
    return _limited(input, min, max)


@normed_op(torch.clamp_max).register_norm(when=_is_limited)
def clamp_max_of_exponential(input: RMSTensor, max: float) -> NormedTensor:
    """The smaller of e^x and hi: as `clamp_of_exponential`."""
    return _limited(input, None, max)


# -- powers that have no bound next to 0 ----------------------------------------------------------------------------------


def _raised(input: NormedTensor, p: float) -> NormedTensor:
    x = exponential_of(input)
    assert x is not None, "the rule's condition has been checked"
    result = unconditional(torch.exp, x.tensor(p))
    return moves_with(x, result, times((result._sensitivity or {})["input"], abs(p)), "input")


def is_exponential(args: dict[str, Any]) -> bool:
    """Whether a bound for all inputs is asked for, of an exponential; typical sizes are away from 0 anyway."""
    return current_mode() == "bound" and exponential_of(args["input"]) is not None


def _is_root(args: dict[str, Any]) -> bool:
    """Whether an exponential is raised to a power below 1; others have rules of their own."""
    return is_exponential(args) and isinstance(args["exponent"], int | float) and args["exponent"] < 1


@normed_op(torch.sqrt).register_norm(when=is_exponential)
def sqrt_of_exponential(input: RMSTensor) -> NormedTensor:
    """sqrt(e^x) = e^(x / 2): value and sensitivity of that."""
    return _raised(input, 0.5)


@normed_op(torch.rsqrt).register_norm(when=is_exponential)
def rsqrt_of_exponential(input: RMSTensor) -> NormedTensor:
    """1 / sqrt(e^x) = e^(-x / 2): value and sensitivity of that."""
    return _raised(input, -0.5)


@normed_op(torch.pow).register_norm(when=_is_root)
def pow_of_exponential(input: RMSTensor, exponent: float) -> NormedTensor:
    """(e^x)^p = e^(p x), for p below 1: value and sensitivity of that."""
    return _raised(input, exponent)
