"""`as_strided` of normed tensors: torch's values, a bound that holds; or a refusal."""

from __future__ import annotations

import random

import pytest
import torch

from tests.seeds import seeded
from thunder_norm import LinfTensor, RMSTensor
from thunder_norm.errors import NormMismatchError, UnsupportedOpError
from thunder_norm.transforms import NormTransform
import thunder


def check(found, wanted):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.backing, wanted)
    assert type(found).of(wanted, found.elem_dims).norm_size <= found.norm_size * (1 + 1e-5)


def windows(x):
    """Of 8 positions four at a time, every second, as Longformer cuts them from chunks."""
    y = x.reshape(2, 2, 4, 3)
    return y.as_strided((2, 3, 4, 3), (24, 6, 3, 1))


PROGRAMS = {
    "windows": windows,
    "of a transposed tensor": lambda x: windows(x.transpose(0, 1).contiguous().transpose(0, 1).contiguous()),
    "of chunks of a transposed tensor": lambda x: x.transpose(0, 1).reshape(2, 4, 2, 3).as_strided((2, 3, 4, 3), (3, 12, 6, 1)),
    "diagonal": lambda x: x[0, :3].as_strided((3,), (4,)),
    "every other": lambda x: x.as_strided((2, 4, 3), (24, 6, 1)),
    "repeated": lambda x: x.as_strided((2, 5, 3), (24, 0, 1)),
    "transposed": lambda x: x.as_strided((3, 1, 8, 2), (1, 7, 3, 24)),
    "one entry": lambda x: x.as_strided((), ()),
}


@pytest.mark.parametrize("elem_dims", [(-1,), (-2, -1), (-3,), ()])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_windows_slices_and_repetitions(name, elem_dims):
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 8, 3)
    check(PROGRAMS[name](RMSTensor.of(x, elem_dims)), PROGRAMS[name](x))


def test_windows_along_other_dimensions_cost_nothing():
    assert windows(RMSTensor(2.0, backing=torch.zeros(2, 8, 3))).norm_size == 2


def test_in_a_trace():
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 8, 3)
    check(thunder.jit(windows, transforms=[NormTransform()])(RMSTensor.of(x)), windows(x))


def test_windows_that_are_written_into():
    """Refused while somebody holds all of them, which overlap; one of them alone is a part."""
    torch.manual_seed(seeded(0))
    x = torch.randn(2, 8, 3)
    cut = lambda y: y.as_strided((2, 3, 4, 3), (24, 6, 3, 1))  # noqa: E731
    y, wanted = RMSTensor.of(x) * 1, x.clone()
    held = cut(y)
    with pytest.raises(UnsupportedOpError, match="shares its storage"):
        held[:, 1].mul_(3)
    check(held, cut(wanted))
    del held
    cut(y)[:, 1].mul_(3)
    cut(wanted)[:, 1].mul_(3)
    check(y, wanted)


def test_a_tensor_does_not_become_a_view_of_its_memory():
    with pytest.raises(UnsupportedOpError, match="out-of-place"):
        (RMSTensor.of(torch.ones(2, 3)) * 1).as_strided_((3,), (1,))


@pytest.mark.parametrize("where", ["eager", "trace"])
def test_an_offset_is_one_in_memory(where):
    """Not one of the tensor, which may be a part of something larger."""
    whole = torch.arange(40.0)
    x = whole[20:].view(4, 5)[:, 1:4]
    assert torch.equal(RMSTensor.of(x).as_strided((4, 3), (5, 1), x.storage_offset()).backing, x)
    for offset in (0, 1, x.storage_offset() + 1):
        f = lambda x, offset=offset: x.as_strided((2, 2), (1, 1), offset)  # noqa: E731
        with pytest.raises(NormMismatchError):
            (f if where == "eager" else thunder.jit(f, transforms=[NormTransform()]))(RMSTensor.of(x))


@pytest.mark.parametrize("number", range(40))
def test_any_strides_are_right_or_refused(number):
    pick = random.Random(seeded(number))
    torch.manual_seed(seeded(number))
    shape = [pick.randint(1, 4) for _ in range(pick.randint(1, 4))]
    x = torch.randn(shape).permute(pick.sample(range(len(shape)), len(shape)))[pick.choice([..., slice(None, None, 2)])]
    room = x.untyped_storage().size() // 4 - x.storage_offset()
    size = [pick.randint(1, 3) for _ in range(pick.randint(1, 3))]
    stride = [pick.choice([0, 1, *x.stride(), 2]) for _ in size]
    if sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= room:
        return
    given = LinfTensor.of(x) if number % 2 else RMSTensor.of(x)
    try:
        found = given.as_strided(size, stride)
    except NormMismatchError:
        return
    check(found, x.as_strided(size, stride))
