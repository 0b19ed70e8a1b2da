"""Whether derivatives are right: against differences of the function's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.errors import TransformError, TransformTypeError, WrongDerivativeError, with_details
from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import vjp


def check_vjp(function: Callable, *primals: Any, num_directions: int = 3, rtol: float | None = None) -> None:
    """Check the pullback of a function against central differences: ``<J^T u, v> = <u, (f(x + h v) - f(x - h v)) / 2h>``.

    u and v are random, of unit variance, the same in each call; ``h`` is the cube root of the dtype's precision, times the size of
    x.  The function must be smooth around the primals and draw no numbers.

    Args:
        function: takes floating point tensors, in tuples, lists and dicts if it likes.
        primals: its arguments; float64 for a sharp check.
        num_directions: how many u and v are tried.
        rtol: how far the two may be apart, relative to the larger one and to 1; by default 1000 times what rounding and the
            step leave uncertain: 4e-8 in float64, 2e-2 in float32.

    Raises:
        WrongDerivativeError: they differ.
        TransformTypeError: a primal or a result is no floating point tensor.

    >>> check_vjp(lambda x: torch.sin(x) * x.sum(), torch.ones(3, dtype=torch.float64))
    """

    def of_pullback(point: tuple, direction: tuple, cotangent: Any) -> torch.Tensor:
        _, pullback = vjp(function, *point)
        return _dot(pullback(cotangent), direction)

    _check("vjp", function, primals, of_pullback, num_directions, rtol)


def check_jvp(function: Callable, *primals: Any, num_directions: int = 3, rtol: float | None = None) -> None:
    """Check the tangents of a function against central differences: ``<u, J v> = <u, (f(x + h v) - f(x - h v)) / 2h>``.

    As `check_vjp`, for forward mode.

    >>> check_jvp(lambda x: torch.sin(x) * x.sum(), torch.ones(3, dtype=torch.float64))
    """

    def of_tangent(point: tuple, direction: tuple, cotangent: Any) -> torch.Tensor:
        return _dot(cotangent, jvp(function, point, direction)[1])

    _check("jvp", function, primals, of_tangent, num_directions, rtol)


def _check(name: str, function: Callable, primals: tuple, analytic: Callable, num_directions: int, rtol: float | None) -> None:
    if not primals:
        raise TransformError(f"check_{name} needs at least one primal")
    _check_floating(primals, f"check_{name}: a primal")
    generator = torch.Generator().manual_seed(0)
    value = function(*primals)
    _check_floating(value, f"check_{name}: a result")
    precision = max(torch.finfo(t.dtype).eps for t in tree_flatten((primals, value))[0])
    scale = max([1.0, *(float(t.abs().max()) for t in tree_flatten(primals)[0] if t.numel())])
    step = precision ** (1 / 3) * scale
    rtol = 1000 * precision ** (2 / 3) if rtol is None else rtol
    for i in range(num_directions):
        direction, cotangent = (tree_map(lambda t: _normal_like(t, generator), tree) for tree in (primals, value))
        above, below = (function(*_moved(primals, direction, s)) for s in (step, -step))
        numeric = (_dot(cotangent, above) - _dot(cotangent, below)) / (2 * step)
        found = analytic(primals, direction, cotangent)
        size = max(abs(float(numeric)), abs(float(found)), 1.0)
        if not abs(float(numeric - found)) <= rtol * size:  # NaN differs
            raise WrongDerivativeError(
                with_details(
                    f"{name} of {getattr(function, '__name__', repr(function))} is not its derivative",
                    by_differences=f"{float(numeric):.10g}",
                    got=f"{float(found):.10g}",
                    direction=f"{i + 1} of {num_directions}, step {step:.3g}, tolerance {rtol:.3g}",
                )
            )


def _check_floating(tree: Any, what: str) -> None:
    for t in tree_flatten(tree)[0]:
        if not (isinstance(t, torch.Tensor) and t.is_floating_point()):
            got = f"a tensor of {t.dtype}" if isinstance(t, torch.Tensor) else f"a {type(t).__name__}"
            raise TransformTypeError(with_details(f"{what} is no floating point tensor", got=got))


def _normal_like(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)


def _moved(primals: tuple, direction: tuple, step: float) -> tuple:
    points, spec = tree_flatten(primals)
    moved = [(x + step * v).detach() for x, v in zip(points, tree_flatten(direction)[0], strict=True)]
    return tree_unflatten(moved, spec)


def _dot(a: Any, b: Any) -> torch.Tensor:
    pairs = zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True)
    return torch.stack([(x.detach().double() * y.detach().double()).sum() for x, y in pairs]).sum()
