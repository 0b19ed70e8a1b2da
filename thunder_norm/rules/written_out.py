"""Activations written out: GELU in its tanh and erf forms, and x sigmoid(a x), as in GPT-2 and CLIP.

    0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    x * torch.sigmoid(1.702 * x)

Op by op the product is one of two unrelated tensors, which may have their largest entries in the same place: sqrt(N) too much,
and the cubic has an unbounded slope.  Here each step remembers the polynomial of x it is, or the gate, and the product of x with
its own gate is the activation it is.
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
from thunder_norm.rules._facts import Source, fact, is_rms, moves_with, unconditional, with_fact
from thunder_norm.rules._shared import Number, times
from thunder_norm.rules.mean_square import MeanSquare

Coefficients = dict[int, float]
_DEGREE = 3
_GELU_TANH = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A fact: ``sum_k coefficients[k] x^k``."""

    x: Source
    coefficients: Coefficients

    def plus(self, other: Coefficients, scale: float = 1.0) -> Polynomial:
        """The sum with `scale` times another polynomial of the same x."""
        powers = {*self.coefficients, *other}
        return Polynomial(self.x, {k: self.coefficients.get(k, 0.0) + scale * other.get(k, 0.0) for k in powers})

    def times(self, other: Coefficients) -> Polynomial:
        """The product with another polynomial of the same x."""
        result: Coefficients = {}
        for i, a in self.coefficients.items():
            for j, b in other.items():
                result[i + j] = result.get(i + j, 0.0) + a * b
        return Polynomial(self.x, result)


@dataclass(frozen=True, eq=False)
class Gate:
    """A fact: ``scale * f(argument) + shift``."""

    f: Callable
    argument: Polynomial
    scale: float = 1.0
    shift: float = 0.0


def _known(x: Any) -> Polynomial | None:
    """The polynomial x is known to be."""
    square = fact(x, MeanSquare)
    if square is not None and square.step == "square":
        return Polynomial(square.x, {2: 1.0})
    return fact(x, Polynomial)


def _polynomial(x: RMSTensor) -> Polynomial:
    """The polynomial x is known to be, or x itself."""
    return _known(x) or Polynomial(Source.of(x), {1: 1.0})


def _are_of_one(args: dict[str, Any]) -> bool:
    """Whether both factors or summands are polynomials of one x, and one of them is known as such."""
    a, b = args["input"], args["other"]
    if not is_rms(a, b) or not (_known(a) or _known(b)):
        return False
    return _polynomial(a).x.is_same(_polynomial(b).x)


# -- polynomials ----------------------------------------------------------------------------------------------------------


def _scale(result: NormedTensor, x: RMSTensor, c: float) -> NormedTensor:
    gate = fact(x, Gate)
    if gate is not None:
        return with_fact(result, replace(gate, scale=gate.scale * c, shift=gate.shift * c))
    return with_fact(result, _polynomial(x).times({0: c}))


@normed_op(torch.mul).register_norm(when=lambda args: True)
def mul_number(input: RMSTensor, other: Number) -> NormedTensor:
    """c x: as every multiple, and that it is one."""
    return _scale(unconditional(torch.mul, input, other), input, float(other))


@normed_op(torch.mul).register_norm(when=lambda args: True)
def number_mul(input: Number, other: RMSTensor) -> NormedTensor:
    """c x: as every multiple, and that it is one."""
    return _scale(unconditional(torch.mul, input, other), other, float(input))


@normed_op(torch.div).register_norm(when=lambda args: args["other"] != 0)
def div_number(input: RMSTensor, other: Number) -> NormedTensor:
    """x / c: as every multiple, and that it is one."""
    return _scale(unconditional(torch.div, input, other), input, 1 / other)


@normed_op(torch.pow).register_norm(when=lambda args: args["exponent"] == 3)
def pow_three(input: RMSTensor, exponent: Number) -> NormedTensor:
    """x^3: as every power, and that it is one."""
    return with_fact(unconditional(torch.pow, input, exponent), Polynomial(Source.of(input), {3: 1.0}))


