"""Wrappers written into plain tensors of which the program has views: eager mode's values, gradients and memory, whatever was taken when.

Views of plain tensors are Thunder's until a wrapper is written into what has one; the program is then acquired once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

F64 = torch.float64


def _wrapped(*shape: int) -> WrapperSubclass:
    return WrapperSubclass(torch.randn(*shape, dtype=F64))


def _row_of_input(p: torch.Tensor, w: torch.Tensor) -> Any:
    p[0].copy_(w[1])
    return p * 2


def _view_before(p: torch.Tensor, w: torch.Tensor) -> Any:
    row, column = p[0], p.T[1]
    p.add_(w)
    return row * 2, column.sum(), p


def _write_into_view_of_view(p: torch.Tensor, w: torch.Tensor) -> Any:
    flat = p.view(-1)
    flat.narrow(0, 1, 3).mul_(w[0])
    return flat + 1, p.exp()


def _rows(p: torch.Tensor, w: torch.Tensor) -> Any:
    for i, row in enumerate(p):
        row.sub_(w[i]).mul_(i + 2)
    return p.sin()


def _parts(p: torch.Tensor, w: torch.Tensor) -> Any:
    first, second = p.chunk(2, dim=1)
    first.copy_(w[:, : first.shape[1]])
    second.add_(first[:, :1])
    return p @ p.mT


def _out(p: torch.Tensor, w: torch.Tensor) -> Any:
    held = p.detach()
    torch.mul(held, w, out=held)
    return p * 2, held


def _made_inside(p: torch.Tensor, w: torch.Tensor) -> Any:
    table = torch.zeros(3, 3, dtype=F64)
    table[1].copy_(w[0])
    table.diagonal().add_(w[2])
    return table + p


def _computed(p: torch.Tensor, w: torch.Tensor) -> Any:
    q = p * 3
    q[:, 0].mul_(w[:, 1])
    q.unsqueeze(0)[0, 2].clamp_(min=w[2])
    return q.cos() + p


def _masked(p: torch.Tensor, w: torch.Tensor) -> Any:
    rows = p[:2]
    rows.masked_fill_(rows > 0, 0.5)
    rows.copy_(w[1:])
    return rows, p


def _reshaped(p: torch.Tensor, w: torch.Tensor) -> Any:
    folded = p.reshape(3, 1, 3).squeeze(1).expand(3, 3)
    folded.add_(w)
    return folded, p.flatten()


PROGRAMS = [
    _row_of_input,
    _view_before,
    _write_into_view_of_view,
    _rows,
    _parts,
    _out,
    _made_inside,
    _computed,
    _masked,
    _reshaped,
]


def _agrees(program: Callable, make: Callable[[], tuple], around: Callable = torch.no_grad) -> None:
    def called(f: Callable) -> Any:
        torch.manual_seed(seeded(0))
        given = make()
        with around():
            results = f(*given)
        return results, given

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    want = called(program)
    for _ in range(2):
        assert_same(called(jitted), want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_views_of_plain_tensors_and_wrappers_in_one_memory(program: Callable, around: Callable):
    _agrees(program, lambda: (torch.randn(3, 3, dtype=F64), _wrapped(3, 3)), around)


@pytest.mark.parametrize("program", [f for f in PROGRAMS if f is not _write_into_view_of_view], ids=lambda f: f.__name__)
def test_the_input_is_no_contiguous_tensor(program: Callable):
    """``reshape`` of it copies, and ``view`` is an error."""
    _agrees(program, lambda: (torch.randn(3, 6, dtype=F64).T[::2], _wrapped(3, 3)))


DIFFERENTIATED = [_made_inside, _computed]


@pytest.mark.parametrize("of_wrapper", [False, True])
@pytest.mark.parametrize("program", DIFFERENTIATED, ids=lambda f: f.__name__)
def test_gradients_through_what_was_written(program: Callable, of_wrapper: bool):
    def gradients(f: Callable) -> Any:
        torch.manual_seed(seeded(0))
        p, w = torch.randn(3, 3, dtype=F64, requires_grad=True), _wrapped(3, 3).requires_grad_(of_wrapper)
        result = f(p, w)
        return torch.autograd.grad((result * result).sum(), (p, w) if of_wrapper else p)

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    want = gradients(program)
    for _ in range(2):
        assert_same(gradients(jitted), want)


def test_a_leaf_is_written_into_beside_wrappers_that_require_grad():
    def program(x: torch.Tensor, p: torch.Tensor) -> Any:
        with torch.no_grad():
            p.fill_(2.0)
            p[0].mul_(3)
        return x.chunk(2)[0] * p[0]

    def called(f: Callable) -> Any:
        torch.manual_seed(seeded(0))
        w = TwoTensor(torch.randn(2, 3), torch.randn(2, 3)).requires_grad_()
        p = torch.randn(2, 3).requires_grad_()
        result = f(w * 1, p)
        return result.detach(), p.detach(), torch.autograd.grad(result.sum(), (w, p))

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    want = called(program)
    for _ in range(2):
        assert_same(called(jitted), want)


def test_a_part_of_a_wrapper_becomes_another_view_in_place():
    def program(x: torch.Tensor) -> Any:
        part = x.split(1)[1]
        part.t_()
        part.mul_(2)
        return part, x + 1

    _agrees(program, lambda: (WrapperSubclass(TwoTensor(torch.randn(2, 3), torch.randn(2, 3))),))


@torch.library.custom_op("thunder_norm_followed::double_", mutates_args=("x",))
def _double(x: torch.Tensor) -> None:
    x.mul_(2)


def test_operators_of_the_user_write_into_views_of_plain_tensors():
    def program(p: torch.Tensor) -> Any:
        row = p[0]
        _double(row)
        p[1].add_(row)
        _double(p)
        return row * 1, p.T[0] + 1

    _agrees(program, lambda: (torch.randn(2, 3, dtype=F64),))
