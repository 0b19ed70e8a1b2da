"""How one call of an operator is tried under a function transform, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map

import thunder_norm.transforms as ours
from tests.seeds import seeded
from thunder_norm.functions.vmap import vmap
import thunder

if __package__ == "tests":
    from tests.op_coverage import Case, call_source, function_of_source, program
else:
    from tests.op_coverage import Case, call_source, function_of_source, program

BATCH = 3
SMALL = 400  # entries that a Hessian is taken with respect to
TRANSFORMS = ("grad", "hessian", "jvp", "vjp", "vmap")

# Operators that round to fewer digits: a batch may be summed in another order.
ROUNDING = {"bfloat16": 2**-7, "half": 2**-10}


@dataclass(frozen=True)
class Trial:
    """A transformed function with arguments, and what it must return."""

    function: Callable
    reference: Callable
    args: tuple[torch.Tensor, ...]
    differences: Callable | None = None  # what the reference must return too, to fewer digits

    def check(self, rtol: float | None = None) -> bool:
        """Raise AssertionError if they disagree, what the transform raises otherwise; False if there is no reference."""
        with without_seeds():
            try:
                want = tensors_of(self.reference(*self.args))
            except Exception:  # noqa: BLE001 - there is nothing to agree with
                return False
            got = tensors_of(self.function(*self.args))
            try:
                assert_all_close(got, want, rtol, rtol)
            except AssertionError:
                if self.differences is None:
                    raise
                want = tensors_of(self.differences(*self.args))
                assert_all_close(got, want, 1e-5, 1e-5 * max(float(w.abs().max()) for w in want if w.numel()))
        return True


def assert_all_close(got: list[torch.Tensor], want: list[torch.Tensor], rtol: float | None, atol: float | None) -> None:
    """As many tensors, and the same."""
    assert len(got) == len(want), f"{len(got)} results, expected {len(want)}"
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol, equal_nan=True)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(tree) if isinstance(v, torch.Tensor)]


def without_seeds() -> Any:
    """The database seeds inside the operators that draw numbers."""
    return mock.patch.object(common_methods_invocations, "wrapper_set_seed", lambda f, *args, **kwargs: f(*args, **kwargs))


def inputs(case: Case) -> list[torch.Tensor]:
    """The tensors of a case."""
    return [v.detach().clone() for v in case.leaves if isinstance(v, torch.Tensor)]


def is_traced_right(case: Case) -> bool:
    """Whether eager gives the same result twice, made of tensors, and Thunder the same."""
    function = program([case])
    try:
        with without_seeds(), torch.no_grad():
            first, second = function(*inputs(case)), function(*inputs(case))
            traced = thunder.jit(function)(*inputs(case))
        if not all(isinstance(v, torch.Tensor) for v in tree_leaves(first)):
            return False
        for other in (second, traced):
            torch.testing.assert_close(tensors_of(other), tensors_of(first), equal_nan=True)
    except Exception:  # noqa: BLE001 - whatever goes wrong is not the transform's
        return False
    return bool(tensors_of(first))


def samples_of(t: torch.Tensor, dim: int) -> torch.Tensor:
    """A batch of different tensors where the operator is defined: smaller ones for floating tensors, or more of the same."""
    factors = [1 - 0.125 * i for i in range(BATCH)] if t.is_floating_point() or t.is_complex() else [1] * BATCH
    return torch.stack([t * f if f != 1 else t for f in factors], dim)


def vmap_trials(case: Case) -> Iterator[Trial]:
    """All tensors with a batch dimension, then only the first, as its last one, then only the last."""
    function, given = program([case]), inputs(case)
    dims: list[tuple[int | None, ...]] = [(0,) * len(given), (-1, *(None,) * (len(given) - 1))]
    if len(given) > 1:
        dims.append((*(None,) * (len(given) - 1), 0))
    for in_dims in dims:
        args = tuple(t if d is None else samples_of(t, d) for t, d in zip(given, in_dims, strict=True))
        # operators that could draw numbers, but are told not to
        yield Trial(vmap(function, in_dims, randomness="different"), one_by_one(function, in_dims), args)


def one_by_one(function: Callable, in_dims: Sequence[int | None]) -> Callable:
    """The function for each sample, in a loop."""

    def looped(*args: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for i in range(BATCH):
            results.append(
                tensors_of(function(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True))))
            )
        return [torch.stack(column) for column in zip(*results, strict=True)]

    return looped


@dataclass(frozen=True, eq=False)
class Source:
    """A case as the text of a function of its tensors ``t0``, ``t1``, ... , with results that derivatives are defined for."""

    call: str
    constants: dict[str, Any]
    case: Case
    tensors: tuple[torch.Tensor, ...]
    floating: tuple[int, ...]  # positions of the floating ones among them
    results: tuple[str, ...]  # where they are in what the operator returns: "r[0]" for the first one of a tuple
    real: tuple[str, ...]  # those of them that are real

    @staticmethod
    def of(case: Case) -> Source:
        """The case as text."""
        constants: dict[str, Any] = {}
        tensors = inputs(case)
        call = call_source("operator", case, (f"t{i}" for i in range(len(tensors))), constants)
        with without_seeds():
            found = named_tensors(program([case])(*inputs(case))[0])
        results = tuple(name for name, t in found if t.is_floating_point() or t.is_complex())
        real = tuple(name for name, t in found if t.is_floating_point())
        floating = tuple(i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex())
        return Source(call, constants, case, tuple(tensors), floating, results, real)

    def names(self, positions: Iterable[int] | None = None, prefix: str = "t") -> str:
        """The names of tensors, as arguments; of all by default."""
        return ", ".join(f"{prefix}{i}" for i in (range(len(self.tensors)) if positions is None else positions))

    def function(self, text: str, transforms: Any) -> Callable:
        """The function that `text` defines, with transforms from torch.func or from here."""
        names = {"operator": self.case.function, "torch": torch}
        names |= {name: getattr(transforms, name) for name in TRANSFORMS if hasattr(transforms, name)}
        return function_of_source(text, names, dict(self.constants))

    def loss(self, positions: Iterable[int] | None = None) -> str:
        """The text of a scalar function of the tensors at some positions, all floating ones by default."""
        terms = [
            f"({r} * torch.cos({r})).sum()" if r in self.real else f"({r}.real * torch.cos({r}.imag)).sum()" for r in self.results
        ]
        return f"""
    def loss({self.names(self.floating if positions is None else positions)}):
        r = {self.call}
        return {" + ".join(f"{term} * {1 + i}" for i, term in enumerate(terms))}
