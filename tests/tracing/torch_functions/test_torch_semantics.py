"""Functions of torch have torch's arguments, shapes and dtypes under our transforms, also where Thunder's operation has others."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import operator
import random

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import named_seed, seeded
from thunder_norm.errors import ThunderNormError, UnsupportedOpError
from thunder_norm.tracing.torch_functions.type_promotion import mended_promotion
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    ProfileTransform,
    SplitBiasTransform,
    SubclassTransform,
    grad,
    jvp,
    vmap,
)
import thunder
from thunder.core import dtypes, utils
from thunder.torch import _torch_to_thunder_function_map

_MODULE = torch.nn.NLLLoss(reduction="none")
_TARGETS = {"all": [0, 1, 0, 1], "some ignored": [0, -100, 1, -100]}
_CALLS = {
    "mean": lambda x, t: F.nll_loss(x, t),
    "sum": lambda x, t: F.nll_loss(x, t, reduction="sum"),
    "legacy": lambda x, t: F.nll_loss(x, t, None, False),
    "places": lambda x, t: F.nll_loss(x, t, torch.tensor([1.0, 3.0], dtype=torch.float64), None, 1, None, "mean"),
    "index": lambda x, t: F.nll_loss(x, t.clamp(min=0), ignore_index=0),
    "module": lambda x, t: _MODULE(x, t).sum(),
}


@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize("call", _CALLS)
def test_nll_loss_is_torchs(call, target):
    x, t = torch.randn(4, 2, dtype=torch.float64).log_softmax(-1), torch.tensor(_TARGETS[target])
    t = t.clamp(min=0) if call == "places" else t

    def loss(x):
        return _CALLS[call](x, t)

    wanted, slope = loss(x), torch.func.grad(loss)(x)
    torch.testing.assert_close(grad(loss)(x), slope)
    torch.testing.assert_close(jvp(loss, (x,), (slope,))[1], (slope * slope).sum())
    torch.testing.assert_close(vmap(grad(loss))(torch.stack([x, x * 2]))[1], torch.func.grad(loss)(x * 2))
    for transform in (SubclassTransform, NormTransform):
        leaf = x.detach().requires_grad_()
        found = thunder.jit(loss, transforms=[transform()])(leaf)
        torch.testing.assert_close(found, wanted)
        found.backward()
        torch.testing.assert_close(leaf.grad, slope)


def test_no_other_function_in_python_has_a_default_of_thunders():
    differing = set()
    for function, symbol in _torch_to_thunder_function_map.items():
        try:
            theirs = inspect.signature(function).parameters
            own = inspect.signature(inspect.unwrap(symbol.meta)).parameters
        except (TypeError, ValueError, AttributeError):  # in C, without a signature
            continue
        if str(getattr(function, "__module__", "")).startswith("torch.distributed"):
            continue
        required = inspect.Parameter.empty
        if any(
            n in theirs and required not in (p.default, theirs[n].default) and p.default != theirs[n].default
            for n, p in own.items()
        ):
            differing.add(function)
    assert differing == {F.nll_loss}


# -- shapes and dtypes ------------------------------------------------------------------------------------------------


def _f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _d(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _b(*shape: int) -> torch.Tensor:
    return torch.randn(shape) > 0


def _i(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, 5, shape, dtype=dtype)


_PROGRAMS = {
    "lerp, a number": lambda: (lambda x, y: x.lerp(y, 0.8), _f(), _f(1)),
    "lerp, a weight": lambda: (lambda x, w: torch.lerp(x, x, w), _f(), _f(3, 2)),
    "lerp of the class": lambda: (lambda x, y: torch.Tensor.lerp(x, y, weight=x), _f(), _f(3)),
    "unfold": lambda: (lambda x: x.unfold(0, 3, 2), _f(5, 6)),
    "unfold, in between": lambda: (lambda x: x.unfold(1, 4, 3), _i(2, 7, 3)),
    "unfold, empty": lambda: (lambda x: x.unfold(-1, 0, 1), _f(2, 3)),
    "unfold of a number": lambda: (lambda x: x.unfold(0, 1, 1), _f()),
    "tile": lambda: (lambda x: x.tile(2) + x.tile(1, 2), _f(2, 3)),
    "tile, more dimensions": lambda: (lambda x: x.tile((2, 1, 3)), _f(2)),
    "tile, by name": lambda: (lambda x: x.tile(dims=(3,)), _f(2, 3)),
    "the other unfold": lambda: (lambda x: F.unfold(x, 2), _f(1, 2, 4, 3)),
    "where of bools": lambda: (lambda x, c: x.where(c, ~x), _b(9), _b(9)),
    "where, a number": lambda: (lambda x, c: x.where(condition=c, other=0), _f(9), _b(9)),
    "the other where": lambda: (lambda x, c: torch.where(c, x, 0), _f(9), _b(9)),
    "arange, empty": lambda: (lambda x: torch.arange(1, 1) * x, _f(1)),
    "arange": lambda: (lambda x: torch.arange(1, 5, 2, dtype=torch.float64) * x, _f(1)),
    "a list": lambda: (lambda x, y: torch.atleast_2d([x, y]), _f(), _f(3)),
    "a tuple": lambda: (lambda x, y: torch.atleast_3d((x, y)), _f(2, 2), _f(3)),
    "masked_fill of bools": lambda: (lambda x, m: x.masked_fill(m, 10), _b(9), _b(9)),
    "masked_fill of integers": lambda: (lambda x, m: torch.masked_fill(x, m, 2.5), _i(9), _b(9)),
    "masked_fill, a tensor": lambda: (lambda x, m, v: x.masked_fill(m, v), _f(9), _b(9), _d()),
    "hardtanh of integers": lambda: (lambda x: F.hardtanh(x, -0.5, 1.5), _i(9) - 2),
    "mse_loss": lambda: (lambda x, y: F.mse_loss(x, y, reduction="none"), _f(3), _d()),
    "copysign": lambda: (lambda x, y: x.copysign(y), _f(3), _d(3)),
    "copysign of integers": lambda: (lambda x: torch.copysign(x, -2), _i(3)),
    "var_mean of complex numbers": lambda: (lambda x: torch.var_mean(x), _d(3, 4).to(torch.complex128) * (2 + 1j)),
    "var_mean of them over one": lambda: (
        lambda x: [t.abs() for t in torch.var_mean(x, 0, correction=0, keepdim=True)],
        _d(3, 4).to(torch.complex64) * 1j,
    ),
    "var_mean of them over none": lambda: (lambda x: torch.var_mean(x, ())[1].real, _d(3, 4).to(torch.complex64) * (1 + 1j)),
    "var_mean of real numbers": lambda: (lambda x: torch.var_mean(x, [0, 1]), _d(3, 4)),
    "deviations, unbiased by place": lambda: (
        lambda x: (x.var(False), torch.std(x, True), x.std(0, False), torch.var(x, 1, True, True), *torch.var_mean(x, False)),
        _d(3, 4),
    ),
    "deviations by name": lambda: (
        lambda x: (x.var(dim=1, unbiased=False, keepdim=True), torch.std(input=x, correction=None), x.var(axis=0), x.std(())),
        _d(3, 4),
    ),
    "baddbmm that leaves out its input": lambda: (
        lambda x, y: (torch.baddbmm(x / 0, y, y, beta=0, alpha=3), x.baddbmm(y, y, beta=0.5)),
        _d(2, 3, 3),
        _d(2, 3, 3),
    ),
    **{
        f"interpolate, {shape}, {given}": lambda shape=shape, given=given: (lambda x: F.interpolate(x, **given), _d(2, 1, *shape))
        for shape, given in (
            ((8,), {"size": 3}),
            ((4, 6), {"size": (2, 2), "mode": "nearest-exact"}),
            ((10, 3), {"scale_factor": 2.05}),
            ((9, 8), {"scale_factor": (0.3, 1.5), "mode": "bilinear"}),
            ((3, 5, 7), {"scale_factor": [2.0, 0.4, 0.7]}),
        )
    },
    **{
        f"cross_entropy, {shape}, {reduction}": lambda shape=shape, reduction=reduction: (
            lambda x, t: (
                F.cross_entropy(x, t, reduction=reduction, label_smoothing=0.1, ignore_index=1),
                F.cross_entropy(x, x.softmax(1), reduction=reduction),
                F.nll_loss(x, t, x.detach()[0].reshape(3, -1)[:, 0], reduction=reduction),
            ),
            _d(*shape),
            torch.randint(0, 3, (shape[0], *shape[2:])),
        )
        for shape in ((4, 3), (2, 3, 4), (2, 3, 2, 2, 2))
        for reduction in ("mean", "none")
    },
    **{
        f"ctc_loss with lists, {reduction}": lambda reduction=reduction: (
            lambda x, t: F.ctc_loss(x.log_softmax(-1), t, [5, 4], target_lengths=(2, 1), reduction=reduction),
            _d(5, 2, 3),
            torch.randint(1, 3, (2, 2)),
        )
        for reduction in ("mean", "none")
    },
    "addcmul of integers": lambda: (lambda x, y: x.addcmul(x, y, value=2.5), _i(3), _i(3)),
    "a bool and an int": lambda: (lambda m: m * 2 + (1 - m.long()), _b(3)),
    "a bool, a number, int8": lambda: (lambda m, x, y: (m + x) * y, _b(3), _i(), _i(3, dtype=torch.int8)),
    "uint8 and int64": lambda: (lambda x, y: x * y, _i(3, dtype=torch.uint8), _i()),
    "uint8 and int8": lambda: (lambda x, y: x - y, _i(dtype=torch.uint8), _i(3, dtype=torch.int8)),
    "a number reshaped": lambda: (lambda x, y: x.reshape(1) * y, _d(), _f(3)),
    "a number expanded": lambda: (lambda x, y: x.sin().expand(3) + y, _d(), _f(3)),
    "numbers stacked": lambda: (lambda x, y: torch.stack([x, x, x]) / y, _d(), _f(3)),
    "a number unsqueezed": lambda: (lambda x, y: y - x[None], _d(), _f(3)),
    "floor_divide of bfloat16": lambda: (lambda x: x // x.abs().add(1), _f(3).bfloat16()),
    "norm by names": lambda: (lambda x: torch.norm(x, p=2, dim=0, keepdim=True), _f(3, 4)),
    "norm without p": lambda: (lambda x: torch.norm(x, dim=(0, 1)) + x.norm(None, 1), _f(3, 4)),
    "norm, Frobenius": lambda: (lambda x: (x.norm("fro"), torch.norm(x, p="fro", dim=-1)), _f(3, 4)),
    "norm, nuclear": lambda: (lambda x: (x[0].norm("nuc"), torch.norm(x, "nuc", dim=(0, 2))), _f(3, 2, 4)),
    "a tensor summed": lambda: (lambda x, y: x.sum() * y, _d(3), _f(3)),
}


def _with_metadata(f):
    """`f`, which tells as well what the program sees of its results."""

    def program(*args):
        found = f(*args)
        tensors = found if isinstance(found, (tuple, list)) else (found,)
        return tensors, [(tuple(t.shape), t.dtype) for t in tensors]

    return program


def _assert_is_torchs(f, *args):
    wanted, wanted_metadata = _with_metadata(f)(*args)
    found, metadata = thunder.jit(_with_metadata(f), transforms=[SubclassTransform()])(*args)
    assert metadata == wanted_metadata == [(tuple(t.shape), t.dtype) for t in found]
    torch.testing.assert_close(list(found), list(wanted), equal_nan=True)


@pytest.mark.parametrize("name", _PROGRAMS)
def test_results_and_what_the_program_sees_of_them_are_torchs(name):
    _assert_is_torchs(*_PROGRAMS[name]())


@pytest.mark.parametrize("name", "relu relu6 leaky_relu elu celu selu silu mish hardswish hardsigmoid threshold".split())
def test_functions_in_place_stay_one_operation(name):
    function, numbers = getattr(F, name), (0.1, 0.2) if name == "threshold" else ()

    def f(x):
        y = x * 2
        view = y[1:]
        z = function(y, *numbers, inplace=True)
        return z, y + 1, view * 3

    for x in (_d(9), _d(9).requires_grad_()):
        jitted = thunder.jit(f, transforms=[SubclassTransform()])
        torch.testing.assert_close(jitted(x), f(x))
        names = [bsym.sym.name for bsym in thunder.last_traces(jitted)[0].bound_symbols]
        assert names.count(name) == 1 and not {"where", "exp", "sigmoid", "gt"} & set(names)


def test_other_compilations_stay_thunders():
    thunder.jit(lambda m: m * 2, transforms=[SubclassTransform()])(_b(3))
    plain = thunder.jit(lambda x: x.unfold(0, 1, 1))
    with pytest.raises(NotImplementedError):  # Thunder runs F.unfold
        plain(_f(3))
    traced = thunder.jit(lambda m: m * 2)
    traced(_b(3))
    assert "i8[3]" in str(thunder.last_traces(traced)[0])


def _assigned(x):
    y = torch.zeros(3, 2)
    y[:, 0] = x
    y[0, 1] = x[1]
    return y


_SEEN = torch.tensor([[True, False], [False, False]])


def _attention(mask):
    return lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), mask).square().sum()


_DERIVATIVES = {
    "attention, a query that sees nothing": (_attention(_SEEN), (3, 2, 4)),
    "attention, a row of minus infinity": (
        _attention(torch.zeros(2, 2, dtype=torch.float64).masked_fill(~_SEEN, -torch.inf)),
        (2, 4),
    ),
    "attention, groups of queries": (
        lambda x: F.scaled_dot_product_attention(x, x[:2].sin(), x[1:3].cos(), scale=0.7, enable_gqa=True).square().sum(),
        (4, 2, 3),
    ),
    **{
        name: (lambda x, name=name: (getattr(F, name)(x * 1e4) + getattr(F, name)(x)).square().sum(), (6,))
        for name in "sigmoid elu celu selu mish silu gelu softplus logsigmoid glu".split()
    },
    "cross_entropy of positions": (lambda x: F.cross_entropy(x, torch.tensor([[0, 1], [2, 1]]), label_smoothing=0.2), (2, 3, 2)),
    "cross_entropy of some": (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 1]), ignore_index=1, label_smoothing=0.2), (3, 4)),
    "interpolate": (lambda x: F.interpolate(x[None], 3).square().sum(), (2, 8)),
    "max_pool1d": (lambda x: F.max_pool1d(x[None], 3, 1, 1).square().sum(), (2, 5)),
    "deviations": (lambda x: x.var(False) + x.std(0, False).sum(), (3, 2)),
    "lerp": (lambda x: x.lerp(torch.ones(1, dtype=torch.float64), 0.8).square().sum(), ()),
    "bits as the same dtype": (lambda x: (x.view(torch.float64) * x.view(dtype=torch.float64).view(-1) * x).sum(), (5,)),
    "bits as a smaller dtype": (lambda x: (x.view(torch.float32)[::2].nan_to_num().clamp(-1, 1) * x).sum(), (5,)),
    "unfold": (lambda x: x.unfold(0, 3, 2).square().sum(), (5, 2)),
    "where": (lambda x: x.where(x > 0, 2 * x).square().sum(), (5,)),
    "assigned in another precision": (
        lambda x: (_assigned(x) * torch.tensor([[1.0, 2.0], [4.0, 8.0], [0.5, 1.0]])).sum().double(),
        (3,),
    ),
    "masked_fill": (lambda x: x.square().masked_fill(x > 0, 3).sum(), (5,)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.5).square().sum(), (5,)),
    "mse_loss": (lambda x: F.mse_loss(x, torch.arange(3.0, dtype=torch.float64)), ()),
    "var_mean": (lambda x: (lambda v, m: v * m.imag + m.real.sin())(*torch.var_mean(torch.complex(x, x.exp()))), (5,)),
    "copysign": (lambda x: (x.copysign(torch.tensor(-1.0)) * x).sum(), (5,)),
    "addcmul": (lambda x: x.addcmul(x, x, value=2.5).sum(), (5,)),
    "a bool and an int": (lambda x: (x.square() * ((x > 0) * 2)).sum(), (5,)),
    "norm": (lambda x: x.norm(p=3, dim=0, keepdim=True).sum() + x.norm("fro").sin(), (5, 2)),
    "a list": (lambda x: torch.atleast_2d([x, x[0]])[1].square().sum(), (5,)),
}


@pytest.mark.parametrize("name", _DERIVATIVES)
def test_derivatives_are_torchs(name):
    f, shape = _DERIVATIVES[name]
    x = _d(*shape)
    slope = torch.func.grad(f)(x)
    both = torch.stack([slope, torch.func.grad(f)(x * 2)])
    torch.testing.assert_close(grad(f)(x), slope, equal_nan=True)
    torch.testing.assert_close(jvp(f, (x,), (slope,))[1], (slope * slope).sum(), equal_nan=True)
    torch.testing.assert_close(vmap(grad(f))(torch.stack([x, x * 2])), both, equal_nan=True)
    leaf = x.clone().requires_grad_()
    thunder.jit(f, transforms=[SubclassTransform()])(leaf).backward()
    torch.testing.assert_close(leaf.grad, slope, equal_nan=True)


@pytest.mark.parametrize("mask", [_SEEN, torch.zeros(2, 2).masked_fill(~_SEEN, -torch.inf)], ids=["bool", "float"])
def test_torchs_attention_is_given_the_mask_as_it_is(mask):
    """It is 0 by itself for a query that sees nothing; what a program writes for that stays."""

    def guarded(x, m):
        sees = m.any(-1, keepdim=True)
        return torch.where(sees, F.scaled_dot_product_attention(x, x.sin(), x, torch.where(sees, m, True)), 7.0)

    def torchs(x, m):
        return F.scaled_dot_product_attention(x, x.sin(), x, m), m * 2

    x = _f(3, 2, 4)
    for f, count in [(torchs, 0), (guarded, 2)] if mask.dtype is torch.bool else [(torchs, 0)]:
        jitted = thunder.jit(f, transforms=[SubclassTransform()])
        torch.testing.assert_close(jitted(x, mask), f(x, mask))
        names = [b.sym.name for b in thunder.last_traces(jitted)[-1].bound_symbols]
        assert (names.count("scaled_dot_product_attention"), names.count("where")) == (1, count)


_KEYS = [slice(-5, None), (slice(None), slice(-9, 2)), (..., slice(-9, -1)), (None, 0, slice(-9, None, 2)), True, (0, True)]


@pytest.mark.parametrize("transform", [CheckpointTransform, SubclassTransform])
def test_slices_from_before_the_first_entry_and_bools_as_indices_are_torchs(transform):
    """Thunder refuses the first, and took True for 1."""

    def f(x, key):
        y = x * 2
        y[key] = 1.0
        return y + (x[key] * 3).sum()

    for key in _KEYS:
        x = _d(2, 3).requires_grad_()
        found, wanted = thunder.jit(f, transforms=[transform()])(x, key), f(x, key)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)))


def test_false_as_an_index_is_refused_where_nobody_runs_torch():
    with pytest.raises(UnsupportedOpError, match="bools"):
        thunder.jit(lambda x: x[False], transforms=[CheckpointTransform()])(_f(2))


@pytest.mark.parametrize("transform", [CheckpointTransform, ProfileTransform, SplitBiasTransform, SubclassTransform])
def test_what_thunder_lacks_is_run_by_torch_whichever_transform_there_is(transform):
    def f(x):
        rows = x.repeat_interleave(2, dim=0) + torch.zeros(size=(4, 3))
        return torch.cat([rows, rows], axis=1).mean(axis=1), rows.nanmedian(0).values

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    found, wanted = thunder.jit(f, transforms=[transform()])(x), f(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y[0].square().sum(), x)[0] for y in (found, wanted)))


@pytest.mark.parametrize(
    "transform", [CheckpointTransform, NormTransform, ProfileTransform, SplitBiasTransform, SubclassTransform]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_empty_vectors_are_joined_with_anything_as_in_torch(transform, dtype):
    """What caches of keys and values begin with, in transformers."""

    def joined(x):
        nothing = torch.tensor([], dtype=dtype)
        both = torch.concat([nothing, nothing], -2)
        return torch.cat([nothing, x, x], dim=-2), torch.cat((x, nothing), 1), torch.cat([x, both, x * 2]), both

    x = torch.randn(2, 3, 4, requires_grad=True)
    results = [f(x) for f in (thunder.jit(joined, transforms=[transform()]), joined)]
    gradients = [torch.autograd.grad(sum((t * t).sum() for t in found), x) for found in results]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(*gradients)
    assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]


@pytest.mark.parametrize("transform", [CheckpointTransform, SubclassTransform])
def test_bits_have_no_history(transform):
    x = _d(4).requires_grad_()
    for dtype in (torch.float64, torch.float32, torch.int64):
        assert not thunder.jit(lambda x, dtype=dtype: x.view(dtype) * 2, transforms=[transform()])(x).requires_grad


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 5), (3, 5), (2, 3, 2, 2)], ids=str)
def test_running_statistics_of_instance_norms_are_torchs(shape, with_gradients):
    kind = torch.nn.InstanceNorm2d if len(shape) == 4 else torch.nn.InstanceNorm1d
    mine, theirs = (kind(3, momentum=0.3, affine=True, track_running_stats=True).double() for _ in range(2))
    jitted, x = thunder.jit(mine, transforms=[NormTransform()]), _d(*shape).requires_grad_(with_gradients)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), theirs(x))
        x = x.detach() * 2 + 1
        x.requires_grad_(with_gradients)
    for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2), (2, 3, 2, 1), (0, 3), (2, 3, 0)], ids=str)
def test_losses_of_labels_are_torchs_in_single_precision(shape, reduction):
    """Thunder's fail for sums, and have no gradient where there are no labels."""
    torch.manual_seed(seeded(0))
    x, weight = torch.randn(shape).requires_grad_(), torch.tensor([1.0, 3.0, 0.5])
    labels = torch.randint(0, 3, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())

    def losses(x):
        smoothed = F.cross_entropy(x, labels, weight, reduction=reduction, label_smoothing=0.1)
        return F.nll_loss(x, labels, reduction=reduction), smoothed

    found, wanted = thunder.jit(losses, transforms=[NormTransform()])(x), losses(x)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    cotangents = [torch.arange(1.0, 1 + y.numel()).view_as(y) for y in wanted]
    torch.testing.assert_close(*(torch.autograd.grad(y, x, cotangents)[0] for y in (found, wanted)))


