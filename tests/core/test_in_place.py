"""In-place operations on normed tensors: what they compute, what shares its storage, in eager mode, traces and modular norms."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import LONG, crossed, seeded
from thunder_norm import LinfTensor, NormedTensor, RMSTensor, build_norm_map, norm_report
from thunder_norm.audit.op_db import outside_of_unittest
from thunder_norm.core.registry import has_rule
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, TransformError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

pytestmark = pytest.mark.usefixtures("frozen_heap")  # a refusal looks for views in garbage

ACTIVATIONS = {
    **{
        name: getattr(nn, name)
        for name in "ReLU ReLU6 SiLU Mish Hardswish Hardsigmoid Hardtanh ELU SELU CELU LeakyReLU RReLU".split()
    },
    **{name: getattr(nn, name) for name in "Dropout AlphaDropout FeatureAlphaDropout Dropout1d Dropout2d Dropout3d".split()},
    "Threshold": lambda inplace: nn.Threshold(0.1, 0.1, inplace=inplace),
}


def same(y, z, rtol=1e-12):
    """Whether two normed tensors are the same, data and claims."""
    assert type(y) is type(z) and y.elem_dims == z.elem_dims
    torch.testing.assert_close(y.norm_size, z.norm_size, rtol=rtol, atol=0)
    torch.testing.assert_close(y.backing, z.backing, rtol=1e-6, atol=1e-7)


# those that draw numbers are others in training
IN_TRAINING = [(name, True) for name in ACTIVATIONS if LONG or name == "RReLU" or "Dropout" in name]


@pytest.mark.parametrize(("name", "training"), [*((name, False) for name in ACTIVATIONS), *IN_TRAINING])
def test_in_place_module_is_as_its_out_of_place_one(name, training):
    """Positional and by name, in eager mode and traces."""
    shape = {"Dropout1d": (2, 3, 4), "Dropout2d": (2, 3, 4, 4), "Dropout3d": (2, 3, 2, 4, 4)}.get(name, (3, 4))
    x = RMSTensor.of(torch.randn(shape))
    results = []
    for inplace in (False, True):
        torch.manual_seed(seeded(0))
        m = nn.Sequential(nn.Linear(4, 4), ACTIVATIONS[name](inplace=inplace), nn.Linear(4, 4)).train(training)
        jm = thunder.jit(m, transforms=[NormTransform()])
        for f in (m, jm):
            torch.manual_seed(seeded(1))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    results.append(f(x))
            except (MissingNormRuleError, NormMismatchError) as e:
                results.append(type(e))
        results.append(ModularNorm(m, x).targets if inplace is False or isinstance(results[0], NormedTensor) else None)
    eager, traced, modular, eager_in_place, traced_in_place, modular_in_place = results
    assert isinstance(eager, NormedTensor)
    same(eager_in_place, eager)
    same(traced_in_place, traced)
    assert modular_in_place == modular


@pytest.mark.parametrize("where", ["eager", "trace"])
def test_every_spelling_of_in_place(where):
    spellings = [
        (lambda h: F.relu(h, True), F.relu),
        (lambda h: F.relu(h, inplace=True), F.relu),
        (lambda h: torch.relu_(h), F.relu),
        (lambda h: h.relu_(), F.relu),
        (lambda h: torch.ops.aten.relu_.default(h), F.relu),
        (lambda h: torch.ops.aten.relu_(h), F.relu),
        (lambda h: F.dropout(h, 0.0, True, True), lambda h: h.clone()),
        (lambda h: F.dropout(h, 0.3, False, True), lambda h: h.clone()),
        (lambda h: torch.dropout_(h, 0.3, False), lambda h: h.clone()),
        (lambda h: h.add_(1.0), lambda h: h + 1.0),
        (lambda h: h.add_(torch.ones(4), alpha=2), lambda h: torch.add(h, torch.ones(4), alpha=2)),
        (lambda h: h.mul_(torch.arange(4.0)), lambda h: h * torch.arange(4.0)),
        (lambda h: h.clamp_(-0.5, 0.5), lambda h: h.clamp(-0.5, 0.5)),
        (lambda h: h.clamp_(min=0), lambda h: h.clamp(min=0)),
        (
            lambda h: h.masked_fill_(torch.eye(4, dtype=torch.bool)[:3], 0.5),
            lambda h: h.masked_fill(torch.eye(4, dtype=torch.bool)[:3], 0.5),
        ),
        (lambda h: h.neg_().tanh_().sigmoid_(), lambda h: (-h).tanh().sigmoid()),
        (lambda h: F.leaky_relu_(h, 0.2), lambda h: F.leaky_relu(h, 0.2)),
        (lambda h: F.elu_(h), F.elu),
        (lambda h: F.hardtanh_(h, -1.0, 0.5), lambda h: F.hardtanh(h, -1.0, 0.5)),
        (lambda h: h.copy_(2 * h) if False else h.zero_(), lambda h: h * 0),
    ]
    x = RMSTensor.of(torch.randn(3, 4))
    for i, (in_place, out_of_place) in enumerate(spellings):

        def program(x, f=in_place):
            h = 2 * x
            g = h
            return f(h), h, g

        f = program if where == "eager" else thunder.jit(program, transforms=[NormTransform()])
        wanted = out_of_place(2 * x)
        for y in f(x):
            torch.testing.assert_close(y.backing, wanted.backing, rtol=1e-6, atol=1e-7, msg=str(i))
            assert RMSTensor.of(y.backing).norm_size <= y.norm_size * (1 + 1e-6), i


@pytest.mark.slow
@outside_of_unittest()
def test_every_in_place_variant_of_an_operator_with_a_rule():
    """Of torch's own operator database, on its own samples."""
    from torch.testing._internal.common_methods_invocations import op_db

    tried = 0
    for info in op_db:
        f = info.inplace_variant
        if f is None or not info.supports_dtype(torch.float64, "cpu") or not has_rule(info.op):
            continue
        if info.name == "as_strided":  # it changes which entries a tensor has: refused, see test_strided.py
            continue
        for sample in list(info.sample_inputs("cpu", torch.float64))[:3]:
            if not isinstance(sample.input, torch.Tensor):
                continue
            call = (*sample.args,), sample.kwargs
            try:
                real = sample.input.clone()
                torch.manual_seed(seeded(0))
                f(real, *call[0], **call[1])
                torch.manual_seed(seeded(0))
                wanted = info.op(RMSTensor.of(sample.input), *call[0], **call[1])
            except Exception:  # noqa: BLE001 - torch, or the rule, refuses it
                continue
            if not isinstance(wanted, NormedTensor) or wanted.shape != sample.input.shape:
                continue
            target = RMSTensor.of(sample.input).clone()
            torch.manual_seed(seeded(0))
            assert f(target, *call[0], **call[1]) is target, info.name
            torch.testing.assert_close(target.backing, real, rtol=0, atol=0, equal_nan=True)
            if type(target) is type(wanted):
                torch.testing.assert_close(target.norm_size, wanted.norm_size, rtol=1e-12, atol=0, equal_nan=True)
            tried += 1
    assert tried > 150