"""

    def gradient(self) -> str:
        """The text of a function of all tensors: gradients with respect to the floating ones."""
        return f"""
def run({self.names()}):{self.loss()}
    return grad(loss, argnums={tuple(range(len(self.floating)))})({self.names(self.floating)})
"""

    def function_of_floating(self) -> str:
        """The text of a function of the floating tensors: the floating results."""
        return f"""
    def function({self.names(self.floating)}):
        r = {self.call}
        return ({"".join(f"{r}, " for r in self.results)})
"""

    def directions(self) -> list[torch.Tensor]:
        """A random direction of each floating tensor."""
        torch.default_generator.manual_seed(seeded(1))
        return [torch.randn_like(self.tensors[i]) for i in self.floating]


def named_tensors(tree: Any, name: str = "r") -> list[tuple[str, torch.Tensor]]:
    """The tensors in a result, each with the expression for it."""
    if isinstance(tree, torch.Tensor):
        return [(name, tree)]
    items = enumerate(tree) if isinstance(tree, tuple | list) else ()
    return [found for i, item in items for found in named_tensors(item, f"{name}[{i}]")]


def grad_trials(case: Case) -> Iterator[Trial]:
    """The gradient of a scalar function of the real results."""
    source = Source.of(case)
    if source.floating and source.results:
        text = source.gradient()
        yield Trial(thunder.jit(source.function(text, ours)), source.function(text, torch.func), source.tensors)


def jvp_trials(case: Case) -> Iterator[Trial]:
    """Results and tangents in a random direction."""
    source = Source.of(case)
    if not (source.floating and source.results):
        return
    points, tangents = source.names(source.floating), source.names(source.floating, "d")
    text = f"""
def run({source.names()}, {tangents}):{source.function_of_floating()}
    return jvp(function, ({points},), ({tangents},))
"""
    yield _with_directions(source, text)


def _with_directions(source: Source, text: str) -> Trial:
    args = (*source.tensors, *source.directions())
    by_differences = source.function(text, _Differences)
    return Trial(thunder.jit(source.function(text, ours)), source.function(text, _Reference), args, by_differences)


def jvp_grad_trials(case: Case) -> Iterator[Trial]:
    """The derivative of the gradient in a random direction."""
    source = Source.of(case)
    if source.floating and source.results:
        points, tangents = source.names(source.floating), source.names(source.floating, "d")
        argnums = tuple(range(len(source.floating)))
        yield _with_directions(
            source,
            f"""
def run({source.names()}, {tangents}):{source.loss()}
    return jvp(grad(loss, argnums={argnums}), ({points},), ({tangents},))
