"""Attributes of wrappers are what Python says, whatever torch has under the same name; those of plain tensors are torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.seeds import seeded
from tests.subclasses import assert_same, two
from thunder_norm.errors import NothingWrittenWarning, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform, grad
import thunder

TRANSFORMS = (SubclassTransform, NormTransform, SplitBiasTransform)


def jit(f):
    return thunder.jit(f, transforms=[SubclassTransform()])


def class_with(name: str) -> type[torch.Tensor]:
    """A wrapper class whose inner tensor is called `name`."""

    class Named(torch.Tensor):
        @staticmethod
        def __new__(cls, value):
            return torch.Tensor._make_wrapper_subclass(cls, torch.Tensor.size(value), dtype=value.dtype)

        def __init__(self, value):
            setattr(self, name, value)

        def __tensor_flatten__(self):
            return [name], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            return Named(inner[name])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            args, kwargs = tree_map_only(cls, lambda x: vars(x)[name], (args, kwargs or {}))
            return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    return Named


@pytest.mark.parametrize("name", ["mean", "var", "t", "size", "add", "view", "__mul__", "numel", "item", "values", "indices"])
def test_an_inner_tensor_called_as_a_method_is_the_tensor(name):
    x = class_with(name)(torch.randn(3, 2))
    f = eval(f"lambda x: x.{name} - 2", {})  # noqa: S307
    assert torch.equal(jit(f)(x), f(x))


class Odd(TwoTensor):
    """All sorts of class attributes."""

    number = 3
    kind = torch.nn.Linear  # a class as attribute is no method
    partial = functools.partial(torch.mul, other=3)

    @property
    def data(self):
        return self.a * 7

    @functools.cached_property
    def cached(self):
        return self.a + self.b

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Odd(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        a, b = (tree_map_only(cls, lambda x, n=n: getattr(x, n), args) for n in "ab")
        return cls(func(*a, **(kwargs or {})), func(*b, **(kwargs or {})))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.data,
        lambda x: x.cached * x.cached,
        lambda x: x.a * x.number,
        lambda x: x.partial(x.a),
        lambda x: x.a * (2 if x.kind is torch.nn.Linear else 3),
    ],
)
def test_attributes_of_the_class_are_what_python_hands_out(f: Callable):
    make = functools.partial(Odd, torch.ones(2), torch.full((2,), 5.0))
    assert torch.equal(jit(f)(make()), f(make()))


class Reading(TwoTensor):
    """Reads its attributes itself, by `super`."""

    def __getattribute__(self, name):
        if name == "four":
            return super().__getattribute__("twice") * 2
        if name == "many":
            return 5
        if name.startswith("no_"):
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __getattr__(self, name):
        if name == "no_instead":
            return 7
        raise AttributeError(f"never {name}")

    @property
    def twice(self):
        return self.a * 2

    def times(self, n):
        return self.b * n

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Reading(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        a, b = (tree_map_only(cls, lambda x, n=n: getattr(x, n), args) for n in "ab")
        return cls(func(*a, **(kwargs or {})), func(*b, **(kwargs or {})))


class ReadingByObject(Reading):
    """The same by Python's own, named."""

    def __getattribute__(self, name):
        return self.b * 3 if name == "three" else object.__getattribute__(self, name)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return ReadingByObject(inner["a"], inner["b"])


def _message(x: torch.Tensor) -> Any:
    try:
        return x.no_such
    except AttributeError as e:
        return str(e)


@pytest.mark.parametrize("cls", [Reading, ReadingByObject])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.twice + x.a,
        lambda x: x.sin().times(n=3) * x.shape[0],
        lambda x: getattr(x, "no_such", 3) * x.a,
        lambda x: (hasattr(x, "no_such"), hasattr(x, "twice"), x.dtype, x.requires_grad),
        lambda x: getattr(x, "four", None),
        lambda x: getattr(x, "three", None),
        lambda x: getattr(x, "many", 1) * x.b,
        lambda x: getattr(x, "no_instead", 1) * x.b,
        lambda x: (_message(x), x.a),
        lambda x: (x * 2).twice,
    ],
)
def test_what_a_class_reads_itself_is_what_it_hands_out(f: Callable, cls: type):
    make = functools.partial(cls, torch.ones(2), torch.full((2,), 5.0))
    jf = jit(f)
    for _ in range(2):
        assert_same(jf(make()), f(make()))


# -- plain tensors ----------------------------------------------------------------------------------------------------

DEVICE = torch.device("cpu")

