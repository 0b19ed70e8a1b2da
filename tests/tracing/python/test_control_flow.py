"""Python's control flow in traced programs: on shapes and metadata as written, on values refused with the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    profile,
)
import thunder
from thunder.core.transform_common import Transform

TRANSFORMS: dict[str, Callable[[], list[Transform]]] = {
    "split": lambda: [SplitBiasTransform()],
    "norm": lambda: [NormTransform()],
    "profile": lambda: [ProfileTransform()],
    "checkpoint": lambda: [CheckpointTransform()],
}


class TwoBranches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            return x * 2 + 1
        return x - 5


def loop(x: torch.Tensor, times: int = 2, *, scale: float | None = None) -> torch.Tensor:
    total = torch.zeros_like(x[0])
    for i in range(x.shape[0]):
        total = total + x[i] * (i + 1)
    for _ in range(times):
        total = total.sin()
    return total if scale is None else total * scale


def metadata(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 4 and x.size(-1) % 2 == 0:
        return x.sum(-1)
    while x.ndim > 1 and x.numel() > 3:
        x = x.flatten()[: x.numel() // 2]
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("transforms", TRANSFORMS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 4)])
def test_both_branches_on_dim(transforms: str, shape: tuple[int, ...]) -> None:
    model = TwoBranches()
    jm = thunder.jit(model, transforms=TRANSFORMS[transforms]())
    for s in ((2, 3, 4), (2, 4), shape):
        x = torch.randn(s)
        torch.testing.assert_close(jm(x), model(x))
    assert thunder.cache_misses(jm) == 2
    meta = jm(torch.empty(shape, device="meta"))
    assert meta.device.type == "meta" and meta.shape == shape
    names = {b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols}
    assert ("mul" in names) == (len(shape) == 3) and ("sub" in names) == (len(shape) == 2)


def test_loops_over_sizes_and_concrete_arguments() -> None:
    jf = thunder.jit(loop, transforms=[SplitBiasTransform()])
    for shape, args, kwargs in (((3, 2), (1,), {}), ((2, 2), (), {"scale": 0.5})):
        x = torch.randn(shape)
        torch.testing.assert_close(jf(x, *args, **kwargs), loop(x, *args, **kwargs))
        times = [b.sym.name for b in thunder.last_traces(jf)[0].bound_symbols].count("sin")
        assert times == (args[0] if args else kwargs.get("times", 2))  # defaults are concrete
    assert jf(torch.empty(4, 2, device="meta"), 1).shape == (2,)


@pytest.mark.parametrize("shape", [(6, 4), (6, 3), (2, 2), (3,)])
def test_metadata(shape: tuple[int, ...]) -> None:
    jf = thunder.jit(metadata, transforms=[SplitBiasTransform()])
    for x in (torch.randn(shape), torch.ones(shape, dtype=torch.int64)):
        found, expected = jf(x), metadata(x)
        torch.testing.assert_close(found, expected)
        assert found.dtype == expected.dtype


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'y'$"):
        thunder.jit(TwoBranches(), transforms=[SplitBiasTransform()])(torch.empty(2, device="meta"), y=1)


@pytest.mark.parametrize("kind", [TwoTensor, RMSTensor])
def test_branches_on_metadata_of_wrappers(kind: type) -> None:
    x = torch.randn(2, 3, 4)
    wrapped = TwoTensor(x, 2 * x) if kind is TwoTensor else RMSTensor.of(x)
    transform = SubclassTransform() if kind is TwoTensor else NormTransform()
    found = thunder.jit(TwoBranches(), transforms=[transform])(wrapped)
    torch.testing.assert_close(found.a if kind is TwoTensor else found.backing, x * 2 + 1)


def _while(x):
    while (x < 3).all():
        x = x + 1
    return x


def _assert(x):
    assert x.min() > 0
    return x


ON_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "and": lambda x: x[0] > 0 and x[1] > 0,
    "not": lambda x: not x[0],
    "while": _while,
    "assert": _assert,
    "int": lambda x: x + int(x.sum()),
    "float": lambda x: x + float(x.sum()),
    "range": lambda x: [x * i for i in range(x.sum().long().item())],
    "item compared": lambda x: x if x.sum().item() > 0 else -x,
    "item compared from the right": lambda x: x if 0 < x.sum().item() else -x,
    "item within a condition": lambda x: x if (x.sum().item() > 0) is True or x.sum().item() == 2 else -x,
    "max": lambda x: max(x[0], x[1]),
    "max of numbers": lambda x: x * max(x.sum().item(), 1),
    "sorted": lambda x: sorted([x[0], x[1]])[0],
    "all": lambda x: all([x[0] > 0]),
    "any": lambda x: any([x[0] > 0]),
    "index of a list": lambda x: [1, 2, 3][x.argmax()],
    "index of a tuple": lambda x: (1, 2, 3)[x.argmax()],
    "index of a text": lambda x: ord("abc"[x.argmax()]),
    "index of bytes": lambda x: b"abc"[x.argmax()] + range(3, 6)[x.argmax()],
    "length of bytes": lambda x: len(bytes(x.argmax())) + len(bytearray(x.argmax())),
    "mask": lambda x: x[x > 0],
    "slice": lambda x: x[: x.argmax()],
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "where": lambda x: torch.where(x > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "a ufunc": lambda x: np.add(x, x),
    "equal": lambda x: x if torch.equal(x, x + 1) else -x,
    "allclose": lambda x: x if torch.allclose(x, x + 1) else -x,
    "alpha": lambda x: torch.add(x, x, alpha=x.max().item()),
}


# which no transform follows; the others are followed with those that interpret wrappers: tests/tracing/torch_functions/test_read_values.py
NEVER_KNOWN = ("sorted", "numpy", "a ufunc")


@pytest.mark.parametrize("name", ON_VALUES)
def test_branches_on_values_are_refused_with_the_line(name: str) -> None:
    known = set() if name in NEVER_KNOWN else {"norm"}
    possible = [transforms for transforms in TRANSFORMS if transforms not in known]
    f, transforms = ON_VALUES[name], possible[len(name) % len(possible)]
    with pytest.raises(DataDependentError) as caught:
        thunder.jit(lambda x: f(x), transforms=TRANSFORMS[transforms]())(torch.tensor([1.0, 2.0, 0.5]))
    line = caught.value.args[0].split(f"{__file__}:")[1]
    first = f.__code__.co_firstlineno
    assert first <= int(line.split(":")[0]) < first + len(inspect.getsource(f).splitlines())


@pytest.mark.parametrize("target", ["eager", "trace"])
def test_profiles_of_branches_on_values_are_refused_with_the_line(target: str) -> None:
    for name in ("if", "item within a condition", "alpha"):
        with pytest.raises((DataDependentError, UnsupportedOpError), match="test_control_flow.py"):
            profile(ON_VALUES[name], torch.ones(3), target=target)


def test_values_that_decide_nothing_are_fine() -> None:
    def f(x):
        return x * x.sum().item() + abs(x.max().item()) ** 2, x[x.argmax()], torch.where(x > 1, x, -x)

    jf = thunder.jit(f, transforms=[SplitBiasTransform()])
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, -2.0])):
        for found, expected in zip(jf(x), f(x), strict=True):
            torch.testing.assert_close(found, expected)


def test_jits_without_our_transforms_are_as_before() -> None:
    with pytest.raises(NotImplementedError) as caught:
        thunder.jit(lambda x: x if x.sum() > 0 else -x)(torch.ones(3))
    assert not isinstance(caught.value, DataDependentError)
