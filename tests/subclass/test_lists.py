"""Torch's operators on lists of tensors: values, writes and gradients are eager's, with wrappers, plain tensors, and both in one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import part, seeded
from thunder_norm.transforms import SubclassTransform
import thunder

NAMES = sorted(name for name in dir(torch) if name.startswith("_foreach_"))


def calls() -> list[tuple[str, Callable]]:
    """Each operator with each form of its arguments: a function of a list that is written into and of two others."""
    found = []
    for name in NAMES:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            numbers_in_a_tensor = any(
                (a.name, str(a.type)) == ("scalars", "Tensor") for a in schema.arguments
            )  # values, which it reads
            if not (overload.endswith("out") or overload == "ScalarAndTensor" or numbers_in_a_tensor):
                found.append((f"{name}.{overload}", _call(name, [str(a.type) for a in schema.arguments[1:] if not a.kwarg_only])))
    return found


def _call(name: str, kinds: list[str]) -> Callable:
    def call(written: list, others: list, more: list) -> Any:
        of_type = {"List[Tensor]": iter((others, more)), "number": iter((0.5,)), "List[number]": iter(([0.5, 2.0],))}
        given = []
        for kind in kinds:
            if kind == "Tensor":
                given.append(torch.tensor(1.5, dtype=torch.float64))
            elif kind in of_type:
                given.append(next(of_type[kind]))
        result = getattr(torch, name)(written, *given)
        return [t * 1 for t in (written if name.endswith("_") else result)]

    return call


def sampled(found: list[tuple[str, Callable]]) -> list[tuple[str, Callable]]:
    """Those of one list are alike: a few of them, and all others."""
    few = ("_foreach_clone", "_foreach_copy", "_foreach_exp", "_foreach_floor", "_foreach_max", "_foreach_mm", "_foreach_zero")
    return [c for c in found if not c[0].endswith(".default") or c[0].startswith(few)]


CALLS = sampled(calls())
KINDS = {
    "TwoTensor": [lambda t: TwoTensor(t, t.clone())] * 2,
    "plain": [lambda t: t] * 2,
    "both": [WrapperSubclass, lambda t: t],
}


def lists(kind: str, requires_grad: bool) -> list[list[torch.Tensor]]:
    torch.manual_seed(seeded(0))
    data = [[torch.rand(2, 2, dtype=torch.float64) * 0.8 + 0.1 for _ in range(2)] for _ in range(3)]
    return [[make(t).requires_grad_(requires_grad) for make, t in zip(KINDS[kind], several, strict=True)] for several in data]


def opened(t: torch.Tensor | None) -> Any:
    return (type(t), t.a) if isinstance(t, TwoTensor | WrapperSubclass) else t if t is None else (type(t), t.detach())


def results(f: Callable, kind: str, requires_grad: bool) -> list:
    given = lists(kind, requires_grad)
    found = f(*given)
    flat = [t for several in given for t in several]
    if requires_grad:
        one = sum((t.sum() for t in found if type(t) is type(found[0])), torch.zeros((), dtype=torch.float64))
        one.backward(torch.ones_like(one))
    return [opened(t.detach()) for t in found] + [opened(t.grad if requires_grad else t) for t in flat]


def agree(found: list, expected: list, names: str) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None), names
        if want is not None:
            assert got[0] is want[0], names
            torch.testing.assert_close(got[1], want[1], msg=lambda m: f"{names}: {m}")


def check(several: list[tuple[str, Callable]], kind: str, requires_grad: bool = False) -> None:
    def f(written: list, others: list, more: list) -> list:
        return [t for _, call in several for t in call([x * 1 for x in written], others, more)]

    agree(
        results(thunder.jit(f, transforms=[SubclassTransform()]), kind, requires_grad),
        results(f, kind, requires_grad),
        ", ".join(name for name, _ in several),
    )


def has_derivative(call: Callable) -> bool:
    """Whether torch can differentiate an operator, and does not say that it cannot."""
    try:
        results(lambda written, others, more: call([x * 1 for x in written], others, more), "plain", True)
    except RuntimeError as e:
        assert "is not implemented" in str(e)
        return False
    return True


def test_values_are_eagers() -> None:
    check(CALLS, "both")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TwoTensor", "plain"])
def test_gradients_are_eagers(kind: str) -> None:
    several = [c for c in CALLS if has_derivative(c[1])]
    assert len(several) > len(CALLS) - 12
    drawn = part(name for name, _ in several)
    check([c for c in several if c[0] in drawn], kind, requires_grad=True)


def test_writes_are_seen_at_other_places_of_the_lists() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        a, b = x * 1, y * 1
        torch._foreach_add_([a, b, a], [b, a, b])
        torch._foreach_mul_([a[:1], b], 3.0)
        return [a, b]

    for kind in ("TwoTensor", "plain"):
        given = [several[0] for several in lists(kind, False)[:2]]
        found, expected = thunder.jit(f, transforms=[SubclassTransform()])(*given), f(*given)
        agree([opened(t) for t in found], [opened(t) for t in expected], kind)


@pytest.mark.parametrize("kind", ["TwoTensor", "plain"])
def test_under_no_grad_what_is_written_into_keeps_its_history(kind: str) -> None:
    def f(written: list, others: list, more: list) -> list:
        a, b = [x * 2 for x in written]
        with torch.no_grad():
            torch._foreach_mul_([a, b], others)
            a.add_(1)
            b += a
            torch.ops.aten.mul_.Tensor(b, 2)
        return [a * others[0], b * more[0]]

    agree(results(thunder.jit(f, transforms=[SubclassTransform()]), kind, True), results(f, kind, True), kind)