QUESTIONS: dict[str, Callable] = {
    "type": lambda x: type(x) is torch.Tensor,
    "type of a result": lambda x: type(x * 2) is torch.Tensor,
    "class": lambda x: x.__class__ is torch.Tensor,
    "device": lambda x: x.device == DEVICE,
    "device as text": lambda x: str(x.device) == "cpu",
    "class of a device": lambda x: isinstance(x.device, torch.device),
    "dtype": lambda x: x.dtype in (torch.float16, torch.float32),
    "parameter": lambda x: not isinstance(x, nn.Parameter),
    "attribute": lambda x: hasattr(x, "stride"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_programs_are_told_what_eager_ones_are(question, transform):
    def f(x):
        return x * 2 if QUESTIONS[question](x) else x * 3

    x = torch.ones(2)
    assert torch.equal(thunder.jit(f, transforms=[transform()])(x), f(x))
    assert grad(lambda x: f(x).sum())(x).tolist() == [2.0, 2.0]


def test_sizes_of_wrappers_are_torchs():
    def f(x):
        return x.size(), x.shape, [x.size(), (x * 2).size()], isinstance(x.size(), torch.Size), f"{x.size()}", x.T.size()[1:]

    found, expected = jit(f)(two(3, 4)), f(two(3, 4))
    assert found == expected
    assert [type(v) for v in (*found, *found[2])] == [type(v) for v in (*expected, *expected[2])]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "f", [lambda x: x * (2 if type(x) is nn.Parameter else 3), lambda x: x * (2 if isinstance(x, nn.Parameter) else 3)]
)
def test_a_trace_serves_inputs_of_the_type_it_was_made_for(f, transform):
    jf = thunder.jit(f, transforms=[transform()])
    tensor, parameter = torch.ones(1), nn.Parameter(torch.ones(1), requires_grad=False)
    assert [jf(v).item() for v in (tensor, parameter, tensor, parameter)] == [3.0, 2.0, 3.0, 2.0]
    assert thunder.cache_misses(jf) == 2


def test_a_trace_serves_inputs_of_the_layout_it_was_made_for():
    def f(x):
        return (x * x.stride(0) + x.storage_offset()) * (2 if x.is_contiguous() else 3)

    jf = jit(f)
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(6, 4)[1:4], torch.randn(3, 4)):
        assert torch.equal(jf(x), f(x))
    assert thunder.cache_misses(jf) == 3


def test_the_layout_of_what_is_computed_is_eager_modes():
    def f(x):
        y = x.t() * 2
        return x * y.stride(0) + y.stride(1) + (10 if y.is_contiguous() else 20) + (30 if y.t().is_contiguous() else 40)

    jf = jit(f)
    for x in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3)):
        torch.testing.assert_close(jf(x), f(x))
    with pytest.raises(UnsupportedOpError, match=r"storage_offset\(\) of a plain tensor that is no input"):
        jit(lambda x: x * (x * 2).storage_offset())(torch.ones(2))


@pytest.mark.parametrize(
    "ask", [torch.is_conj, torch.is_neg, lambda x: x.is_conj(), lambda x: x.is_neg(), lambda x: x.real.is_conj()]
)
@pytest.mark.parametrize("make", [lambda x: x, torch.conj, lambda x: x.conj().imag])
def test_what_torch_has_put_off_of_inputs_is_eager_modes(ask, make):
    def f(x):
        return x * (2 if ask(x) else 3)

    jf, x = jit(f), torch.randn(3, dtype=torch.complex64)
    for given in (make(x), x, x.conj(), x.conj().imag, x.real):
        torch.testing.assert_close(jf(given), f(given))


@pytest.mark.parametrize("ask", [lambda x: x.conj().is_conj(), lambda x: torch.is_conj(x * 2), lambda x: x.imag.is_neg()])
def test_what_torch_has_put_off_of_what_is_computed_is_refused(ask):
    with pytest.raises(UnsupportedOpError, match=r"is_(conj|neg)\(\) of a tensor that is no input"):
        jit(lambda x: x * (2 if ask(x) else 3))(torch.randn(3, dtype=torch.complex64))


@pytest.mark.parametrize("ask", [lambda x: x.is_inference(), lambda x: torch.is_inference(x), lambda x: (x * 2).is_inference()])
def test_what_was_made_in_inference_mode_is_known_of_inputs(ask):
    """Of what is computed while there was no such mode, too; of other tensors it was always false."""

    def inside(x):
        with torch.inference_mode():
            return ask(x * 2)

    with torch.inference_mode():
        made = torch.ones(2)
    jf = jit(ask)
    for given in (torch.ones(2), made, torch.ones(2)):
        assert jf(given) is ask(given)
    with pytest.raises(UnsupportedOpError, match=r"is_inference\(\) of a tensor that is no input"):
        jit(inside)(torch.ones(2))
    with torch.inference_mode(), pytest.raises(UnsupportedOpError, match=r"is_inference\(\) of a tensor that is no input"):
        jit(lambda x: ask(x * 2))(torch.ones(2))


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x.detach() * 2, lambda x: x > 0, lambda x: x])
def test_intermediate_results_require_grad_as_in_eager_mode(make, requires_grad, is_enabled):
    def f(x):
        return x * (2 if make(x).requires_grad else 3)

    x = torch.ones(2, requires_grad=requires_grad)
    with torch.set_grad_enabled(is_enabled):
        assert torch.equal(jit(f)(x), f(x))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("pattern", "how"), [("a b -> a", "mean"), ("a b -> b", "max"), ("a b -> ", "sum")])
