"""NormedTensor and its kinds: construction, exact measurement, refusals, and the wrapper protocol."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSConvTensor,
    RMSToRMSTensor,
)
from thunder_norm.errors import NormMismatchError, UnsupportedOpError

VECTOR_KINDS = (RMSTensor, L1Tensor, L2Tensor, LinfTensor)


KINDS = (*VECTOR_KINDS, RMSToRMSTensor, RMSToRMSConvTensor)


def spectral_norm(matrix: np.ndarray) -> float:
    """Largest singular value, from the eigenvalues of the Gram matrix."""
    return math.sqrt(max(np.linalg.eigvalsh(matrix.T @ matrix).max(), 0.0))


def numpy_norm(kind: type[NormedTensor], t: torch.Tensor, dims: tuple[int, ...]) -> float:
    """The definition of each norm, in numpy and float64."""
    a = t.detach().double().numpy()
    if issubclass(kind, RMSToRMSConvTensor):
        d_out, d_in = a.shape[dims[0]] // kind.groups, a.shape[dims[1]]
        taps = np.moveaxis(a, dims, (0, 1)).reshape(kind.groups, d_out, d_in, -1)
        largest = max(spectral_norm(taps[g, :, :, k]) for g in range(kind.groups) for k in range(taps.shape[-1]))
        return taps.shape[-1] * largest * math.sqrt(d_in / d_out)
    if issubclass(kind, RMSToRMSTensor):
        matrices = np.moveaxis(a, dims, (-2, -1)).reshape(-1, a.shape[dims[0]], a.shape[dims[1]])
        return max(spectral_norm(m) for m in matrices) * math.sqrt(a.shape[dims[1]] / a.shape[dims[0]])
    if issubclass(kind, LinfTensor):
        return np.abs(a).max()
    reduce = {RMSTensor: np.mean, L1Tensor: np.sum, L2Tensor: np.sum}[kind]
    entries = np.abs(a) if kind is L1Tensor else a**2
    reduced = reduce(entries, axis=dims) if dims else entries
    return reduced.max() if kind is L1Tensor else math.sqrt(reduced.max())


CASES = [
    *[(k, (3, 5), d) for k in VECTOR_KINDS for d in ((-1,), (-2,), (-2, -1), ())],
    *[(k, (2, 3, 4), d) for k in VECTOR_KINDS for d in ((-1,), (-3, -1), (-3, -2, -1))],
    *[(k, (), ()) for k in VECTOR_KINDS],
    (RMSToRMSTensor, (4, 6), (-2, -1)),
    (RMSToRMSTensor, (4, 6), (-1, -2)),
    (RMSToRMSTensor, (3, 4, 6), (-2, -1)),
    (RMSToRMSTensor, (3, 4, 6), (-1, -3)),
    (RMSToRMSTensor, (1, 6), (-2, -1)),
    (RMSToRMSConvTensor, (4, 6, 3), (-3, -2)),
    (RMSToRMSConvTensor, (4, 6, 3, 2), (-4, -3)),
    (RMSToRMSConvTensor, (6, 4, 3, 3), (-3, -4)),
    (RMSToRMSConvTensor.grouped(2), (4, 3, 3), (-3, -2)),
    (RMSToRMSConvTensor.grouped(4), (4, 1, 3, 3), (-4, -3)),
]


CASE_IDS = [f"{k.__name__}-{list(s)}-{d}" for k, s, d in CASES]


@pytest.mark.parametrize(("kind", "shape", "dims"), CASES, ids=CASE_IDS)
def test_of_is_the_exact_norm(kind, shape, dims):
    t = torch.randn(shape, dtype=torch.float64)
    x = kind.of(t, dims)
    assert x.norm_size.item() == pytest.approx(numpy_norm(kind, t, dims), rel=1e-12)
    assert x.norm_size.dtype is torch.float64 and x.norm_size.ndim == 0
    assert x.backing is t and x.perturbation_size is None


@pytest.mark.parametrize(("shape", "dims"), [((700, 800), (-1,)), ((700, 800), (-2,)), ((3, 400, 500), (-2,)), ((600000,), ())])
@pytest.mark.parametrize("kind", VECTOR_KINDS)
def test_large_tensors_have_the_norm_of_all_of_their_entries(kind, shape, dims):
    """Wherever the largest ones are, and a NaN; with their derivative, in reverse and forward."""
    t = torch.randn(shape)
    places = [torch.tensor(0), torch.tensor(t.numel() // 2), torch.tensor(t.numel() - 1)]
    for place in places:
        one = t.clone()
        one.view(-1)[place] = 1e4
        found = kind.of(one, dims)
        assert found.norm_size.item() == pytest.approx(numpy_norm(kind, one.double(), found.elem_dims), rel=1e-5)
        assert kind.of(torch.nn.Parameter(one, requires_grad=False), dims).norm_size == found.norm_size
        one.view(-1)[place] = math.nan
        assert kind.of(one, dims).norm_size.isnan()
    leaf = t.clone().requires_grad_()
    (grad,) = torch.autograd.grad(kind.of(leaf, dims).norm_size, leaf)
    tangent = torch.func.jvp(lambda t: kind.of(t, dims).norm_size, (t,), (torch.ones_like(t),))[1]
    assert tangent.item() == pytest.approx(grad.double().sum().item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_of_measures_low_precision_in_at_least_float32(kind, dtype):
    shape = (8, 16, 3) if kind is RMSToRMSConvTensor else (8, 16)
    t = (100 * torch.randn(shape)).to(dtype)  # squares beyond float16
    x = kind.of(t)
    assert x.norm_size.dtype is torch.float64
    assert x.dtype is dtype
    assert x.norm_size.item() == pytest.approx(numpy_norm(kind, t, x.elem_dims), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "ndim", "dims"),
    [
        (RMSTensor, 3, (-1,)),
        (L1Tensor, 1, (-1,)),
        (L2Tensor, 2, (-1,)),
        (RMSTensor, 0, ()),
        (LinfTensor, 3, ()),
        (RMSToRMSTensor, 2, (-2, -1)),
        (RMSToRMSTensor, 3, (-2, -1)),
        (RMSToRMSConvTensor, 3, (-3, -2)),
        (RMSToRMSConvTensor, 4, (-4, -3)),
    ],
)
def test_default_elem_dims(kind, ndim, dims):
    t = torch.ones((2,) * ndim)
    assert kind.of(t).elem_dims == dims
    assert kind(1.0, backing=t).elem_dims == dims


def test_elem_dims_are_made_negative_and_sorted_but_an_operator_keeps_its_order():
    t = torch.ones(2, 3, 4)
    assert RMSTensor(1.0, backing=t, elem_dims=[2, 0]).elem_dims == (-3, -1)
    assert RMSTensor(1.0, backing=t, elem_dims=1).elem_dims == (-2,)
    assert RMSToRMSTensor(1.0, backing=t, elem_dims=(2, 0)).elem_dims == (-1, -3)
    assert LinfTensor(1.0, backing=t, elem_dims=(0, 1)).elem_dims == ()


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
    kind=st.sampled_from(VECTOR_KINDS),
)
def test_of_is_the_exact_norm_for_any_shape_and_dims(shape, data, kind):
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda d: d % len(shape)))
    t = torch.randn(shape, dtype=torch.float64)
    x = kind.of(t, dims)
    assert x.norm_size.item() == pytest.approx(numpy_norm(kind, t, x.elem_dims), rel=1e-12)


def test_a_linf_tensor_is_an_rms_tensor_over_no_dimension():
    t = torch.randn(3, 4)
    assert issubclass(LinfTensor, RMSTensor)
    assert RMSTensor.of(t, ()).norm_size.item() == pytest.approx(LinfTensor.of(t).norm_size.item(), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_elements_has_norm_0(kind):
    t = torch.ones((0, 3, 2) if kind is RMSToRMSConvTensor else (0, 3))
    assert kind.of(t).norm_size.item() == 0


# -- derivatives of the norm -----------------------------------------------------------------------------------------------


FORMULAS = {
    RMSTensor: lambda t: t.pow(2).mean(-1).sqrt().max(),
    L1Tensor: lambda t: t.abs().sum(-1).max(),
    L2Tensor: lambda t: torch.linalg.vector_norm(t, dim=-1).max(),
    LinfTensor: lambda t: t.abs().max(),
    RMSToRMSTensor: lambda t: torch.linalg.svdvals(t).max() * math.sqrt(t.shape[1] / t.shape[0]),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_derivative_of_the_norm_is_that_of_its_formula(kind):
    t = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(kind.of(t).norm_size, t)
    (want,) = torch.autograd.grad(FORMULAS[kind](t), t)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [RMSTensor, L2Tensor, RMSToRMSTensor])
def test_second_derivative_of_the_norm(kind):
    t = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: kind.of(t).norm_size, t)


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_at_the_zero_tensor_is_0(kind):
    t = torch.zeros((2, 3, 2) if kind is RMSToRMSConvTensor else (2, 3), requires_grad=True)
    x = kind.of(t)
    (grad,) = torch.autograd.grad(x.norm_size, t)
    assert x.norm_size.item() == 0
    # every subgradient of a norm at 0 has dual norm at most 1; NaN and infinities would poison a training step
    assert torch.isfinite(grad).all()
    if kind in (RMSTensor, L1Tensor, L2Tensor, LinfTensor):
        assert (grad == 0).all()


# -- differentiability -----------------------------------------------------------------------------------------------------


def test_norm_size_requires_grad_makes_a_leaf():
    x = RMSTensor(2.0, backing=torch.ones(3), norm_size_requires_grad=True)
    assert x.norm_size.requires_grad and x.norm_size.is_leaf and not x.requires_grad
    with pytest.raises(NormMismatchError, match="norm_size_requires_grad"):
        RMSTensor(torch.tensor(1.0), norm_size_requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_as_size_stays_differentiable(dtype):
    size = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    x = RMSTensor(size, backing=torch.ones(3))
    assert x.norm_size.dtype is torch.float64
    (grad,) = torch.autograd.grad(x.norm_size * 3, size)
    assert grad.item() == 3


def test_the_wrapper_itself_never_requires_grad():
    x = RMSTensor.of(torch.ones(3, requires_grad=True))
    assert not x.requires_grad and x.norm_size.requires_grad
    assert x.requires_grad_(False) is x
    with pytest.raises(UnsupportedOpError, match=r"x\.norm_size\.requires_grad_\(\)"):
        x.requires_grad_()
    with pytest.raises(UnsupportedOpError, match=r"x\.norm_size\.backward\(\)"):
        x.backward()
    with pytest.raises((UnsupportedOpError, RuntimeError)):
        x.requires_grad = True
    assert not x.requires_grad


# -- finalize, repr, metadata ----------------------------------------------------------------------------------------------


def test_finalize_attaches_a_backing_and_keeps_the_norm():
    x = RMSTensor(2.0, perturbation_size=0.5)
    t = torch.ones(3, 4, dtype=torch.float64)
    y = x.finalize(t)
    assert not x.finalized and y.finalized
    assert y.backing is t and y.shape == (3, 4) and y.dtype is torch.float64 and y.elem_dims == (-1,)
    assert y.norm_size is x.norm_size and y.perturbation_size is x.perturbation_size
    with pytest.raises(NormMismatchError, match="already finalized"):
        y.finalize(t)


def test_finalize_keeps_elem_dims_given_before():
    assert RMSTensor(1.0, elem_dims=(0,)).finalize(torch.ones(2, 3)).elem_dims == (-2,)
    assert RMSTensor(1.0, elem_dims=()).finalize(torch.ones(2, 3)).elem_dims == ()


@pytest.mark.parametrize("kind", KINDS)
def test_operations_refuse_an_unfinalized_tensor(kind):
    with pytest.raises(NormMismatchError, match="unfinalized"):
        torch.neg(kind(1.0))


def test_meta_and_fake_backings():
    x = RMSTensor(1.0, backing=torch.empty(2, 3, device="meta"))
    assert x.device.type == "meta" and x.norm_size.device.type == "cpu"
    y = torch.neg(x)
    assert y.shape == (2, 3) and y.norm_size.item() == 1
    with torch._subclasses.FakeTensorMode():
        assert "RMSTensor(" in repr(RMSTensor(1.0, backing=torch.empty(2, 3)))


def test_repr_shows_kind_size_dims_and_shape():
    t = torch.ones(2, 3)
    assert repr(RMSTensor(0.5, backing=t)) == "RMSTensor(0.5, elem_dims=(-1,), shape=[2, 3])"
    assert repr(L1Tensor(2, backing=t, perturbation_size=0.25)) == (
        "L1Tensor(2, perturbation_size=0.25, elem_dims=(-1,), shape=[2, 3])"
    )
    assert repr(RMSToRMSTensor(1.0, norm_size_requires_grad=True)) == (
        "RMSToRMSTensor(1, requires_grad, elem_dims=default, shape=unfinalized)"
    )
    assert str(LinfTensor.of(t)) == "LinfTensor(1, elem_dims=(), shape=[2, 3])"


def test_metadata_is_the_backings():
    t = torch.empty(2, 4, 3, dtype=torch.bfloat16).transpose(-1, -2)
    x = RMSTensor(1.0, backing=t)
    assert (x.shape, x.dtype, x.device, x.stride(), x.ndim, len(x), x.numel()) == (
        t.shape, t.dtype, t.device, t.stride(), t.ndim, len(t), t.numel()
    )  # fmt: skip
    assert x.is_contiguous() == t.is_contiguous() and x.is_floating_point() and x.numel_normed == 4
    assert RMSToRMSTensor(1.0, backing=t, elem_dims=(2, 0)).in_features == 2
    assert RMSToRMSTensor(1.0, backing=t, elem_dims=(2, 0)).out_features == 4


# -- the wrapper protocol --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("perturbation", [None, 0.5])
def test_flatten_and_unflatten_are_inverse(kind, perturbation):
    t = torch.randn((2, 3, 4) if kind is RMSToRMSConvTensor else (2, 3))
    x = kind(1.5, backing=t, perturbation_size=perturbation)
    names, ctx = x.__tensor_flatten__()
    y = kind.__tensor_unflatten__({n: getattr(x, n) for n in names}, ctx, x.shape, x.stride())
    assert type(y) is kind and y.elem_dims == x.elem_dims
    assert y.backing is x.backing and y.norm_size is x.norm_size and y.perturbation_size is x.perturbation_size


def test_flatten_and_unflatten_of_an_unfinalized_tensor():
    x = RMSTensor(1.5, elem_dims=(0,))
    names, ctx = x.__tensor_flatten__()
    y = RMSTensor.__tensor_unflatten__({n: getattr(x, n) for n in names}, ctx, x.shape, x.stride())
    assert not y.finalized and y.elem_dims == (0,) and y.norm_size is x.norm_size


def test_grouped_kinds_are_one_class_for_each_number_of_groups():
    assert RMSToRMSConvTensor.grouped(1) is RMSToRMSConvTensor
    assert RMSToRMSConvTensor.grouped(3) is RMSToRMSConvTensor.grouped(3)
    assert RMSToRMSConvTensor.grouped(3).groups == 3


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), torch.Tensor.clone])
def test_copies_keep_the_norm(copy_of):
    x = RMSToRMSTensor.of(torch.randn(4, 3), (1, 0))
    y = copy_of(x)
    assert type(y) is RMSToRMSTensor and y.elem_dims == (-1, -2)
    assert torch.equal(y.norm_size, x.norm_size) and torch.equal(y.backing, x.backing)