@pytest.mark.parametrize("label", [3, 9, -1])
@pytest.mark.parametrize("run", ["plain", "differentiated", "under grad", "under vmap"])
def test_labels_that_are_out_of_range_are_refused_as_torch_does(run, label):
    """Thunder's loss pads the scores by a class, which label 3 of 3 picks, and torch wraps all others around."""
    x, labels = torch.randn(2, 3), torch.tensor([0, label])
    jitted = thunder.jit(F.cross_entropy, transforms=[SubclassTransform()])
    if run == "differentiated":
        jitted(x.requires_grad_(), torch.tensor([0, 1])).backward()  # whose trace is used again
    with pytest.raises((IndexError, RuntimeError), match=f"(Target|index) {label} is out of"):
        if run == "under grad":
            grad(F.cross_entropy)(x, labels)
        elif run == "under vmap":
            vmap(F.cross_entropy)(x[None], labels[None])
        else:
            jitted(x, labels)


_PLACES = {
    "two": (lambda x, i: x[torch.tensor([0, 1]), i], 2),
    "apart": (lambda x, i: x[torch.tensor([0, 1]), :, i], 3),
    "after an ellipsis": (lambda x, i: x[..., torch.tensor([[0], [1]]), i], 3),
    "beside a list, a number and None": (lambda x, i: x[1, [0, 1], None, i], 3),
}