def test_einops_reduces(pattern, how, transform):
    einops = pytest.importorskip("einops")

    def f(x):
        return einops.reduce(x, pattern, how)

    x = torch.randn(4, 3)
    torch.testing.assert_close(thunder.jit(f, transforms=[transform()])(x), f(x))


@pytest.mark.parametrize(
    "f",
    [lambda x: x.round() * x, lambda x: torch.lerp(x, x * x, 0.3), lambda x: x * x.isfinite(), lambda x: torch.signbit(x) * x],
)
def test_operations_without_a_gradient_of_thunders_are_differentiated(f):
    grads = []
    for g in (f, jit(f)):
        x = torch.tensor([0.4, -1.7, 2.2], requires_grad=True)
        g(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


_STORED = [
    *(
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "is_leaf",
        "retains_grad",
        "layout",
        "name",
        "itemsize",
    ),
    *("nbytes", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xla", "is_xpu"),
]


@pytest.mark.parametrize("name", _STORED)
@pytest.mark.parametrize("transform", TRANSFORMS[:2])
def test_how_a_tensor_is_stored_is_said_as_in_eager_mode(name, transform):
    def f(x):
        y = x + 1
        return y, getattr(x, name), getattr(y, name), getattr(torch.ones(2), name)

    for x in (torch.ones(3), torch.ones(3, dtype=torch.float64)):
        assert thunder.jit(f, transforms=[transform()])(x)[1:] == f(x)[1:]


def test_a_trace_serves_tensors_that_are_stored_alike():
    jitted = jit(lambda x: x.to_dense() if x.is_sparse else x * 2)
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for expected, given in ((x * 2, x), (x, x.to_sparse()), (x * 2, x)):
        assert torch.equal(jitted(given), expected)
    assert thunder.cache_misses(jitted) == 2


def test_attributes_that_a_user_sets_on_a_tensor():
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Buffer(torch.ones(3), persistent=False)
            self.scale = nn.Parameter(torch.ones(3))
            self.scale.by = 2.0

        def forward(self, x):
            self.table = self.table  # torch asks a buffer whether it is persistent
            by = self.scale.by * getattr(self.scale, "absent", 1.5)
            return x * self.scale * by + (1 if self.table.persistent else getattr(self.table, "persistent", 3))

    model, x = Marked(), torch.randn(3)
    for transform in TRANSFORMS[:2]:
        jitted = thunder.jit(model, transforms=[transform()])
        for by in (2.0, 5.0):
            model.scale.by = by
            torch.testing.assert_close(jitted(x), model(x))
        assert thunder.cache_misses(jitted) == 2 and type(vars(model)["_buffers"]["table"]) is type(Marked().table)


METHODS = {
    "broadcast_to": lambda x: (x[:, None] + 1).broadcast_to(3, 5, 4),
    "of a tuple": lambda x: x.broadcast_to((2, 3, 4)),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "moveaxis": lambda x: (x * 2).moveaxis(0, 1),
    "rot90": lambda x: x.rot90(),
    "diff": lambda x: x.diff(),
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "hypot": lambda x: x.hypot(x.exp()),
    "sinc": lambda x: x.sinc(),
    "with a default": lambda x: getattr(x, "kron", None)(x),
    "absent": lambda x: getattr(x, "no_such_method", lambda: x + 2)(),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("transform", TRANSFORMS[:2])
def test_methods_that_thunder_lacks_are_torchs(name, transform):
    f, x = METHODS[name], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    found = thunder.jit(f, transforms=[transform()])(x)
    torch.testing.assert_close(found, f(x))
    torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), x), torch.autograd.grad(f(x).sin().sum(), x))


@pytest.mark.parametrize("transform", TRANSFORMS[:2])
@pytest.mark.parametrize("of", [lambda x: x, lambda x: x + 1])
@pytest.mark.parametrize("asked", [lambda x: x.data_ptr(), lambda x: x.untyped_storage().data_ptr(), lambda x: x._version])
def test_what_a_trace_cannot_know_of_a_tensor_is_refused(asked, of, transform):
    with pytest.raises(UnsupportedOpError):
        thunder.jit(lambda x: x * 2 if asked(of(x)) else x, transforms=[transform()])(torch.ones(2))