RESHAPES = [
    lambda y: y.view(-1),
    lambda y: y.reshape(8, 4),
    lambda y: y.detach(),
    lambda y: y.flatten(1),
    lambda y: y.view_as(y),
    lambda y: y.unsqueeze(1),
    lambda y: F.dropout(y, 0.5, training=False),
    lambda y: y.view(-1).view(4, 8),
]


@pytest.mark.parametrize("where", ["eager", "trace"])
@pytest.mark.parametrize("side", ["view", "base"])
def test_in_place_changes_what_has_the_same_elements(where, side):
    """As in torch: a tensor and its reshaped views are one."""
    given = torch.randn(4, 2, 4)
    for i, reshape in enumerate(RESHAPES):

        def program(x, reshape=reshape):
            y = 2 * x
            z = reshape(y)
            (z if side == "view" else y).add_(1.0).relu_()
            return y, z, y * 3

        f = program if where == "eager" else thunder.jit(program, transforms=[NormTransform()])
        for got, wanted in zip(f(RMSTensor.of(given)), program(given.clone()), strict=True):
            torch.testing.assert_close(got.backing, wanted, rtol=1e-6, atol=1e-7, msg=str(i))
            own = type(got).of(got.backing, got.elem_dims).norm_size
            assert own <= got.norm_size * (1 + 1e-6), i


TURNS = {
    "unsqueeze_": lambda y: y.unsqueeze_(1),
    "unsqueeze_ and squeeze_": lambda y: y.unsqueeze_(0).squeeze_(),
    "squeeze_ that does nothing": lambda y: y.squeeze_(0),
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.unsqueeze_(0).transpose_(0, 2),
    "swapaxes_, swapdims_": lambda y: y.swapaxes_(0, 1).unsqueeze_(-1).swapdims_(-1, 0),
}


@pytest.mark.parametrize("where", ["eager", "trace"])
@pytest.mark.parametrize("turn", TURNS)
def test_a_tensor_becomes_another_view_of_itself_in_place(turn, where):
    """BigBird-Pegasus: refused before, as if it were written into."""
    given = torch.randn(3, 4)

    def program(x):
        y = 2 * x
        same, part = y, y[1]
        back = TURNS[turn](y)
        return y, same.relu(), part, back + 1, y.sum(-1)

    f = program if where == "eager" else thunder.jit(program, transforms=[NormTransform()])
    for got, wanted in zip(f(RMSTensor.of(given)), program(given.clone()), strict=True):
        assert got.shape == got.size() == wanted.shape and got.stride() == wanted.stride()
        torch.testing.assert_close(got.backing, wanted)
        assert type(got).of(got.backing, got.elem_dims).norm_size <= got.norm_size * (1 + 1e-6)