@normed_op(torch.mul).register_norm(when=_are_of_one)
def mul_polynomials(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """p(x) q(x): as every product, and which polynomial it is."""
    product = _polynomial(input).times(_polynomial(other).coefficients)
    result = unconditional(torch.mul, input, other)
    return with_fact(result, product) if max(product.coefficients) <= _DEGREE else result


@normed_op(torch.add).register_norm(when=lambda args: _are_of_one(args))
def add_polynomials(input: RMSTensor, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
    """p(x) + a q(x): as every sum, and which polynomial it is."""
    total = _polynomial(input).plus(_polynomial(other).coefficients, float(alpha))
    return with_fact(unconditional(torch.add, input, other, alpha), total)


def _shift(result: NormedTensor, x: RMSTensor, c: float, scale: float) -> NormedTensor:
    """The fact about ``scale x + c``, for x a gate or a polynomial."""
    gate, polynomial = fact(x, Gate), _known(x)
    if gate is not None:
        return with_fact(result, replace(gate, scale=gate.scale * scale, shift=gate.shift * scale + c))
    return result if polynomial is None else with_fact(result, polynomial.times({0: scale}).plus({0: c}))


def _is_known(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda args: fact(args[name], Gate) is not None or _known(args[name]) is not None


@normed_op(torch.add).register_norm(when=_is_known("input"))
def add_number(input: RMSTensor, other: Number, alpha: Number = 1) -> NormedTensor:
    """p(x) + c or gate + c: as every sum, and what it is."""
    return _shift(unconditional(torch.add, input, other, alpha), input, float(other * alpha), 1.0)


@normed_op(torch.add).register_norm(when=_is_known("other"))
def number_add(input: Number, other: RMSTensor, alpha: Number = 1) -> NormedTensor:
    """c + p(x) or c + gate: as every sum, and what it is."""
    return _shift(unconditional(torch.add, input, other, alpha), other, float(input), float(alpha))


# -- gates ----------------------------------------------------------------------------------------------------------------


def _register_gate(f: Callable, when: Callable[[dict[str, Any]], bool]) -> None:
    def gate(input: RMSTensor) -> NormedTensor:
        """As every such function, and of what."""
        return with_fact(unconditional(f, input), Gate(f, _polynomial(input)))

    gate.__name__ = gate.__qualname__ = f"{f.__name__}_gate"
    normed_op(f).register_norm(gate, when=when)


_register_gate(torch.tanh, _is_known("input"))
_register_gate(torch.erf, _is_known("input"))
_register_gate(torch.sigmoid, lambda args: True)


# -- x times its gate -----------------------------------------------------------------------------------------------------


def _activation(gate: Gate) -> tuple[Callable[[Any], NormedTensor], float, float] | None:
    """(rule of h, a, c) with ``x (scale f + shift) = c h(a x)``; None if it is no activation known here."""
    coefficients = {k: v for k, v in gate.argument.coefficients.items() if v != 0}
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


def _is_gated(x: str, gate: str) -> Callable[[dict[str, Any]], bool]:
    """The condition that `gate` is a gate of the tensor that argument `x` is a multiple of."""

    def condition(args: dict[str, Any]) -> bool:
        found = fact(args[gate], Gate)
        if found is None or not is_rms(args[x]) or fact(args[x], Gate) is not None:
            return False
        own = _polynomial(args[x])
        return own.coefficients.keys() == {1} and own.x.is_same(found.argument.x) and _activation(found) is not None

    return condition


def _gated(x: RMSTensor, gate: NormedTensor) -> NormedTensor:
    """x times its own gate.

    Value:        that of the activation: gelu, gelu with tanh, silu
    Sensitivity:  its own, to x; the gate moves with x only
    """
    own, found = _polynomial(x), fact(gate, Gate)
    activation = None if found is None else _activation(found)
    assert activation is not None, "the rule's condition has been checked"
    rule, a, c = activation
    c = abs(c * own.coefficients[1])
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