def _ragged():
    return torch.nested.nested_tensor_from_jagged(torch.ones(5, 2), torch.tensor([0, 2, 5]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: _ragged().requires_grad_(),
        lambda: _ragged().requires_grad_() * 1,
        lambda: torch.nested.nested_tensor_from_jagged(torch.ones(5, 2).requires_grad_(), torch.tensor([0, 2, 5])),
        lambda: TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_() * 1,
    ],
    ids=["jagged leaf", "jagged", "jagged view", "TwoTensor"],
)
def test_what_autograd_knows_of_a_wrapper_is_said_as_in_eager_mode(make):
    def f(x):
        return x.is_leaf, x.requires_grad, x._version, x * 2

    x = make()
    assert jit(f)(x)[:3] == f(x)[:3]


def test_the_address_of_a_wrapper_is_refused():
    with pytest.raises(UnsupportedOpError, match="data_ptr"):
        jit(lambda x: x * 2 if x.data_ptr() else x)(TwoTensor(torch.ones(2), torch.ones(2)))


DATA_SET: dict[str, Callable] = {
    "to a wrapper": lambda x, y, p: setattr(x, "data", y),
    "to a plain input": lambda x, y, p: setattr(x, "data", p),
    "to what is computed of it": lambda x, y, p: setattr(x, "data", x.data * 0.5),
    "without autograd": lambda x, y, p: torch.no_grad()(lambda: setattr(x, "data", y.detach()))(),
    "before a write": lambda x, y, p: (setattr(x, "data", y), torch.no_grad()(lambda: x.mul_(3))()),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", DATA_SET)
def test_data_of_a_wrapper_that_is_set_changes_nothing_as_in_eager_mode(name: str, requires_grad: bool):
    """`torch.compile` writes the value into the wrapper."""

    def f(x, y, p):
        DATA_SET[name](x, y, p)
        return x * y

    def called(g):
        torch.manual_seed(seeded(0))
        x = two(2, 3).requires_grad_(requires_grad)
        result = g(x, y := two(2, 3), torch.randn(2, 3))
        gradients = torch.autograd.grad(result.sum(), x) if requires_grad else ()
        return result.detach(), x.detach(), y, gradients

    jitted, want = jit(f), called(f)
    with pytest.warns(NothingWrittenWarning, match=r"\.data of a TwoTensor is set(.|\n)*test_attributes.py"):
        assert_same(called(jitted), want)
    assert_same(called(jitted), want)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


@pytest.mark.parametrize("value", [lambda p: p.T, lambda p: p.double(), lambda p: p[:1], lambda p: p + 1])
def test_data_of_a_wrapper_set_to_what_is_laid_out_otherwise_or_may_be_is_refused(value: Callable):
    def f(x, p):
        x.data = value(p)
        return x + 1

    with pytest.raises(UnsupportedOpError, match="attribute 'data' of a TwoTensor"):
        jit(f)(two(3, 3), torch.ones(3, 3))


class _ReadsAbove(TwoTensor):
    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return _ReadsAbove(inner["a"], inner["b"])

    def __getattr__(self, name):
        if name == "second":
            return self.b
        raise AttributeError(name)

    def read(self, name, default):
        try:
            return super().__getattribute__(name)
        except AttributeError:
            return default


class _Remembers(Odd):
    """Operations leave in a result what they were."""

    def __init__(self, a, b):
        super().__init__(a, b)
        self.made_by = None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return _Remembers(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        made.made_by = [func]
        return made


def test_what_operations_leave_in_a_result_that_is_no_data_takes_nothing_from_it():
    x = _Remembers(torch.ones(3), torch.ones(3))
    found = jit(lambda x: x * 2)(x)
    assert found.made_by is None  # as its class puts it together: what was left is of the call that was traced
    assert_same(found * 2, x * 4)


def test_attributes_read_by_getattribute_are_eager_modes():
    def f(x):
        made = _ReadsAbove(x.b, x.a)
        return (
            *(x.second, x.read("second", x.a), x.read("b", None), made.read("a", None)),
            *(object.__getattribute__(x, "a") * x.__getattribute__("ndim"), super(TwoTensor, x).__getattribute__("shape")[0]),
        )

    x = _ReadsAbove(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    found, wanted = thunder.jit(f, transforms=[SubclassTransform()])(x), f(x)
    torch.testing.assert_close(list(found[:-1]), list(wanted[:-1]))
    assert found[-1] == wanted[-1]
