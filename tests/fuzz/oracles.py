"""The transforms of `torch.func`, and two second opinions: the other order of differentiation, and differences of values.

Each oracle is a dict of the names that a program of transforms uses.  All have this project's signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

NAMES = ("grad", "value_and_grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd", "hessian", "custom_vjp", "jit")
TRANSFORMS_OF_JIT = ("SubclassTransform", "NormTransform")


class _Custom:
    """A function whose rule is its derivative: the rule is not needed."""

    def __init__(self, function: Callable):
        self.function = function

    def defvjp(self, fwd: Callable, bwd: Callable) -> None:
        pass

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _value_and_grad(function: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
    inner = torch.func.grad_and_value(function, argnums, has_aux)
    return lambda *args, **kwargs: inner(*args, **kwargs)[::-1]


_COMMON = {
    "vmap": torch.func.vmap,
    "custom_vjp": _Custom,
    "jit": lambda function, **options: function,
    "functional_call": functional_call,
    "SubclassTransform": lambda: None,
    "NormTransform": lambda: None,
}

TORCH: dict[str, Any] = _COMMON | {
    "grad": torch.func.grad,
    "value_and_grad": _value_and_grad,
    "vjp": torch.func.vjp,
    "jvp": torch.func.jvp,
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
}


# -- everything by one function: the derivative in a direction ----------------------------------------------------------------

_EVALUATIONS = 6_000  # of one opinion: differences of differences of differences would take hours


class _Evaluations:
    """How often the function of a program was evaluated for one opinion; a count, so that every machine asks for the same."""

    count = 0

    def restart(self) -> None:
        """Another opinion is asked."""
        self.count = 0

    def add(self) -> None:
        """One more.

        Raises:
            TimeoutError: it is one too many.
        """
        self.count += 1
        if self.count > _EVALUATIONS:
            raise TimeoutError(f"more than {_EVALUATIONS} evaluations")


EVALUATIONS = _Evaluations()


# (f, primals, tangents) -> (out, tangent)
Derivative = Callable[[Callable, tuple, tuple], tuple[Any, Any]]


def _jacobian_by(derivative: Derivative) -> Callable:
    """``jacobian(f, argnums)``, column by column."""

    def jacobian(function: Callable, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Callable:
        def transformed(*args: Any, **kwargs: Any) -> Any:
            chosen = (argnums,) if isinstance(argnums, int) else argnums
            leaves, spec = tree_flatten(tuple(args[i] for i in chosen))

            def of_leaves(*leaves: torch.Tensor) -> Any:
                EVALUATIONS.add()
                given = list(args)
                for i, part in zip(chosen, tree_unflatten(list(leaves), spec), strict=True):
                    given[i] = part
                out = function(*given, **kwargs)
                return out[0] if has_aux else out

            out = function(*args, **kwargs)
            value, aux = out if has_aux else (out, None)
            blocks = []
            for k, leaf in enumerate(leaves):
                tangents = []
                for j in range(leaf.numel()):
                    unit = torch.zeros(leaf.numel(), dtype=leaf.dtype).index_fill(0, torch.tensor([j]), 1).reshape(leaf.shape)
                    directions = tuple(unit if i == k else torch.zeros_like(v) for i, v in enumerate(leaves))
                    tangents.append(derivative(of_leaves, tuple(leaves), directions)[1])
                blocks.append(_columns(tangents, value, leaf))
            outs, out_spec = tree_flatten(value)
            per_out = []
            for i in range(len(outs)):
                found = tree_unflatten([b[i] for b in blocks], spec)
                per_out.append(found[0] if isinstance(argnums, int) else found)
            result = tree_unflatten(per_out, out_spec)
            return (result, aux) if has_aux else result

        return transformed

    return jacobian


def _by_directions(derivative: Derivative, inner: Callable[[], dict]) -> dict[str, Any]:
    """The transforms, by ``derivative(f, primals, tangents) -> (out, tangent)``; what they find inside is `inner`'s."""
    jacobian = _jacobian_by(derivative)

    def value_and_jacobian(function: Callable, argnums: Any = 0, has_aux: bool = False) -> Callable:
        def transformed(*args: Any, **kwargs: Any) -> Any:
            found = jacobian(function, argnums, has_aux)(*args, **kwargs)
            return function(*args, **kwargs), found[0] if has_aux else found

        return transformed

    def vjp(function: Callable, *primals: Any, has_aux: bool = False) -> Any:
        out = function(*primals)
        value = out[0] if has_aux else out

        def pull(cotangents: Any) -> Any:
            def product(*args: Any) -> torch.Tensor:
                found = function(*args)
                parts = zip(tree_leaves(found[0] if has_aux else found), tree_leaves(cotangents), strict=True)
                return sum(((v * c).sum() for v, c in parts), torch.zeros((), dtype=torch.float64))

            return jacobian(product, tuple(range(len(primals))))(*primals)

        return (value, pull, out[1]) if has_aux else (value, pull)

    def jvp(function: Callable, primals: tuple, tangents: tuple, has_aux: bool = False) -> Any:
        if not has_aux:
            return derivative(function, primals, tangents)
        return (*derivative(lambda *args: function(*args)[0], primals, tangents), function(*primals)[1])

    return _COMMON | {
        "grad": jacobian,
        "value_and_grad": value_and_jacobian,
        "vjp": vjp,
        "jvp": jvp,
        "jacrev": jacobian,
        "jacfwd": jacobian,
        "hessian": lambda f, argnums=0: jacobian(inner()["jacrev"](f, argnums), argnums),
    }