""",
        )


def vjp_jvp_trials(case: Case) -> Iterator[Trial]:
    """The gradient of results and of their derivatives in a random direction."""
    source = Source.of(case)
    if source.floating and source.results:
        points, tangents = source.names(source.floating), source.names(source.floating, "d")
        cotangents = ", ".join(f"({''.join(f'out[{part}][{i}].cos(), ' for i in range(len(source.results)))})" for part in (0, 1))
        yield _with_directions(
            source,
            f"""
def run({source.names()}, {tangents}):{source.function_of_floating()}
    def pushed({points}):
        return jvp(function, ({points},), ({tangents},))
    out, pull = vjp(pushed, {points})
    return pull(({cotangents}))
""",
        )


def hessian_trials(case: Case) -> Iterator[Trial]:
    """The Hessian with respect to the first floating tensor."""
    source = Source.of(case)
    if source.floating and source.results and source.tensors[source.floating[0]].numel() <= SMALL:
        first = source.floating[:1]
        text = f"\ndef run({source.names()}):{source.loss(first)}\n    return hessian(loss)({source.names(first)})\n"
        functions = (source.function(text, transforms) for transforms in (ours, _Reference, _Differences))
        traced, reference, by_differences = functions
        yield Trial(thunder.jit(traced), reference, source.tensors, by_differences)


class _Reference:
    """torch.func's, with two reverse modes where torch has no forward mode: the transpose of the transpose."""

    grad, vjp = torch.func.grad, torch.func.vjp

    @staticmethod
    def jvp(function: Callable, primals: tuple, tangents: tuple) -> tuple:
        try:
            return torch.func.jvp(function, primals, tangents)
        except NotImplementedError:
            out, pull = torch.func.vjp(function, *primals)
            _, again = torch.func.vjp(pull, tree_map(torch.zeros_like, out))
            return (out, *again(tangents))

    @staticmethod
    def hessian(function: Callable) -> Callable:
        def transformed(*args: torch.Tensor) -> torch.Tensor:
            try:
                return torch.func.hessian(function)(*args)
            except NotImplementedError:
                return torch.func.jacrev(torch.func.jacrev(function))(*args)

        return transformed


class _Differences:
    """Derivatives in a direction by differences, of what torch.func differentiates once; torch.func differentiates them in turn."""

    grad, vjp = torch.func.grad, torch.func.vjp

    @staticmethod
    def jvp(function: Callable, primals: tuple, tangents: tuple) -> tuple:
        def central(h: float) -> Any:
            ahead, behind = (function(*(p + s * h * t for p, t in zip(primals, tangents, strict=True))) for s in (1, -1))
            return tree_map(lambda a, b: (a - b) / (2 * h), ahead, behind)

        # Richardson's extrapolation: the error is of the fourth order
        return function(*primals), tree_map(lambda coarse, fine: (4 * fine - coarse) / 3, central(2e-4), central(1e-4))

    @staticmethod
    def hessian(function: Callable) -> Callable:
        def transformed(x: torch.Tensor) -> torch.Tensor:
            basis = torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
            columns = [_Differences.jvp(torch.func.grad(function), (x,), (e,))[1] for e in basis]
            return torch.stack(columns, -1).view(*x.shape, *x.shape)

        return transformed


def vmap_grad_trials(case: Case) -> Iterator[Trial]:
    """The gradient over a batch of all floating tensors, then of the first one, as its last dimension."""
    source = Source.of(case)
    if not (source.floating and source.real):
        return
    text = source.gradient().replace("def run(", "def gradient(")
    body = text.replace("\n", "\n    ")
    for batched, dim in ((source.floating, 0), (source.floating[:1], -1)):
        in_dims = tuple(dim if i in batched else None for i in range(len(source.tensors)))
        batch = f"def run({source.names()}):{body}\n    return vmap(gradient, in_dims={in_dims}, randomness='different')({source.names()})"
        args = tuple(t if d is None else samples_of(t, d) for t, d in zip(source.tensors, in_dims, strict=True))
        single = source.function(source.gradient(), torch.func)
        yield Trial(thunder.jit(source.function(batch, ours)), one_by_one(single, in_dims), args)


TRIALS: dict[str, Callable[[Case], Iterator[Trial]]] = {
    "grad": grad_trials,
    "jvp": jvp_trials,
    "vmap": vmap_trials,
    "vmap_grad": vmap_grad_trials,
    "jvp_grad": jvp_grad_trials,
    "vjp_jvp": vjp_jvp_trials,
    "hessian": hessian_trials,
    "grad_complex": grad_trials,
    "jvp_complex": jvp_trials,
}
