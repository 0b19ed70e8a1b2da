"""Results of classes derived from torch.Tensor without a ``__torch_dispatch__``: a program is told their class, and has its methods, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchvision import tv_tensors

from tests.seeds import crossed, seeded
from thunder_norm.errors import UnsupportedSubclassError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder


class Simple(torch.Tensor):
    tag = "class"

    def double(self):  # torch's converts to float64
        return self * 4

    def who(self):
        return self.tag

    @property
    def total(self):
        return self.sum() * 2


class Derived(Simple):
    def double(self):
        return self * 5


class Tagged(Simple):
    """Hands its tag on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, cls):
            found.tag = next((a.tag for a in args if isinstance(a, cls)), None)
        return found


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 2 if func is torch.add else found


def set_on_a_result(x):
    y = x * 1
    y.tag = "set"
    return x * (2 if y.tag == "set" else 3)


def set_on_the_input(x):
    x.tag = "set"
    return x * (2 if x.tag == "set" else 3)


def written_into(x):
    y = x.clone()
    y[0] = 5
    y += 1
    return y.double()


PROGRAMS: dict[str, Callable] = {
    "type": lambda x: x * (2 if type(x * 1) is type(x) else 3),
    "isinstance": lambda x: x * 2 if isinstance(x.sum(), Simple) else x * 3,
    "hasattr": lambda x: x * (2 if hasattr(x * 1, "who") else 3),
    "class attribute": lambda x: x * (2 if (x * 1).who() == "class" else 3),
    "property": lambda x: (x + 1).total * x,
    "method": lambda x: (x + 1).double().double(),
    "of a plain tensor": lambda x: torch.ones(3, 3).double().float() * x,
    "of a function of torch's": lambda x: torch.cat([x, torch.ones(3, 3)]).double(),
    "of rows": lambda x: [r.double() for r in x.unbind(0)][0],
    "of layers": lambda x: F.linear(F.layer_norm(x, (3,)), torch.ones(3, 3)).double(),
    "of views": lambda x: (x.flatten().double(), x[None].double(), x[0].double(), x[:, 1].double()),
    "of a comparison": lambda x: torch.where(x > 0, x, 0).double(),
    "of what is made like it": lambda x: x.new_ones(3, 3).double() + torch.zeros_like(x).double(),
    "set on a result": set_on_a_result,
    "set on the input": set_on_the_input,
    "written into": written_into,
}
OF_SIMPLE: dict[str, Callable] = {
    "softmax": lambda x: F.softmax(x, -1).double(),
    "maxima": lambda x: x.max(-1).values.double(),
    "converted": lambda x: x.to(torch.float64).double(),
    "transposed": lambda x: (x.mT.double(), x.T.double()),
    "detached": lambda x: (x.detach().double(), x.data.double()),
}


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, expected)), strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(a.as_subclass(torch.Tensor), b.as_subclass(torch.Tensor))


def given(cls: type) -> torch.Tensor:
    torch.manual_seed(seeded(0))
    return torch.randn(3, 3).as_subclass(cls)


def check(program: Callable, cls: type, transform: type = SubclassTransform) -> None:
    jitted = thunder.jit(program, transforms=[transform()])
    for _ in range(2):
        compare(jitted(given(cls)), program(given(cls)))


@pytest.mark.parametrize(
    ("name", "cls", "transform"),
    crossed(PROGRAMS, [Simple, Derived, Tagged], [SubclassTransform, NormTransform, CheckpointTransform]),
)
def test_results_are_of_the_class(name: str, cls: type, transform: type):
    check(PROGRAMS[name], cls, transform)


@pytest.mark.parametrize(("name", "cls"), crossed(OF_SIMPLE, [Simple, Derived]))
def test_results_of_torchs_own_rule(name: str, cls: type):
    check(OF_SIMPLE[name], cls)


@pytest.mark.parametrize(
    "program",
    [lambda x: F.softmax(x, -1).double(), lambda x: torch.func.vmap(lambda t: t * 2)(x).double()],
    ids=["tried", "mapped"],
)
def test_where_it_is_not_known_it_is_refused(program: Callable):
    with pytest.raises(
        UnsupportedSubclassError, match=r"of which class a result of a Tagged is(.|\n)*test_results_of_classes.py"
    ):
        thunder.jit(program, transforms=[SubclassTransform()])(given(Tagged))


def test_in_place_and_out_of_place_are_one_operation_of_a_trace():
    with pytest.raises(UnsupportedSubclassError, match="__torch_function__ of its own"):
        thunder.jit(lambda x: (x * 1).add_(2), transforms=[SubclassTransform()])(given(Doubling))


def test_another_class_is_another_trace():
    def program(x):
        return (x + 1).double() if isinstance(x + 1, Simple) else x - 1

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for cls in (Simple, Derived, torch.Tensor, Simple, Tagged):
        compare(jitted(given(cls)), program(given(cls)))


@pytest.mark.parametrize("cls", [Simple, Tagged])
def test_what_an_input_has_of_its_own(cls: type):
    def program(x):
        return x * (x.note if hasattr(x, "note") else 2) * (2 if x.tag == "class" else 3)

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for own in ({}, {"note": 3.0}, {"tag": "own"}, {"note": 4.0, "tag": "own"}, {}, {"note": 3.0}):
        results = []
        for f in (jitted, program):
            x = given(cls)
            x.__dict__.update(own)
            results.append(f(x))
        compare(*results)


def test_images():
    image = tv_tensors.Image(torch.rand(3, 4, 4))

    def program(x):
        return x * (2 if isinstance(x * 1, tv_tensors.Image) else 3), type(x + 1) is torch.Tensor

    found, expected = thunder.jit(program, transforms=[SubclassTransform()])(image), program(image)
    torch.testing.assert_close(found, expected)