@pytest.mark.parametrize("where", ["eager", "trace"])
def test_in_place_is_refused_where_others_would_not_know(where):
    refused = {
        "given from outside": lambda x: x.relu_(),
        "with one that was given from outside": lambda x: x.view(-1).relu_(),
        "of other elements": lambda x: (y := 2 * x, y.unfold(1, 2, 1).relu_(), y),
        "RMSTensor that was given from outside": lambda x: x.unsqueeze_(0),
        "in-place": lambda x: torch.zeros(12).view(3, 4).add_(x),
    }
    for message, program in refused.items():
        f = program if where == "eager" else thunder.jit(program, transforms=[NormTransform()])
        with pytest.raises(UnsupportedOpError, match=message):
            f(RMSTensor.of(torch.randn(3, 4)))


def test_operators_of_tensors_that_python_wraps_are_no_in_place_functions():
    x = RMSTensor.of(torch.randn(3, 4))
    for f in (lambda x: x**3, lambda x: torch.Tensor.__pow__(x, 2), lambda x: 1 - x, lambda x: torch.Tensor.__rsub__(x, 1)):
        assert isinstance(f(x), NormedTensor)


def test_dropout_in_place_that_does_nothing_may_have_the_input():
    m = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(4, 2)).eval()
    x = RMSTensor.of(torch.randn(3, 4))
    same(m(x), m[1](x))
    same(thunder.jit(m, transforms=[NormTransform()])(x), m[1](x), rtol=1e-5)  # sigma_max of float32 weights


def test_a_kind_that_the_result_has_not_is_converted():
    y = 2 * LinfTensor.of(torch.tensor([[3.0, 4.0]]))
    y.add_(RMSTensor.of(torch.tensor([[0.0, 2.0]])))
    assert type(y) is LinfTensor and y.norm_size.item() >= 10


def test_classifier_head_that_flattens_and_drops_in_place():
    """torchvision's efficientnet, mobilenet and vgg end like this."""
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2, inplace=True), nn.Linear(4, 3), nn.ReLU(inplace=True)
    )
    plain = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), head[3], nn.ReLU())
    x = torch.randn(2, 4, 5, 5)
    for training in (False, True):
        head.train(training), plain.train(training)
        results = []
        for m in (plain, head):
            for f in (m, thunder.jit(m, transforms=[NormTransform()])):
                torch.manual_seed(seeded(0))
                results.append(f(RMSTensor.of(x)))
        same(results[2], results[0])
        same(results[3], results[1])
        assert ModularNorm(head, x).targets == {k: v for k, v in ModularNorm(plain, x).targets.items()}
        assert (
            build_norm_map(head, x, parameters="unit")(RMSTensor(1.0)).norm_size
            == build_norm_map(plain, x, parameters="unit")(RMSTensor(1.0)).norm_size
        )
        assert len(norm_report(thunder.jit(head, transforms=[NormTransform()]), RMSTensor.of(x)).rows) >= 5


def _through_views(t):
    u = t * 2
    v = u.T
    v.sin_()
    return u.cos() + v.T


def _written_places(t):
    u = t.clone()
    u[0, 0] = u[0, 1] * 2
    return u * u


def _a_copy_that_is_changed(t):
    u = (t * 2).reshape(-1)
    u.sin_()
    return u


def _accumulated(t):
    total = torch.zeros(2, dtype=t.dtype)
    total.add_(t[0])
    return total.sin_()


DIFFERENTIATED = {
    "sin_": lambda t: (t + 1).sin_(),
    "pow_ twice": lambda t: (t + 0).pow_(2).pow_(2),
    "of a clone": lambda t: t.clone().pow_(2),
    "silu": lambda t: F.silu(t + 1, inplace=True) * t,
    "through views": _through_views,
    "written places": _written_places,
    "a copy": _a_copy_that_is_changed,
    "accumulated": _accumulated,
}


@pytest.mark.parametrize(("name", "transform"), crossed(DIFFERENTIATED, [NormTransform, SubclassTransform]))
def test_gradients_of_jitted_programs_with_in_place_operations(name, transform):
    """Thunder's backward reads what they wrote over."""
    f = DIFFERENTIATED[name]
    x = torch.tensor([[-0.11, 0.7]], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(f(x).sin().sum(), (x,))
    y = thunder.jit(f, transforms=[transform()])(x)
    torch.testing.assert_close(y, f(x))
    torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), (x,))[0], expected)


def test_buffers_are_changed_in_place_beside_a_gradient():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen.mul_(0.5).add_(x)
            return (x * self.weight).sin_()

    model, eager = Counting(), Counting()
    jitted = thunder.jit(model, transforms=[SubclassTransform()])
    for x in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])):
        for m in (jitted, eager):
            m(x).sum().backward()
    torch.testing.assert_close(model.seen, eager.seen)
    torch.testing.assert_close(model.weight.grad, eager.weight.grad)


def test_a_tensor_that_may_have_been_changed_is_refused_where_it_is_used():
    def f(t):
        u = t * 2
        u.reshape(-1).sin_()
        return u

    with pytest.raises(TransformError, match="may share memory"):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.ones(2, 2, requires_grad=True))