@pytest.mark.parametrize("places", [[3, -1], [-4, 2], [4, 0], [-5, 1]], ids=str)
@pytest.mark.parametrize("name", _PLACES)
def test_several_places_are_each_within_their_dimension_where_they_are_differentiated(name, places):
    """Thunder counts them as one number: a place that is out of range is an entry of the next row there."""
    f, ndim = _PLACES[name]
    x, i = torch.randn([4] * ndim, dtype=torch.float64, requires_grad=True), torch.tensor(places)
    runs = {
        "jitted": lambda: torch.autograd.grad(thunder.jit(f, transforms=[SubclassTransform()])(x, i).pow(2).sum(), x)[0],
        "grad": lambda: grad(lambda x, i: f(x, i).pow(2).sum())(x.detach(), i),
        "vmap": lambda: vmap(grad(lambda x, i: f(x, i).pow(2).sum()), in_dims=(0, None))(x.detach()[None], i)[0],
    }
    is_within = all(-4 <= n < 4 for n in places)
    wanted = torch.autograd.grad(f(x, i).pow(2).sum(), x)[0] if is_within else None
    for run in runs.values():
        if is_within:
            torch.testing.assert_close(run(), wanted)
        else:
            with pytest.raises((IndexError, RuntimeError), match="out of (bounds|range)"):
                run()


