"""Sums of exponentials are exponentials: of the logarithm of their sum, which moves no further than what moves furthest.

    torch.log((torch.exp(similarity - similarity.amax(1, keepdim=True)) * others).sum(1))
    torch.log(torch.exp(scores).masked_fill(is_padding, 0).sum(-1) + 1e-8)

Constants that are not negative, not all of them 0, may weigh the exponentials, and a positive number may be added.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from thunder_norm.core.context import current_environment, lift, run_real, values_of
from thunder_norm.core.kinds import LinfTensor, RMSTensor
from thunder_norm.core.local import is_local
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact, ruled, values_known
from thunder_norm.rules._shared import argument, as_kind, dims_tuple
from thunder_norm.rules.known_ranges.partial_sums import opposite
from thunder_norm.rules.layers.rotary import Scaled
from thunder_norm.rules.weighted.kept_exponentials import as_exponential, exponential_of
from thunder_norm.rules.written_out.written_out_exponentials import Exponential, OnePlusExponential
from thunder_norm.scalars import times


def _weights(w: torch.Tensor) -> torch.Tensor | None:
    """A constant of the program, if none of its entries is known to be negative."""
    values = values_of(w)
    if isinstance(w, NormedTensor) or not current_environment().is_constant(w) or w.is_complex() or values.is_meta:
        return None
    if isinstance(values, FakeTensor):
        return w
    with _disable_current_modes():
        return w if bool((values >= 0).all()) else None


def _weighed(x: Any) -> tuple[Source, torch.Tensor] | None:
    """The argument of exponentials and the weights, if x is the product of both."""
    found = None if is_local(x) else fact(x, Scaled)
    weights = None if found is None or found.is_rotated else _weights(found.gain)
    if found is None or weights is None:
        return None
    of = next((f.argument for f in found.x.facts if isinstance(f, Exponential) and issubclass(f.argument.kind, RMSTensor)), None)
    return None if of is None or of.backing.shape != x.shape else (of, weights)


def _filled(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """Exponentials, some of them taken away."""
    x, mask = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "mask")
    value = argument(args, kwargs, 2, "value")
    if not isinstance(value, int | float) or value != 0 or exponential_of(x) is None or x.shape != out.shape:
        return out._facts
    return Alternatives(
        (*every_fact(out), Scaled(Source.of(x), False, run_real(torch.Tensor.to, (opposite(mask), out.dtype), {})))
    )


normed_op(torch.masked_fill).register_fact(_filled)


def _total(weights: torch.Tensor, shape: torch.Size, dim: Any, keepdim: bool) -> torch.Tensor | None:
    """What the weights of each group add up to; None if that is known to be 0 somewhere.

    Of weights that a trace has no values of, the trace finds out: the sum is 0 where one of them is negative.
    """
    given = values_known(weights)
    if given is not None:
        with _disable_current_modes():
            total = given.double().expand(tuple(shape)).sum(dim, keepdim)
            return total if bool((total > 0).all()) else None
    whole = run_real(torch.Tensor.expand, (run_real(torch.Tensor.double, (weights,), {}), shape), {})
    is_weight = run_real(torch.Tensor.double, (run_real(torch.all, (run_real(torch.ge, (whole, 0), {}),), {}),), {})
    return run_real(torch.mul, (run_real(torch.sum, (whole, dim, keepdim), {}), is_weight), {})


def _sum(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x, dim = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "dim", default=None)
    weighed, a = _weighed(x), exponential_of(x)
    if (weighed is None and a is None) or not isinstance(x, NormedTensor) or kwargs.get("dtype") is not None:
        return out._facts
    dims, keepdim = dims_tuple(dim, x.ndim), bool(argument(args, kwargs, 2, "keepdim", default=False))
    if a is not None:
        claim = ruled(torch.logsumexp, (a.moving(), dims, keepdim), {})
        return out._facts if claim is None else as_exponential(a, out, claim[0].norm_size, claim[1], claim[0].elem_dims)
    assert weighed is not None, "one of both is known"
    of, weights = weighed
    total = _total(weights, x.shape, dims, keepdim)
    if total is None:
        return out._facts
    entries, c = as_kind(of.tensor(), LinfTensor, ())
    moved = None if of.perturbation_size is None else times(of.perturbation_size, c)
    logs = lift(run_real(torch.log, (total,), {}), LinfTensor, ()).norm_size
    # of weights that are none it may move as it will
    moved = None if moved is None else torch.where(logs < math.inf, moved, logs)
    source = Source(LinfTensor, of.backing, entries.norm_size, moved, ())
    return as_exponential(source, out, entries.norm_size + logs, moved, ())


normed_op(torch.sum).register_fact(_sum)


def _plus(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    """log(e^a + c) is log(1 + c) for a = 0, and moves no further than a."""
    a, b = argument(args, kwargs, 0, "input", "self"), argument(args, kwargs, 1, "other")
    x, c = (exponential_of(a), b) if isinstance(a, NormedTensor) else (exponential_of(b), a)
    if x is None or not isinstance(c, int | float) or not 0 < c < math.inf or argument(args, kwargs, 2, "alpha", default=1) != 1:
        return out._facts
    if fact(out, OnePlusExponential) is not None:  # which has a rule of its own
        return out._facts
    return as_exponential(x, out, x.norm_size + math.log1p(c), x.perturbation_size, x.elem_dims)


normed_op(torch.add).register_fact(_plus)
