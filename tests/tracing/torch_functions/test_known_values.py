"""Values that a program makes of numbers alone decide in a trace what they decide in eager mode; all others are refused as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform
import thunder

TRANSFORMS = (SubclassTransform, NormTransform)


def _elsewhere(x):
    """A mask is used where something else is written, and asked for."""
    mask, out = torch.ones(3, 4), torch.zeros(3, 4)
    out[0] = x[0] * mask[0]
    out.mul_(mask)
    return out * 2 if mask.all() else x


def _written(write):
    def f(x):
        mask = torch.ones(3)
        write(mask, x)
        return x * 2 if mask.all() else x

    return f


def _numbers_written(x):
    mask = torch.ones(2, 3)
    if (mask > 0).sum() == 6:
        mask[torch.arange(2) == 1] = -4.0
        mask[0].sum()
    return x * 2 if (mask > 0).sum().item() == 3 and not (mask + 3).any(1).all() else x


def _written_as_integers(x):
    count = torch.zeros(3, dtype=torch.int64)
    count.copy_(torch.full((3,), 2.7))
    return x * 2 if (count == 2).all() else x * 3


KNOWN = {
    "converted where it is written": _written_as_integers,
    "condition": lambda x: x * 2 if torch.ones(3).all() else x,
    "negated": lambda x: x * 2 if not torch.zeros(3).any() else x,
    "item": lambda x: x * 2 if (1 - torch.ones(2, 3)).flatten().any().item() else x * 3,
    "comparison": lambda x: x * 2 if (torch.zeros(2, 3).long() == 0).sum() > 2 else x,
    "integer": lambda x: x * int(torch.arange(4).max()),
    "number": lambda x: x * float(torch.tensor(2.5)) + torch.full((2,), 0.25)[-1].item(),
    "of the input's shape": lambda x: x * 2 if torch.ones_like(x).all() else x,
    "of the input's size": lambda x: x * int(torch.arange(x.shape[1]).sum()),
    "size": lambda x: x.view(torch.div(13, 4, rounding_mode="trunc"), 4),
    "slice": lambda x: x[:, : torch.div(5, 2, rounding_mode="trunc")],
    "triangle": lambda x: x * 2 if torch.tril(torch.ones(3, 3)).bool()[-1].all() else x * 3,
    "made alike": lambda x: x * 2 if torch.arange(3).new_ones((2,)).all() else x * 3,
    "written elsewhere": lambda x: _elsewhere(x),
    "multiplied in place": _written(lambda mask, x: mask.mul_(0)),
    "an entry set": _written(lambda mask, x: mask.__setitem__(0, 0)),
    "written into": lambda x: _numbers_written(x),
    "asked twice": lambda x: sum(x * i.item() for i in torch.arange(3)) if torch.arange(3)[2] == 2 else x,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", KNOWN)
def test_what_numbers_make_is_known(name, transform):
    f = KNOWN[name]
    jitted = thunder.jit(f, transforms=[transform()])
    for x in (torch.randn(3, 4), torch.randn(3, 4)):
        torch.testing.assert_close(jitted(x), f(x))
    assert thunder.cache_misses(jitted) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_what_numbers_make_is_known_beside_norms(name):
    torch.manual_seed(seeded(0))
    f, x = KNOWN[name], torch.randn(3, 4)
    found = thunder.jit(f, transforms=[NormTransform()])(RMSTensor.of(x))
    torch.testing.assert_close(found.backing, f(x))


def _read_by_a_view(x):
    mask = torch.ones(3)
    part = mask[:2]
    mask.copy_(torch.zeros(3))
    return x * 2 if part.all() else x


def _written_by_a_view_made_before(x):
    mask = torch.ones(3, 4)
    transposed = mask.t()
    mask.copy_(torch.full((3, 4), 0.25))
    transposed.mul_(-1)
    return x * 2 if (mask > 0).any() else x


def _diagonal_written(x):
    mask = torch.zeros(3, 3)
    mask.diagonal().copy_(x[:, 0])
    return x * 2 if mask.sum() > 0 else x


# not known of numbers alone, or not followed so far: the data of the call say it
OF_THE_DATA = {
    "read by a view": _read_by_a_view,
    "written by a view made before": _written_by_a_view_made_before,
    "a part of it written": _written(lambda mask, x: mask[0].zero_()),
    "a view of it written": _written(lambda mask, x: mask.unsqueeze(0).masked_fill_(torch.ones(1, 3).bool(), 0)),
    "written through a view, and read": _written(lambda mask, x: mask[:2].copy_(torch.zeros(2))),
    "its diagonal written": lambda x: _diagonal_written(x),
    "copied into": _written(lambda mask, x: mask.copy_(x[0, :3].detach())),
    "written without history": _written(lambda mask, x: mask.detach().zero_()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", OF_THE_DATA)
def test_what_else_is_written_into_them_decides_too(name, transform):
    torch.manual_seed(seeded(0))
    f = OF_THE_DATA[name]
    jitted = thunder.jit(f, transforms=[transform()])
    for x in (torch.randn(3, 4), torch.zeros(3, 4), torch.ones(3, 4)):
        torch.testing.assert_close(jitted(x), f(x))


@pytest.mark.parametrize("name", OF_THE_DATA)
def test_without_data_it_is_refused(name):
    with pytest.raises((UnsupportedOpError, DataDependentError)):
        thunder.jit(OF_THE_DATA[name], transforms=[SplitBiasTransform()])(torch.randn(3, 4))


UNKNOWN = {
    "random": lambda x: x * 2 if torch.rand(1) > 2 else x,
    "random integer": lambda x: x * 2 if torch.randint(0, 3, (2,))[0] > 9 else x,
    "random order": lambda x: x * 2 if torch.randperm(3)[0] > 9 else x,
    "drawn": lambda x: x * 2 if torch.multinomial(torch.ones(3), 1)[0] > 9 else x,
    "random, of torch": lambda x: x * 2 if torch.ops.aten.rand([2])[0] > 2 else x,
    "random entries": lambda x: x * 2 if F.gumbel_softmax(torch.ones(3))[0] > 2 else x,
    "unwritten": lambda x: x * 2 if torch.empty_like(x)[0, 0] == 0 else x,
    "unwritten, with strides": lambda x: x * 2 if torch.empty_strided((2,), (1,))[0] == 0 else x,
    "dropped": lambda x: x * 2 if F.dropout(torch.ones(3), 0.5).all() else x,
    "initialized": _written(lambda mask, x: torch.nn.init.uniform_(mask)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_all_other_values_are_refused(name, transform):
    with pytest.raises((UnsupportedOpError, DataDependentError)):
        thunder.jit(UNKNOWN[name], transforms=[transform()])(torch.randn(3, 4))