@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_leaves_the_running_statistics_of_batch_norms(training):
    norm, x = torch.nn.BatchNorm1d(3).train(training), torch.empty(0, 3, 4, requires_grad=True)
    thunder.jit(norm, transforms=[NormTransform()])(x).sum().backward()
    torch.testing.assert_close(list(norm.buffers())[:2], [torch.zeros(3), torch.ones(3)])
    torch.testing.assert_close(norm.weight.grad, torch.zeros(3))


_WEIGHT, _TARGET = torch.rand(5, dtype=torch.float64), torch.randint(0, 2, (5,)).double()
_LOSSES = {
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), _TARGET, weight=_WEIGHT),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x[None], torch.tensor([2]), weight=_WEIGHT),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, 2 * _TARGET - 1),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_losses_with_weights_and_targets_that_have_no_gradients_have_those_of_the_input(name):
    x = _d(5).requires_grad_()
    jitted = thunder.jit(_LOSSES[name], transforms=[NormTransform()])
    (found,), (wanted,) = (torch.autograd.grad(f(x), x) for f in (jitted, _LOSSES[name]))
    torch.testing.assert_close(found, wanted)


def test_relu_of_what_is_no_number_is_none_in_transformed_functions():
    """As torch has it; Thunder's has 0 there."""
    x = torch.tensor([-1.0, float("nan"), 2.0])
    for f in (lambda x: F.relu(x).sum(), lambda x: F.relu(x * 1.0, inplace=True).sum()):
        torch.testing.assert_close(grad(f)(x), torch.tensor([0.0, 1.0, 1.0]))
        torch.testing.assert_close(
            jvp(F.relu, (x,), (torch.ones(3),)), torch.func.jvp(F.relu, (x,), (torch.ones(3),)), equal_nan=True
        )


