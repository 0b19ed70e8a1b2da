"""Operations whose kernels look at values (labels, positions, probabilities, pivots, lengths), with values that torch takes and with such that it refuses.

A function is called several times, with the one and with the other: what torch refuses is refused in each call, whatever trace serves it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import thunder_norm.transforms as ours
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import SubclassTransform
from thunder_norm.trees import flat_tensors
import thunder

from .program import Outcome

# An expression of x, which is floating, and i; then what it takes, and what it does not.
_OPERATIONS = """
F.one_hot(i) + x.sum() ;; x, L(0, 2) ;; x, L(0, -1)
F.one_hot(i, 3) + x.sum() ;; x, L(0, 2) ;; x, L(0, 5)
F.embedding(i, x) ;; x, L(0, 1) ;; x, L(0, 7)
F.nll_loss(x, i) ;; x, L(0, 1, 3) ;; x, L(0, 1, 4)
F.cross_entropy(x, i, reduction="none") ;; x, L(0, 1, 3) ;; x, L(0, 1, -3)
F.cross_entropy(x, i, label_smoothing=0.1) ;; x, L(0, -100, 3) ;; x, L(0, 1, 9)
F.multi_margin_loss(x, i) ;; x, L(0, 1, 3) ;; x, L(0, 1, 9)
torch.bincount(i, minlength=4) * x.sum() ;; x, L(0, 1) ;; x, L(0, -1)
torch.gather(x, 1, i) ;; x, L(0, 1, 3)[:, None] ;; x, L(0, 1, 4)[:, None]
torch.scatter(x, 1, i, 1.0) ;; x, L(0, 1, 3)[:, None] ;; x, L(0, 1, -1)[:, None]
torch.scatter_add(x, 1, i, torch.ones(3, 1)) ;; x, L(0, 1, 3)[:, None] ;; x, L(0, 1, 4)[:, None]
torch.index_add(x, 1, i, torch.ones(3, 2)) ;; x, L(0, 3) ;; x, L(0, 4)
torch.index_copy(x, 1, i, torch.ones(3, 2)) ;; x, L(0, 3) ;; x, L(0, 4)
torch.index_select(x, 1, i) ;; x, L(0, 3) ;; x, L(0, 4)
torch.index_put(x, (i,), torch.ones(4)) ;; x, L(0, 2) ;; x, L(0, 3)
torch.take(x, i) ;; x, L(0, 11) ;; x, L(0, 12)
x[i] * 2 ;; x, L(0, -3) ;; x, L(0, -4)
x[:, i] * 2 ;; x, L(0, 3) ;; x, L(0, 4)
x[i, i] ;; x, L(0, 2) ;; x, L(0, 3)
torch.repeat_interleave(x, i, 0, output_size=3) ;; x, L(0, 1, 2) ;; x, L(0, 1, 3)
torch.linalg.cholesky(x) ;; torch.eye(3), L(0) ;; -torch.eye(3), L(0)
torch.linalg.inv(x) ;; torch.eye(3), L(0) ;; torch.zeros(3, 3), L(0)
torch.linalg.solve(x, torch.ones(3)) ;; torch.eye(3), L(0) ;; torch.zeros(3, 3), L(0)
torch.linalg.eigh(x).eigenvalues ;; torch.diag(L(1.0, 2.0, 3.0)), L(0) ;; torch.eye(3) * math.nan, L(0)
(torch._assert((x > 0).all(), "not positive"), x * 2)[1] ;; x, L(0) ;; -x, L(0)
(torch._assert_async((x > 0).all()), x * 2)[1] ;; x, L(0) ;; -x, L(0)
torch.distributions.Normal(0.0, x).log_prob(x) ;; x, L(0) ;; -x, L(0)
(5 // i) + x.sum() ;; x, L(1, 2) ;; x, L(0, 2)
torch.remainder(i, i) * x.sum() ;; x, L(1, 2) ;; x, L(0, 2)
F.binary_cross_entropy(x, torch.ones(3, 4)) ;; x / 20, L(0) ;; x, L(0)
x.masked_scatter(i > 1, torch.ones(2)) ;; x, L(0, 1, 0, 1) ;; x, L(2, 1, 2, 2)
F.max_unpool1d(x[None, :, :2], i, 2) ;; x, L(0, 2).expand(1, 3, 2) ;; x, L(0, 99).expand(1, 3, 2)
torch.quantile(x, i * 0.5) ;; x, L(0, 1) ;; x, L(0, 3)
F.ctc_loss(x.log_softmax(-1)[:, None], L(1)[None], i, L(1)) ;; x, L(3) ;; x, L(9)
"""
_WAYS: dict[str, tuple[Callable, Callable]] = {
    "plain": (lambda f: f, lambda f: thunder.jit(f, transforms=[SubclassTransform()])),
    "differentiated": (lambda f: _differentiated(f), lambda f: _differentiated(thunder.jit(f, transforms=[SubclassTransform()]))),
    "wrapper": (lambda f: _of_wrappers(f), lambda f: _of_wrappers(thunder.jit(f, transforms=[SubclassTransform()]))),
    "grad": (lambda f: _differentiated(f), lambda f: ours.grad(lambda x, i: f(x, i).sum())),
    "jvp": (lambda f: f, lambda f: lambda x, i: ours.jvp(lambda x: f(x, i), (x,), (x,))[0]),
    "vmap": (lambda f: lambda x, i: torch.stack([f(x, i)] * 2), lambda f: _of_two(ours.vmap(f))),
}


def _differentiated(f: Callable) -> Callable:
    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x, i).sum(), x)[0]

    return run


def _of_wrappers(f: Callable) -> Callable:
    return lambda x, i: f(*(TwoTensor(t.contiguous(), t.clone(memory_format=torch.contiguous_format)) for t in (x, i)))


def _of_two(f: Callable) -> Callable:
    return lambda x, i: f(torch.stack([x, x]), torch.stack([i, i]))


@dataclass(frozen=True)
class Refusals:
    """An operation, how it is called, and with which of its arguments, one call after the other."""

    operation: str
    way: str
    calls: tuple[bool, ...]

    def run(self) -> Outcome:
        """Each call against eager mode."""
        scope = {"torch": torch, "F": F, "math": math, "L": lambda *v: torch.tensor(v), "x": torch.arange(1.0, 13.0).view(3, 4)}
        text, *given = self.operation.split(" ;; ")
        f = eval(f"lambda x, i: {text}", scope)  # noqa: S307 - of this file
        eager, own = (make(f) for make in _WAYS[self.way])
        for is_taken in self.calls:
            arguments = eval(given[not is_taken], scope)  # noqa: S307
            wanted, found = _result(eager, arguments), _result(own, arguments)
            if isinstance(found, ThunderNormError):
                return Outcome("refused", f"{type(found).__name__}: {found}")
            if isinstance(wanted, Exception):
                if not isinstance(found, Exception):
                    return Outcome("wrong", f"{found}, where torch raises {type(wanted).__name__}: {wanted}")
            elif isinstance(found, Exception):
                return Outcome("error", f"{type(found).__name__}: {found}")
            elif not all(torch.allclose(*pair, equal_nan=True) for pair in zip(_flat(found), _flat(wanted), strict=True)):
                return Outcome("wrong", f"{found}, not {wanted}")
        return Outcome("right")

    def smaller(self) -> Iterable[Refusals]:
        """With fewer calls."""
        for n in range(len(self.calls)):
            if len(self.calls) > 1:
                yield replace(self, calls=self.calls[:n] + self.calls[n + 1 :])

    def source(self) -> str:
        """A program that can be pasted."""
        return f"from tests.fuzz.refusals import Refusals\nprint({self!r}.run())\n"

    def labels(self) -> Sequence[str]:
        """The operation, and how it is called."""
        return [self.way, self.operation.partition(" ;; ")[0]]


def _result(f: Callable, arguments: tuple[torch.Tensor, torch.Tensor]) -> Any:
    try:
        return f(*arguments)
    except Exception as e:  # noqa: BLE001 - whatever is said
        return e


def _flat(value: Any) -> list[torch.Tensor]:
    return [t for v in flat_tensors(value) for t in ((v.a, v.b) if isinstance(v, TwoTensor) else (v.detach(),))]


def draw(random: random.Random) -> Refusals:
    """Up to three calls of one operation, at least one of which torch refuses."""
    calls = random.choice(((False,), (True, False), (False, True), (True, False, True), (False, True, False)))
    return Refusals(random.choice(_OPERATIONS.strip().splitlines()), random.choice(sorted(_WAYS)), calls)