def _columns(tangents: list[Any], value: Any, leaf: torch.Tensor) -> list[torch.Tensor]:
    """For each leaf of the value, its derivative with respect to all entries of `leaf`."""
    outs = tree_leaves(value)
    if not tangents:
        return [torch.zeros(*o.shape, *leaf.shape, dtype=o.dtype) for o in outs]
    columns = zip(*(tree_leaves(t) for t in tangents), strict=True)
    return [torch.stack(c, -1).reshape(*o.shape, *leaf.shape) for c, o in zip(columns, outs, strict=True)]


def _only_real(*trees: Any) -> None:
    if any(v.is_complex() for v in tree_leaves(trees) if isinstance(v, torch.Tensor)):
        raise NotImplementedError("this oracle knows real numbers only")


def _forward(function: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    _only_real(primals)
    return torch.func.jvp(function, primals, tangents)


def _double_reverse(function: Callable, primals: tuple, tangents: tuple, has_aux: bool = False) -> Any:
    """The transpose of the transpose."""
    _only_real(primals)
    out, pull, *aux = torch.func.vjp(function, *primals, has_aux=has_aux)
    _only_real(out)
    zeros = tree_map(torch.zeros_like, out)
    _, again = torch.func.vjp(pull, zeros)
    return (out, *again(tangents), *aux)


# jvp where the program goes backwards, two reverse modes where it goes forwards
OTHER_ORDER: dict[str, Any] = _by_directions(_forward, lambda: OTHER_ORDER)
OTHER_ORDER["jvp"] = _double_reverse
OTHER_ORDER["jacfwd"] = torch.func.jacrev
OTHER_ORDER["hessian"] = lambda f, argnums=0: torch.func.jacrev(torch.func.jacrev(f, argnums), argnums)


# -- differences ----------------------------------------------------------------------------------------------------------------

_STEP = 2e-3


def _differences(function: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """Central differences, extrapolated twice: an error of the sixth order in the step."""
    _only_real(primals)

    def central(step: float) -> list[torch.Tensor]:
        ends = []
        for sign in (1, -1):
            moved = tree_map(lambda p, t, s=sign: p + s * step * t, primals, tangents)
            ends.append(tree_leaves(function(*moved)))
        return [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]

    coarse, middle, fine = (central(_STEP / 2**i) for i in range(3))
    first = [[(4 * b - a) / 3 for a, b in zip(*pair, strict=True)] for pair in ((coarse, middle), (middle, fine))]
    out = function(*primals)
    leaves, spec = tree_flatten(out)
    return out, tree_unflatten([(16 * b - a) / 15 for a, b in zip(*first, strict=True)], spec)


DIFFERENCES: dict[str, Any] = _by_directions(_differences, lambda: TORCH)


class Outermost(dict):
    """`DIFFERENCES` for the first transform that is called, another oracle for those inside it: each difference costs digits."""

    def __init__(self, inside: dict[str, Any]) -> None:
        super().__init__(_COMMON)
        self._inside = inside
        self._is_inside = False
        for name in ("grad", "value_and_grad", "jacrev", "jacfwd", "hessian"):
            self[name] = self._made(name)
        self["jvp"] = self._called("jvp")
        self["vjp"] = self._called("vjp")

    def _made(self, name: str) -> Callable:
        def transform(*args: Any, **options: Any) -> Callable:
            def transformed(*given: Any, **kwargs: Any) -> Any:
                return self._first(lambda names: names[name](*args, **options)(*given, **kwargs))

            return transformed

        return transform

    def _called(self, name: str) -> Callable:
        def transform(*args: Any, **options: Any) -> Any:
            if name == "vjp" and not self._is_inside:  # its pullback is called later
                return self._pullback(*args, **options)
            return self._first(lambda names: names[name](*args, **options))

        return transform

    def _pullback(self, *args: Any, **options: Any) -> Any:
        out, pull, *aux = self._first(lambda names: names["vjp"](*args, **options))
        return (out, lambda cotangents: self._first(lambda names: pull(cotangents)), *aux)

    def _first(self, run: Callable[[dict], Any]) -> Any:
        names = self._inside if self._is_inside else DIFFERENCES
        before, self._is_inside = self._is_inside, True
        try:
            return run(names)
        finally:
            self._is_inside = before