# What takes part in a promotion: tensors with dimensions, tensors without, numbers.
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)
_OPERANDS = [*(torch.ones(s, dtype=t) for t in _DTYPES for s in ((), (2,))), True, 2, 2.5, 2j]
_ELEMENTWISE = {
    "add": torch.add, "mul": torch.mul, "true_divide": torch.true_divide, "eq": torch.eq, "maximum": torch.maximum,
    "where": lambda a, b: torch.where(torch.tensor([True, False]), a, b), "cat": lambda a, b: torch.stack([a, b]).sum(0),
    "unsqueezed": lambda a, b: a[None] + b, "copysign": torch.copysign, "clamp": torch.clamp, "chained": lambda a, b: (a + b) * a,
}  # fmt: skip


@pytest.mark.parametrize("name", _ELEMENTWISE)
def test_promotions_are_torchs(name):
    pick, tried = random.Random(named_seed(name)), 0
    while tried < 12:
        a, b = pick.choice(_OPERANDS[:-4]), pick.choice(_OPERANDS)
        try:
            _ELEMENTWISE[name](a, b)
        except (RuntimeError, TypeError, NotImplementedError):  # torch has none for these
            continue
        tried += 1
        with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError):  # Thunder has none: it may say so
            _assert_is_torchs(_ELEMENTWISE[name], a, b)


