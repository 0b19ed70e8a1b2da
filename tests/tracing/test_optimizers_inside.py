"""Objects of libraries that hold what is the program's, optimizers above all: a program that puts something into them leaves what eager mode leaves."""

from __future__ import annotations

import argparse
import collections
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.transforms import SubclassTransform
import thunder

KINDS = {
    "plain": lambda: torch.randn(3),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "wrapper": lambda: TwoTensor(torch.randn(3), torch.randn(3)),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
}


def _jit(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_torchs_optimizers_are_eagers(name, kind):
    """Their bias corrections are numbers in eager mode, and in a trace tensors of float64."""

    def outcome(jit: Callable) -> Any:
        torch.manual_seed(seeded(0))
        parameters = [nn.Parameter(KINDS[kind]()), nn.Parameter(torch.randn(2))]
        optimizer = OPTIMIZERS[name](parameters)

        jitted, found = jit(lambda: optimizer.step()), []
        for i in range(3):
            for p in parameters:
                p.grad = p.detach() * (1.0 + i)
            jitted()
            inner = [t for p in parameters for t in (getattr(p, "a", p), getattr(p, "b", p))]
            states = [s.a if isinstance(s, TwoTensor) else s for p in parameters for s in optimizer.state[p].values()]
            found.append([t.detach().clone() for t in (*inner, *states)])
        return found

    torch.testing.assert_close(outcome(_jit), outcome(lambda f: f))


def test_schedulers_and_groups_are_written():
    def outcome(jit: Callable) -> Any:
        p = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([p], 0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def step(x):
            optimizer.zero_grad()
            p.grad = x * p.detach()
            optimizer.step()
            scheduler.step()
            return x * 2

        jitted = jit(step)
        return [
            (jitted(torch.ones(3)), p.detach().clone(), optimizer.param_groups[0]["lr"], scheduler.last_epoch) for _ in range(3)
        ]

    assert_same(outcome(_jit), outcome(lambda f: f))


def _put(o: Any, x: torch.Tensor) -> None:
    o["last"] = o.get("last", 0) + x


def _set(o: Any, x: torch.Tensor) -> None:
    o.kept.append(x * 2)


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (collections.UserDict, _put),
        (lambda: collections.ChainMap({}), _put),
        (collections.UserList, lambda o, x: o.append(x * 2)),
        (lambda: argparse.Namespace(kept=[]), _set),
        (lambda: _with_list(threading.local()), _set),
        (lambda: _with_list(torch.distributions.Normal(0.0, 1.0)), _set),
    ],
    ids=["UserDict", "ChainMap", "UserList", "Namespace", "local", "distribution"],
)
def test_what_a_program_puts_into_objects_of_libraries_is_there_after_each_call(make, write):
    def outcome(jit: Callable) -> Any:
        o = make()

        def f(x):
            write(o, x)
            return x * 1

        jitted = jit(f)
        return [(jitted(torch.full((2,), float(i))), _tensors(o)) for i in range(3)]

    assert_same(outcome(_jit), outcome(lambda f: f))


def _with_list(o: Any) -> Any:
    o.kept = []
    return o


def _tensors(o: Any) -> list[torch.Tensor]:
    held = o if isinstance(o, collections.UserList) else o.kept if hasattr(o, "kept") else o.values()
    return [t.clone() for t in held]


def _read_elsewhere(p, other, x):
    p.grad, p.note = x * 1, x + 1
    return other.grad * 2, other.note


def _set_elsewhere(p, other, x):
    other.grad = x * 1
    p.grad = p.grad * 2
    return other.grad + 1


def _taken_away(p, other, x):
    other.grad = x * 1
    p.grad = None
    return x * 2 if other.grad is None else x


@pytest.mark.parametrize("program", [_read_elsewhere, _set_elsewhere, _taken_away])
@pytest.mark.parametrize("make", [nn.Parameter, lambda t: t], ids=["parameter", "tensor"])
def test_what_is_set_of_a_tensor_is_there_at_each_place_that_it_is_given_at(program, make):
    known: dict[str, Any] = {}
    jitted = _jit(lambda p, x: program(p, known["other"], x))
    for is_one in (True, True, False, True):
        results = []
        for call in (jitted, lambda p, x: program(p, known["other"], x)):
            p, second = make(torch.ones(3)), make(torch.zeros(3))
            second.grad, second.note = torch.full((3,), 5.0), torch.full((3,), 6.0)
            p.grad = torch.full((3,), 7.0)
            known["other"] = p if is_one else second
            results.append((call(p, torch.ones(3)), p.grad, second.grad))
        assert_same(*results)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_whole_steps_of_training_are_eagers(name, is_tied):
    """A parameter has a name in the module and one in the optimizer; clipping and the step write into it by the second alone."""

    def outcome(jit: Callable) -> Any:
        torch.manual_seed(seeded(0))
        net = _tied() if is_tied else nn.Linear(3, 3).double()
        optimizer = OPTIMIZERS[name](net.parameters())

        def step(x):
            loss = net(x).square().mean()
            for p, g in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p.grad = g
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), norm, net(x).detach()

        jitted, found = jit(step), []
        for _ in range(3):
            found += [*jitted(torch.randn(4, 3, dtype=torch.float64)), *(p.detach().clone() for p in net.parameters())]
        return found

    for found, wanted in zip(outcome(_jit), outcome(lambda f: f), strict=True):
        torch.testing.assert_close(found, wanted)
