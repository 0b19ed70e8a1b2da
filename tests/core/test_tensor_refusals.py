"""Construction of normed tensors: sizes, elem_dims, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
)
from thunder_norm.errors import NormMismatchError, ThunderNormError, UnsupportedOpError


@pytest.mark.parametrize("size", [0, 0.0, 2, 1.5, math.inf, np.float64(2.0)])
def test_a_size_may_be_any_number_from_0(size):
    assert RMSTensor(size).norm_size.item() == float(size)


@pytest.mark.parametrize(
    "size",
    [
        -1.0,
        math.nan,
        "1",
        None,
        True,
        1j,
        [1.0],
        torch.tensor(-1.0),
        torch.tensor(math.nan),
        torch.ones(1),
        torch.ones(2, 2),
        torch.tensor(1),
        torch.tensor(True),
        torch.tensor(1j),
    ],
    ids=repr,
)
@pytest.mark.parametrize("argument", ["norm_size", "perturbation_size"])
def test_other_sizes_are_refused(size, argument):
    sizes = {"norm_size": 1.0, argument: size}
    if argument == "perturbation_size" and size is None:
        assert RMSTensor(**sizes).perturbation_size is None
        return
    if argument == "norm_size" and isinstance(size, torch.Tensor) and size.is_floating_point() and size.isnan().all():
        assert RMSTensor(**sizes).norm_size.isnan()  # it was computed: the norm of a tensor with NaN entries
        return
    with pytest.raises(NormMismatchError, match=argument):
        RMSTensor(**sizes)


def test_a_normed_tensor_is_no_size():
    with pytest.raises(NormMismatchError, match="norm_size"):
        RMSTensor(RMSTensor(1.0, backing=torch.ones(())))


@pytest.mark.parametrize(
    ("kind", "dims", "message"),
    [
        (RMSTensor, (2,), "out of range"),
        (RMSTensor, (-3,), "out of range"),
        (RMSTensor, (0, -2), "twice"),
        (LinfTensor, (5,), "out of range"),
        (RMSToRMSTensor, (-1,), "output dim, input dim"),
        (RMSToRMSTensor, (-1, 1), "twice"),
        (RMSTensor, ("a",), "out of range"),
        (RMSTensor, (0.0,), "out of range"),
        (RMSTensor, 0.0, "an int or several"),
    ],
)
def test_elem_dims_that_do_not_fit_are_refused(kind, dims, message):
    t = torch.ones(2, 3)
    for make in (
        lambda: kind(1.0, backing=t, elem_dims=dims),
        lambda: kind.of(t, dims),
        lambda: kind(1.0, elem_dims=dims).finalize(t),
    ):
        with pytest.raises(NormMismatchError, match=message):
            make()


def test_an_operator_needs_a_matrix():
    with pytest.raises(NormMismatchError, match="do not fit a tensor of 1 dimensions"):
        RMSToRMSTensor.of(torch.ones(3))
    with pytest.raises(NormMismatchError, match="do not fit a tensor of 0 dimensions"):
        RMSToRMSTensor(1.0, backing=torch.ones(()))


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="one of its kinds"):
        NormedTensor(1.0)


@pytest.mark.parametrize("t", [torch.ones(2).long(), torch.ones(2).bool(), [1.0, 2.0], 1.0], ids=repr)
def test_of_needs_a_floating_tensor(t):
    with pytest.raises(NormMismatchError, match="plain floating tensor"):
        RMSTensor.of(t)


def test_normed_tensors_do_not_nest():
    x = RMSTensor.of(torch.ones(2))
    with pytest.raises(NormMismatchError, match="plain"):
        RMSTensor.of(x)
    with pytest.raises(NormMismatchError, match="plain"):
        RMSTensor(1.0, backing=x)
    with pytest.raises(NormMismatchError, match="plain"):
        RMSTensor(1.0).finalize(x)
    with pytest.raises(NormMismatchError, match="plain tensor, got list"):
        RMSTensor(1.0, backing=[1.0])


def test_all_refusals_are_errors_of_ours():
    assert issubclass(NormMismatchError, ThunderNormError) and issubclass(NormMismatchError, ValueError)
    assert issubclass(UnsupportedOpError, ThunderNormError)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.numpy(), lambda x: x.tolist(), lambda x: np.asarray(x), lambda x: np.sin(x), lambda x: x.detach().cpu().numpy()],
)
def test_numbers_are_not_handed_to_python(read):
    with pytest.raises(UnsupportedOpError, match="of a NormedTensor") as error:
        read(RMSTensor.of(torch.randn(3, 4)))
    assert "instead" in str(error.value)


@pytest.mark.parametrize("first", [True, False])
def test_a_program_may_ask_whether_tensors_are_equal_or_close(first):
    """As it may compare them: torch's answers, for normed tensors and plain ones."""
    x = torch.tensor([[1.0, float("nan"), 3.0]])
    for y in (x.clone(), x + 1e-7, x + 1.0, torch.ones(2), x.nan_to_num()):
        a, b = (RMSTensor(9.0, backing=x), y) if first else (x, RMSTensor(9.0, backing=y))
        assert torch.equal(a, b) == torch.equal(x, y)
        if x.shape == y.shape:
            for options in ({}, {"equal_nan": True}, {"atol": 1e-3, "rtol": 0.0, "equal_nan": True}):
                assert torch.allclose(a, b, **options) == torch.allclose(x, y, **options)
                assert torch.equal(torch.isclose(a, b, **options), torch.isclose(x, y, **options))
    z = x.nan_to_num()
    assert torch.equal(RMSTensor.of(z), RMSTensor.of(z)) and RMSTensor.of(z).equal(z) and RMSTensor.of(z).allclose(z)
