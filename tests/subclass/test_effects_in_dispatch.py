"""Operators with effects that a class calls from inside of its ``__torch_dispatch__``, in the forward and in the backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.subclasses import OneTensor, assert_same
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import SubclassTransform
import thunder

heard: list[tuple[str, float]] = []


@torch.library.custom_op("effects_in_dispatch::log", mutates_args=())
def log(x: torch.Tensor, what: str) -> None:
    heard.append((what, round(x.double().sum().item(), 3)))


@log.register_fake
def _(x, what):
    return None


@torch.library.custom_op("effects_in_dispatch::look_", mutates_args={"x"})
def look_(x: torch.Tensor, what: str) -> None:
    heard.append((what, round(x.double().sum().item(), 3)))


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    heard.clear()
    yield


class Telling(OneTensor):
    """Says what it meets, from inside of its dispatch."""

    writes = False  # with an operator that may write into what it meets

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        own = [a.inner if isinstance(a, cls) else a for a in args]
        log(own[0], func.overloadpacket.__name__)
        if cls.writes:
            look_(own[0], func.overloadpacket.__name__)
        return cls(func(*own, **(kwargs or {})))


class Looking(Telling):
    writes = True


def program(x, p):
    return (x * p).sin().cos()


def forward(f, cls: type[Telling], requires_grad: bool) -> tuple[torch.Tensor, torch.Tensor, list]:
    heard.clear()
    x = cls(torch.ones(3)).requires_grad_(requires_grad)
    result = f(x, torch.full((3,), 2.0))
    return x, result, list(heard)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("cls", [Telling, Looking])
def test_a_forward_is_as_in_eager(cls: type[Telling], requires_grad: bool):
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    _, expected, said = forward(program, cls, requires_grad)
    for _ in range(2):
        _, result, found = forward(jitted, cls, requires_grad)
        assert_same(result.detach(), expected.detach())
        assert (found, result.requires_grad) == (said, requires_grad) and said
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def test_a_backward_that_only_reads_is_as_in_eager():
    found = []
    for f in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        x, result, _ = forward(f, Telling, True)
        heard.clear()
        result.backward(Telling(torch.ones(3)))
        found.append((x.grad.inner, list(heard)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[1][1] == found[0][1] and found[0][1]


def test_a_backward_that_would_write_into_what_the_forward_computed_is_refused_where_it_runs():
    _, result, _ = forward(thunder.jit(program, transforms=[SubclassTransform()]), Looking, True)
    with pytest.raises(UnsupportedOpError, match="look_.*in the backward"):
        result.backward(Looking(torch.ones(3)))
