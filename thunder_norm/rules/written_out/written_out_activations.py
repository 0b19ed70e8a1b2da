"""Activations written out: GELU in its tanh and erf forms, and x sigmoid(a x), as in GPT-2 and CLIP.

    0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    x * torch.sigmoid(1.702 * x)

Op by op the product is one of two unrelated tensors, which may have their largest entries in the same place: sqrt(N) too much,
and the cubic has an unbounded slope.  Here each step remembers the polynomial of x it is (`_forms`), or the gate, and the product of
x with its own gate is the activation it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import fact, is_rms, moves_with, unconditional, with_fact
from thunder_norm.rules._shared import Number
from thunder_norm.rules.written_out._derived import facts_of
from thunder_norm.rules.written_out._forms import ENTRY, Form, multiple
from thunder_norm.scalars import times

_GELU_TANH = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True, eq=False)
class Gate:
    """A fact: ``scale * f(argument) + shift``, the argument a polynomial of entries, of one or another tensor's."""

    f: Callable
    arguments: tuple[Form, ...]
    scale: float = 1.0
    shift: float = 0.0


def _gate(x: Any) -> Gate:
    found = fact(x, Gate)
    assert found is not None, "the rule's condition has been checked"
    return found


def _is_gate(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: fact(args[name], Gate) is not None


# -- gates ----------------------------------------------------------------------------------------------------------------


def polynomials(x: NormedTensor) -> tuple[Form, ...]:
    """x as polynomials of entries, x itself the last."""
    return tuple(f for f in facts_of(x) if isinstance(f, Form) and f.is_of_entries and not f.is_of_groups)


def _register_gate(f: Callable, when: Callable[[dict[str, Any]], bool]) -> None:
    def gate(input: RMSTensor) -> NormedTensor:
        """As every such function, and of what."""
        return with_fact(unconditional(f, input), Gate(f, polynomials(input)))

    gate.__name__ = gate.__qualname__ = f"{f.__name__}_gate"
    normed_op(f).register_norm(gate, when=when)


_register_gate(torch.tanh, lambda args: len(polynomials(args["input"])) > 1)
_register_gate(torch.erf, lambda args: len(polynomials(args["input"])) > 1)
_register_gate(torch.sigmoid, lambda args: True)


def _affine(result: NormedTensor, x: RMSTensor, scale: float, shift: float) -> NormedTensor:
    gate = _gate(x)
    return with_fact(result, replace(gate, scale=gate.scale * scale, shift=gate.shift * scale + shift))


@normed_op(torch.mul).register_norm(when=_is_gate("input"))
def mul_number(input: RMSTensor, other: Number) -> NormedTensor:
    """A multiple of a gate: as every multiple, and that it is one."""
    return _affine(unconditional(torch.mul, input, other), input, float(other), 0.0)


@normed_op(torch.mul).register_norm(when=_is_gate("other"))
def number_mul(input: Number, other: RMSTensor) -> NormedTensor:
    """A multiple of a gate: as every multiple, and that it is one."""
    return _affine(unconditional(torch.mul, input, other), other, float(input), 0.0)


@normed_op(torch.div).register_norm(when=lambda args: fact(args["input"], Gate) is not None and args["other"] != 0)
def div_number(input: RMSTensor, other: Number) -> NormedTensor:
    """A multiple of a gate: as every multiple, and that it is one."""
    return _affine(unconditional(torch.div, input, other), input, 1 / other, 0.0)


@normed_op(torch.add).register_norm(when=_is_gate("input"))
def add_number(input: RMSTensor, other: Number, alpha: Number = 1) -> NormedTensor:
    """A gate plus a number: as every sum, and what it is."""
    return _affine(unconditional(torch.add, input, other, alpha), input, 1.0, float(other * alpha))


@normed_op(torch.add).register_norm(when=_is_gate("other"))
def number_add(input: Number, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
    """A number plus a gate: as every sum, and what it is."""
    return _affine(unconditional(torch.add, input, other, alpha), other, float(alpha), float(input))


@normed_op(torch.rsub).register_norm(when=_is_gate("input"))
def rsub_number(input: RMSTensor, other: Number, alpha: Number = 1) -> NormedTensor:
    """A number minus a gate: as every difference, and what it is."""
    return _affine(unconditional(torch.rsub, input, other, alpha), input, -float(alpha), float(other))


# -- x times its gate -----------------------------------------------------------------------------------------------------


def _activation(gate: Gate, argument: Form) -> tuple[Callable[[Any], NormedTensor], float, float] | None:
    """(rule of h, a, c) with ``x (scale f + shift) = c h(a x)``; None if it is no activation known here."""
    coefficients = {i: v for (i, _, _), v in argument.terms.items() if v != 0}
    a = coefficients.pop(1, 0.0)
    if a <= 0 or gate.scale == 0:
        return None
    if gate.f is torch.sigmoid and not coefficients and gate.shift == 0:
        return (lambda x: unconditional(F.silu, x)), a, gate.scale / a
    if not math.isclose(gate.shift, gate.scale, rel_tol=1e-9):
        return None
    if gate.f is torch.erf and not coefficients:
        a *= math.sqrt(2)
        return (lambda x: unconditional(F.gelu, x)), a, 2 * gate.scale / a
    if gate.f is torch.tanh and coefficients.keys() == {3}:
        a /= _GELU_TANH
        if math.isclose(coefficients[3], _GELU_CUBIC * _GELU_TANH * a**3, rel_tol=1e-7):
            return (lambda x: unconditional(F.gelu, x, "tanh")), a, 2 * gate.scale / a
    return None


def _gated_by(x: Any, gate: Gate | None) -> tuple[Form, tuple[Callable[[Any], NormedTensor], float, float]] | None:
    """What x is a multiple of, and the activation that its product with the gate is; None if that is none."""
    if gate is None or not is_rms(x) or fact(x, Gate) is not None:
        return None
    for own in polynomials(x):
        for argument in gate.arguments:
            activation = _activation(gate, argument) if own.x.is_same(argument.x) and own.terms.keys() == {ENTRY} else None
            if activation is not None:
                return own, activation
    return None


def _is_gated(x: str, gate: str) -> Callable[[dict[str, Any]], bool]:
    """The condition that `gate` is a gate of the tensor that argument `x` is a multiple of."""
    return lambda args: _gated_by(args[x], fact(args[gate], Gate)) is not None


def logistic_gate(negative: tuple[Form, ...]) -> Gate:
    """The gate ``1 / (1 + e^negative)``, of polynomials of entries."""
    return Gate(torch.sigmoid, tuple(g for f in negative if (g := multiple(f, -1.0)) is not None))


def product_with_gate(x: Any, gate: Gate) -> NormedTensor | None:
    """x times its own gate, as a rule's result for `input` and `other`; None if it is not its own."""
    return None if _gated_by(x, gate) is None else _times_gate(x, gate)


def _gated(x: RMSTensor, gate: NormedTensor) -> NormedTensor:
    """x times its own gate.

    Value:        that of the activation: gelu, gelu with tanh, silu
    Sensitivity:  its own, to x; the gate moves with x only
    """
    return _times_gate(x, _gate(gate))


def _times_gate(x: RMSTensor, gate: Gate) -> NormedTensor:
    found = _gated_by(x, gate)
    assert found is not None, "the rule's condition has been checked"
    own, (rule, a, c) = found
    c = abs(c * own.of_entry(1))
    result = rule(own.x.tensor(a))
    lipschitz = times((result._sensitivity or {})["input"], a * c)
    scaled = type(result)._wrap(None, times(result.norm_size, c), None, result.elem_dims)  # type: ignore[arg-type]
    return moves_with(own.x, scaled, lipschitz, "input", "other")


def _mul_gate(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    return _gated(input, other)


def _gate_mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    return _gated(other, input)


for _rule, _names in ((_mul_gate, ("input", "other")), (_gate_mul, ("other", "input"))):
    _rule.__doc__ = _gated.__doc__
    normed_op(torch.mul).register_norm(_rule, when=_is_gated(*_names))
