"""Views of results whose dimensions eager mode has in the usual order in memory, whatever the operation's input has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import crossed, seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

# what torch's kernels give a layout of their own, of a tensor whose dimensions are in another order
RESULTS = {
    "repeat": lambda x: x[None].repeat(2, 1, 1, 1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "tril": lambda x: x.tril(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "weight norm": lambda x: torch._weight_norm(x, x.norm(dim=(1, 2), keepdim=True), 0),
}
ORDERS = {"permuted": (2, 0, 1), "transposed": (0, 2, 1), "reversed": (2, 1, 0)}


@pytest.mark.parametrize(("name", "transform"), crossed(RESULTS, [NormTransform, SubclassTransform, CheckpointTransform]))
def test_what_eager_mode_views_is_viewed(name: str, transform: type) -> None:
    torch.manual_seed(seeded(0))
    for order in ORDERS.values():

        def program(x: torch.Tensor, order: tuple[int, ...] = order) -> tuple[torch.Tensor, torch.Tensor]:
            y = RESULTS[name](x.permute(order))
            return y.view(-1), y.view(y.shape[0], -1).sin()

        jitted = thunder.jit(program, transforms=[transform()])
        x = torch.randn(4, 5, 3)
        for requires_grad in (False, True):
            ours, eager = (x.clone().requires_grad_(requires_grad) for _ in range(2))
            found, expected = jitted(ours), program(eager)
            torch.testing.assert_close(found, expected)
            if requires_grad:
                for results in (found, expected):
                    torch.autograd.backward(results, [torch.ones_like(r) for r in results])
                torch.testing.assert_close(ours.grad, eager.grad)


def test_what_eager_mode_cannot_view_of_an_input_is_refused() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        thunder.jit(lambda x: x.t().view(-1), transforms=[NormTransform()])(torch.randn(3, 4))


# without what Thunder has in parts, of which the strides are refused
LAYOUTS = {
    **{name: f for name, f in RESULTS.items() if name != "weight norm"},
    "compared": lambda x: (x > 0) * torch.where(x >= 0.5, x, 1.0),
    "iterated": lambda x: list(x[None])[0],
    "exp": lambda x: x.exp(),
    "max_pool1d": lambda x: F.max_pool1d(x, 2),
    "einsum": lambda x: torch.einsum("bij,bkj->bki", x, x),
    "rand_like": lambda x: torch.empty_like(x).uniform_(),
}


@pytest.mark.parametrize(("name", "requires_grad"), crossed(LAYOUTS, [False, True]))
def test_how_results_lie_in_memory_is_known(name: str, requires_grad: bool) -> None:
    def program(x: torch.Tensor) -> tuple:
        y = LAYOUTS[name](x)
        taken = y.as_strided((2, 2), (1, 3), 1)
        return y.stride(), y.stride(0), y.is_contiguous(), taken, taken.sin().sum() if y.is_contiguous() else 2 * y.sum()

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    torch.manual_seed(seeded(0))
    x = torch.randn(4, 5, 3)
    for order in ((0, 1, 2), *ORDERS.values(), (0, 1, 2)):
        found = []
        for f in (jitted, program):
            torch.manual_seed(seeded(1))
            found.append(f(x.permute(order).detach().requires_grad_(requires_grad)))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "taken", [torch.as_strided_copy, lambda y, *place: torch.as_strided_scatter(y, y[0, 0, 0].expand(2, 2), *place)]
)
def test_copies_by_place_are_of_what_lies_as_in_eager_mode(taken: Callable) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return taken(F.rms_norm(x.transpose(1, 2), (5,)) * 2, (2, 2), (1, 3), 1)

    x = torch.arange(60.0).reshape(4, 5, 3)
    torch.testing.assert_close(thunder.jit(program, transforms=[SubclassTransform()])(x), program(x))


def test_places_in_memory_that_nobody_knows_are_refused() -> None:
    @torch.autocast("cpu", torch.bfloat16)
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(x).as_strided((2,), (1,))

    def of_diagonal(x: torch.Tensor) -> torch.Tensor:
        return x.exp().diagonal().as_strided((2,), (1,))

    for program, x in ((mixed, torch.eye(3)), (of_diagonal, torch.eye(3).requires_grad_())):
        with pytest.raises(UnsupportedOpError, match=r"as_strided\(\) of a plain tensor that is no input"):
            thunder.jit(program, transforms=[SubclassTransform()])(x)


WRITES = {
    "as_strided": lambda y: y.as_strided((2,), (1,)).zero_(),
    "as_strided, of what is written": lambda y: (y.as_strided((2,), (1,)), y.add_(1))[0],
    "reshape": lambda y: y.reshape(-1)[1:3].zero_(),
    "ravel of a row": lambda y: y[1].ravel().mul_(2),
    "contiguous": lambda y: y.contiguous()[0].zero_(),
    "transposed and contiguous": lambda y: y.transpose(0, 1).contiguous()[0].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_through_a_view_by_layout_is_written(name: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = F.rms_norm(x.t(), (3,))
        row = y[1]
        return WRITES[name](y), row, y

    x = torch.arange(12.0).reshape(3, 4)
    for transform in (NormTransform, SubclassTransform):
        torch.testing.assert_close(thunder.jit(program, transforms=[transform()])(x), program(x))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_a_view_that_is_written_into_is_one_or_refused(name: str, requires_grad: bool) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = RESULTS[name](x.transpose(1, 2))
        z = y.view(y.shape[0], -1)
        z.mul_(2)
        return y.view(-1), z.sin()

    torch.manual_seed(seeded(0))
    x = torch.randn(4, 5, 3, requires_grad=requires_grad)
    try:
        found = thunder.jit(program, transforms=[NormTransform()])(x)
    except RuntimeError as e:
        assert "view size is not compatible" in str(e)
    else:
        torch.testing.assert_close(found, program(x))
