"""Finding out what a function does, and whether its derivatives are right: `log`, `check_vjp`, `check_jvp`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.errors import TransformError, TransformTypeError, WrongDerivativeError, with_details
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.forward import jvp
from thunder_norm.functions.gradients import vjp
from thunder_norm.functions.programs import Values, operations_of, outputs_of
from thunder_norm.functions.transformed import Call, Transformed, check_function
from thunder_norm.scalars import is_count, is_number
from thunder.core import dtypes
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol

# -- log: each operation, with names and shapes, as it is traced --------------------------------------------------------


class Log(Transformed):
    """A function that prints its operations when it is traced."""

    def __init__(self, function: Callable, name: str, file: TextIO | None):
        self.name = "log"
        super().__init__(function)
        if not isinstance(name, str):
            raise TransformTypeError(with_details("log: the name of a level must be a string", got=repr(name)))
        if file is not None and not hasattr(file, "write"):
            raise TransformTypeError(with_details("log: a file is something to write to", got=repr(file)))
        self.level = name
        self.file = file

    def emit(self, call: Call) -> Any:
        """Write the program as it is."""
        program = call.acquire()
        names = get_jit_ctx()._proxy_swapmap
        values = Values(renew=False)
        for p, v in zip(program.trace.args, [*call.tensors, *program.captured], strict=True):
            values[p] = v
        shown = {p.name: _name(v, names) for p, v in zip(program.trace.args, call.tensors, strict=False)}
        for bsym in operations_of(program.trace):
            if bsym.flat_proxy_outs:
                print(f"{self.level} {_line(bsym, names, shown)}", file=self.file or sys.stdout)
            values.copy(bsym)
        return program.result(values.read(outputs_of(program.trace)))


def _name(p: Proxy, names: dict) -> str:
    known = names.get(variableify(p))
    return p.name if known is None else known.name


def _line(bsym: BoundSymbol, names: dict, shown: dict[str, str]) -> str:
    def text(v: Any) -> Any:
        if isinstance(v, Proxy):
            return _Text(shown.get(v.name) or _name(v, names))
        return _Text(str(dtypes.to_torch_dtype(v))) if isinstance(v, dtypes.dtype) else v

    args = [repr(tree_map(text, a)) for a in bsym.args]
    args += [f"{k}={tree_map(text, v)!r}" for k, v in bsym.kwargs.items() if v is not None]
    outs = ", ".join(_described(p, names) for p in tree_flatten(bsym.output)[0] if isinstance(p, Proxy))
    return f"{outs} = {bsym.sym.name}({', '.join(args)})"


def _described(p: Proxy, names: dict) -> str:
    if isinstance(p, TensorProxy):
        return f"{_name(p, names)}: {tuple(p.shape)}"
    return f"{_name(p, names)}: a number" if isinstance(p, NumberProxy) else _name(p, names)


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


@constructor
def log(function: Callable, name: str = "log", *, file: TextIO | None = None) -> Callable:
    """The function itself, which prints each of its operations when it is traced, with names and shapes.

    What is printed is what this level of transforms sees: inside `vmap` the shapes of one sample, around `grad` the derivative's
    operations as well.  A call that finds its program in the cache prints nothing.

    Args:
        function: what to look at; it may be a transformed function.
        name: printed at the start of each line, to tell levels apart.
        file: where to, standard output by default.

    Raises:
        TransformTypeError: no function, a name that is no string, a file that cannot be written to.

    >>> import torch
    >>> from thunder_norm.transforms import grad
    >>> _ = log(grad(log(lambda x: torch.sin(x).sum(), "inside")), "outside")(torch.zeros(3))
    inside t1: (3,) = sin(x)
    inside t4: () = sum(t1, None, False)
    outside t7: (3,) = cos(x)
    """
    return Log(function, name, file)


# -- check_vjp, check_jvp: against differences of the function's values -------------------------------------------------


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
        TransformTypeError: no function, or a primal or a result that is no floating point tensor.
        TransformError: no primals, no number of directions > 0, or no tolerance > 0.

    >>> check_vjp(lambda x: torch.sin(x) * x.sum(), torch.ones(3, dtype=torch.float64))
    """

    def of_pullback(point: tuple, direction: tuple, cotangent: Any) -> torch.Tensor:
        _, pullback = vjp(function, *point)
        return _dot(pullback(cotangent), direction)

    _check("vjp", function, primals, of_pullback, num_directions, rtol)


def check_jvp(function: Callable, *primals: Any, num_directions: int = 3, rtol: float | None = None) -> None:
    """Check the tangents of a function against central differences: ``<u, J v> = <u, (f(x + h v) - f(x - h v)) / 2h>``.

    As `check_vjp`, for forward mode: the same arguments and errors.

    >>> check_jvp(lambda x: torch.sin(x) * x.sum(), torch.ones(3, dtype=torch.float64))
    """

    def of_tangent(point: tuple, direction: tuple, cotangent: Any) -> torch.Tensor:
        return _dot(cotangent, jvp(function, point, direction)[1])

    _check("jvp", function, primals, of_tangent, num_directions, rtol)


def _check(name: str, function: Callable, primals: tuple, analytic: Callable, num_directions: int, rtol: float | None) -> None:
    check_function(function, f"check_{name}")
    if not primals:
        raise TransformError(f"check_{name} needs at least one primal")
    if not is_count(num_directions):
        raise TransformError(f"check_{name}: num_directions must be an integer > 0, got {num_directions!r}")
    if rtol is not None and not (is_number(rtol) and rtol > 0):
        raise TransformError(f"check_{name}: rtol must be a number > 0, got {rtol!r}")
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