_IN_PLACE = {
    "add": operator.iadd,
    "sub": operator.isub,
    "mul": torch.Tensor.mul_,
    "div": operator.itruediv,
    "pow": torch.Tensor.pow_,
}


@pytest.mark.parametrize("name", _IN_PLACE)
def test_what_does_not_fit_into_the_tensor_that_is_written_into_is_torchs_error(name):
    pick = random.Random(named_seed(name))
    jitted = thunder.jit(lambda a, b: _IN_PLACE[name](a * 1, b), transforms=[SubclassTransform()])
    for _ in range(12):
        a, b = pick.choice([t for t in _OPERANDS[:-4] if t.ndim]), pick.choice(_OPERANDS)
        try:
            wanted = _IN_PLACE[name](a * 1, b)
        except RuntimeError as e:
            with pytest.raises((RuntimeError, ThunderNormError)) as raised:
                jitted(a, b)
            assert isinstance(raised.value, ThunderNormError) or str(raised.value) == str(e)
            continue
        torch.testing.assert_close(jitted(a, b), wanted)


def _operand(dtype):
    """What has a dtype of Thunder's: a number, a tensor without dimensions (a weak one), one with."""
    if isinstance(dtype, type):
        return dtype(1)
    return torch.ones(() if dtype.is_weak else (2,), dtype=dtypes.to_torch_dtype(dtype))


