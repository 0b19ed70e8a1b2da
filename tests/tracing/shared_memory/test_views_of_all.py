"""Views of all entries of an input, and of its diagonal: objects of their own, in its memory, and copies in their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.seeds import crossed, seeded
from thunder_norm.executors import inductor
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:],
    "slices": lambda x: x[0:3, :],
    "ellipsis": lambda x: x[...],
    "view": lambda x: x.view(3, 3),
    "view_as": lambda x: x.view_as(x),
    "reshape": lambda x: x.reshape(3, -1),
    "reshape_as": lambda x: x.reshape_as(x),
    "unflatten": lambda x: x.unflatten(0, (3,)),
    "permute": lambda x: x.permute(0, 1),
    "transpose": lambda x: x.transpose(1, 1),
    "movedim": lambda x: x.movedim(0, 0),
    "flip": lambda x: x.flip(()),
    "view of a view": lambda x: x[:].view(3, 3)[...],
    "handed on": lambda x: x.view(3, 3).float().contiguous(),
    "the same tensor": lambda x: x.contiguous().to(torch.float32),
    "diagonal": lambda x: x.diagonal(),
    "diagonal above": lambda x: torch.diagonal(x, 1),
    "diagonal below, of other dims": lambda x: x.diagonal(-1, dim1=-1, dim2=-2),
    "diagonal of a part": lambda x: x[:, 1:].diagonal(),
    "einsum": lambda x: torch.einsum("ij->ij", x),
    "einsum without a result": lambda x: torch.einsum("i j", [x]),
    "einsum of a transpose": lambda x: torch.einsum("ji", x),
    "einsum of all": lambda x: torch.einsum("...", x),
    "einsum of a diagonal": lambda x: torch.einsum("ii->i", x),
    "einsum of a transpose, the rest": lambda x: torch.einsum("i...->...i", x),
    "no diagonal": lambda x: x.diagonal(7),
}
KINDS = {"plain": (False, True), "leaf": (True, True), "result": (True, False)}


def made(kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    requires_grad, is_leaf = KINDS[kind]
    x = torch.arange(9, dtype=dtype).reshape(3, 3).requires_grad_(requires_grad)
    return x if is_leaf else x * 1


def known(y: torch.Tensor, x: torch.Tensor) -> dict[str, object]:
    shares = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    place = y.storage_offset() if y.numel() else None
    return {"same": y is x, "leaf": y.is_leaf, "grad": y.requires_grad, "shares": shares, "strides": y.stride(), "place": place}


@pytest.mark.parametrize(
    ("name", "kind", "transform"), crossed(PROGRAMS, KINDS, [NormTransform, SubclassTransform, CheckpointTransform])
)
def test_they_are_what_they_are_in_eager_mode(name: str, kind: str, transform: type) -> None:
    jitted = thunder.jit(PROGRAMS[name], transforms=[transform()])
    for _ in range(3):
        found, expected = [], []
        for f, into in ((jitted, found), (PROGRAMS[name], expected)):
            x = made(kind)
            y = f(x)
            into.append(known(y, x))
            with torch.no_grad():
                y.mul_(-2)
            into.append(x.tolist())
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_fusing_executor_leaves_them_so(kind: str) -> None:
    for program in PROGRAMS.values():
        jitted = thunder.jit(program, transforms=[NormTransform()], executors=[inductor])
        found, expected = (known(f(x), x) for f, x in ((jitted, made(kind)), (program, made(kind))))
        assert found == expected


@pytest.mark.parametrize(("name", "dtype"), crossed(PROGRAMS, [torch.float32, torch.float64, torch.complex64]))
def test_their_gradients_are_eager_modes(name: str, dtype: torch.dtype) -> None:
    if name in ("handed on", "the same tensor") and dtype.is_complex:
        pytest.skip("they are cast to real numbers")

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = PROGRAMS[name](x)
        return y, y * y.sin() + PROGRAMS[name](x * 3)

    generator = torch.Generator().manual_seed(seeded())
    x = torch.randn(3, 3, dtype=dtype, generator=generator)
    jitted = thunder.jit(program, transforms=[NormTransform()])
    grads = []
    for f in (jitted, program):
        leaf = x.clone().requires_grad_()
        y, z = f(leaf)
        grads.append(torch.autograd.grad((y * 2).abs().sum() + z.abs().square().sum(), leaf)[0])
    torch.testing.assert_close(*grads)