def test_the_type_of_two_operands_is_torchs_whatever_they_are():
    known = [*utils._exact_dtype_to_number_map, *utils._inexact_dtype_to_number_map]
    unequal = []
    for a, b in itertools.product(known, known):
        if isinstance(a, type) and isinstance(b, type):
            continue
        try:
            wanted = torch.result_type(_operand(a), _operand(b))
        except RuntimeError:  # torch has none for these
            continue
        if wanted is getattr(torch, "bcomplex32", None):
            with pytest.raises(UnsupportedOpError, match="bcomplex32, which Thunder does not have"):
                mended_promotion(a, b)
            continue
        found = mended_promotion(a, b) or utils._elementwise_type_promotion(a, b)
        # of numbers and integers together Thunder says what Python would, and takes the default dtype for it
        found = (
            torch.result_type(torch.ones((), dtype=torch.int64), found(1))
            if isinstance(found, type)
            else dtypes.to_torch_dtype(found)
        )
        if found != wanted:
            unequal.append((a, b, found, wanted))
    assert not unequal


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.repeat_interleave(1), (2, 3)),
        (lambda x: torch.repeat_interleave(x, 1, dim=0), (2, 3)),
        (lambda x: torch.repeat_interleave(x.t(), repeats=1, dim=-1), (2, 3)),
        (lambda x: x.repeat_interleave(5), (1,)),
        (lambda x: x.repeat_interleave(4, 1), (2, 1, 3)),
        (lambda x: x.repeat_interleave(2, 1), (2, 3)),
    ],
)
def test_what_is_repeated_is_in_memory_of_its_own(function, shape, requires_grad):
    x = torch.arange(float(math.prod(shape))).view(shape).requires_grad_(requires_grad)
    want, got = function(x), thunder.jit(function, transforms=[SubclassTransform()])(x)
    assert torch.equal(got, want) and got.stride() == want.stride()
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
