"""torch.autograd.Function on plain tensors means in jitted programs, and under transforms, what it means in torch.

The backward of each is not the derivative of its forward, so that one cannot stand for the other.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import NormTransform, SplitBiasTransform, SubclassTransform, grad, jvp, vmap
import thunder

Function = torch.autograd.Function
TRANSFORMS = (SubclassTransform, NormTransform, SplitBiasTransform)


class Classic(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x


class WithSetup(Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def vmap(info, in_dims, x):
        raise AssertionError("torch's vmap is not in use")

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (x + y)


class Numbers(Function):
    @staticmethod
    def forward(ctx, x, n, flag=True):
        ctx.n, ctx.flag, ctx.shape = n, flag, x.shape
        return x * n if flag else x.exp()

    @staticmethod
    def backward(ctx, g):
        return (g * ctx.n * 5).reshape(ctx.shape), None, None


class Two(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y * 2 + h, (g * x + h * 7 if ctx.needs_input_grad[1] else None)


class Sorting(Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort()
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, g, _):
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, indices, g) * 2


class Attribute(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.exp(x)
        return ctx.y * 1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.y * 2


class Straight(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


PROGRAMS = {
    "classic": (lambda x, y: Classic.apply(x).sin(), 2),
    "one after the other": (lambda x, y: Classic.apply(Straight.apply(x * 2)) * y, 2),
    "setup_context": (lambda x, y: WithSetup.apply(x).sin(), 2),
    "numbers": (lambda x, y: Numbers.apply(x, 3) + Numbers.apply(y, 2, False), 2),
    "two results": (lambda x, y: Two.apply(x, y), 2),
    "two results, one gradient": (lambda x, y: Two.apply(x, y), 1),
    "not differentiable": (lambda x, y: Sorting.apply(x), 2),
    "attribute": (lambda x, y: Attribute.apply(x) + y, 2),
    "straight through": (lambda x, y: Straight.apply(x * 2) * y, 2),
    "no gradients": (lambda x, y: (WithSetup.apply(x), Two.apply(x, y)[1]), 0),
}


def run(f, num_differentiated: int):
    x = torch.tensor([0.3, -1.2, 2.1], dtype=torch.float64).requires_grad_(num_differentiated > 0)
    y = torch.tensor([1.5, 0.4, -0.7], dtype=torch.float64).requires_grad_(num_differentiated > 1)
    out = f(x, y)
    outs = out if isinstance(out, tuple) else (out,)
    tracked = [t for t in outs if t.requires_grad]
    if tracked:
        torch.autograd.backward(tracked, [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)] * len(tracked))
    return [t.detach() for t in outs], [t.grad for t in (x, y)]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_torchs(name, transform):
    f, count = PROGRAMS[name]
    torch.testing.assert_close(run(thunder.jit(f, transforms=[transform()]), count), run(f, count))


@pytest.mark.parametrize(
    "program", ["classic", "setup_context", "numbers", "straight through", "attribute", "one after the other"]
)
def test_transforms_take_the_functions_backward(program):
    f, _ = PROGRAMS[program]
    x, y = torch.tensor([0.3, -1.2, 2.1]), torch.tensor([1.5, 0.4, -0.7])
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(f(leaf, y).sum(), leaf)
    torch.testing.assert_close(grad(lambda x: f(x, y).sum())(x), want)
    torch.testing.assert_close(thunder.jit(grad(lambda x: f(x, y).sum()), transforms=[SubclassTransform()])(x), want)
    torch.testing.assert_close(vmap(grad(lambda x, y: f(x, y).sum()))(x[:, None], y[:, None])[:, 0], want)
    torch.testing.assert_close(grad(lambda x: vmap(f)(x[:, None], y[:, None]).sum())(x), want)
    torch.testing.assert_close(jvp(lambda x: f(x, y), (x,), (torch.ones(3),))[1], want)  # elementwise: the Jacobian is diagonal


class SavesResult(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.other = y.detach() * 2
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y * 3 + g * ctx.other


class CallsOthers(Function):
    """Its backward calls functions whose backwards are no derivatives, one of them twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * SavesResult.apply(Classic.apply(x)) * Classic.apply(x)


class Sine(Function):
    """Its backward calls one whose backward calls it."""

    @staticmethod
    def forward(ctx, x, is_cosine):
        ctx.save_for_backward(x)
        ctx.is_cosine = is_cosine
        return x.cos() if is_cosine else x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * Sine.apply(x, not ctx.is_cosine) * (-1 if ctx.is_cosine else 1), None


AGAIN = {
    "an argument": lambda x: Classic.apply(x) ** 2 + x,
    "a result": lambda x: SavesResult.apply(x * 1.5) * x,
    "functions in the backward": lambda x: CallsOthers.apply(x) * SavesResult.apply(x),
    "itself in the backward": lambda x: Sine.apply(x, False) ** 2,
    "derivatives inside": lambda x: torch.autograd.grad(CallsOthers.apply(x).sin().sum(), x, create_graph=True)[0] * x,
}


def derivatives(f, order: int = 3):
    x = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64, requires_grad=True)
    found = [f(x)]
    for _ in range(order):
        found += torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)
    return [t.detach() for t in found]


@pytest.mark.parametrize("name", AGAIN)
def test_derivatives_of_higher_order_are_those_of_the_backward(name):
    order = 2 if name == "derivatives inside" else 3
    jf = thunder.jit(AGAIN[name], transforms=[SubclassTransform()])
    torch.testing.assert_close(derivatives(jf, order), derivatives(AGAIN[name], order))


def test_second_derivatives_of_a_batch_are_those_of_the_backward():
    f = AGAIN["functions in the backward"]
    x = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    torch.testing.assert_close(vmap(grad(grad(f)))(x), second)
    torch.testing.assert_close(grad(lambda x: vmap(grad(f))(x).sum())(x), second)


def test_a_derivative_that_has_no_end_is_refused():
    x = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    found = thunder.jit(AGAIN["itself in the backward"], transforms=[SubclassTransform()])(x)
    with pytest.raises(UnsupportedOpError, match="order 4 through Sine"):
        for _ in range(5):
            (found,) = torch.autograd.grad(found.sum(), x, create_graph=True)


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_a_function_without_backward_runs_forwards():
    x = torch.ones(2, requires_grad=True)
    out = thunder.jit(lambda x: NoBackward.apply(x), transforms=[SubclassTransform()])(x)
    assert out.tolist() == [2.0, 2.0]
    with pytest.raises(UnsupportedOpError, match="NoBackward"):
        out.sum().backward()


def test_a_function_that_changes_its_argument_is_refused():
    with pytest.raises(UnsupportedOpError, match="in place|mul_"):
        thunder.jit(lambda x: InPlace.apply(x * 1), transforms=[SubclassTransform()])(torch.ones(2))


NOTED: list = []


class NotesBackward(Function):
    @staticmethod
    def forward(ctx, x, noted):
        ctx.noted = noted
        return x * 2

    @staticmethod
    def backward(ctx, g):
        NOTED.append(1)
        ctx.noted["n"] = 1
        return g * 3, None


class NotesForward(Function):
    @staticmethod
    def forward(ctx, x, noted):
        noted.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3, None


def test_what_a_backward_leaves_in_objects_is_refused_and_is_not_there():
    x = torch.ones(2, requires_grad=True)

    def program(x):
        noted = {}
        return NotesBackward.apply(x, noted), noted

    y, noted = thunder.jit(program, transforms=[NormTransform()])(x)
    assert y.tolist() == [2.0, 2.0]
    with pytest.raises(UnsupportedOpError, match="the backward of NotesBackward changes a"):
        y.sum().backward()
    assert not NOTED
    assert not noted


def test_what_a_forward_puts_into_a_list_of_the_program_is_refused():
    def program(x):
        noted = []
        return NotesForward.apply(x, noted), len(noted)

    with pytest.raises(UnsupportedOpError, match="the forward of NotesForward changes a list"):
        thunder.jit(program, transforms=[NormTransform()])(torch.ones(2, requires_grad=True))


class Asks(Function):
    """Asks for values of what it is given, in its backward too."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x * 2 if (t[1:] > t[:-1]).all() else x * float(t[0]) * (5 if torch.equal(t, t.flip(0)) else 7)

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        return g * (2 if t[0] > 1 else 3), None


@pytest.mark.parametrize("of", [lambda t: t, lambda t: t * 2 - 1, lambda t: torch.tensor([1.0, 2.0])])
def test_values_that_a_function_asks_for_are_looked_at_in_each_call(of):
    def program(x, t):
        return Asks.apply(x, of(t)) + x

    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for t in ([1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 3.0]):
        x = torch.ones(2, requires_grad=True)
        result, expected = (f(x, torch.tensor(t)) for f in (jitted, program))
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (result, expected)))


class Again(Function):
    """Runs a module anew in its backward, as functions do that keep no activations."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.module(x), (x, *parameters), g)


class Reversible(Function):
    """Adds to the gradients of the module's parameters itself."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), g)
        return x.grad, None


MODULE = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Again.apply(MODULE, x * 2, *MODULE.parameters()),
        lambda x: Reversible.apply(x * 2, MODULE),
        lambda x: Reversible.apply(x, MODULE) + MODULE(x),
    ],
)
def test_gradients_of_modules_that_a_function_runs_are_torchs(program):
    def gradients(f):
        for p in (x, *MODULE.parameters()):
            p.grad = None
        f(x).square().sum().backward()
        return [p.grad for p in (x, *MODULE.parameters())]

    x = torch.tensor([0.3, -1.2], requires_grad=True)
    jitted = thunder.jit(program, transforms=[SubclassTransform()])
    for _ in range(2):
        torch.testing.assert_close(gradients(jitted), gradients(program))


class OfNoArgument(Reversible):
    @staticmethod
    def forward(ctx, x):
        return Reversible.forward(ctx, x, MODULE)

    @staticmethod
    def backward(ctx, g):
        return Reversible.backward(ctx, g)[0]


def test_gradients_of_what_a_function_is_not_given_are_refused_and_stay_what_they_are():
    x = torch.ones(2, requires_grad=True)
    for p in MODULE.parameters():
        p.grad = None
    y = thunder.jit(lambda x: OfNoArgument.apply(x), transforms=[SubclassTransform()])(x)
    torch.testing.assert_close(y, MODULE(x))
    with pytest.raises(UnsupportedOpError, match="give the function the tensor or the module"):
        y.sum().backward()
    assert all(p.grad is None for p in MODULE.parameters())


SHOWN: list = []


@torch.library.custom_op("thunder_norm_tests::shown_in_function", mutates_args=())
def shown(x: torch.Tensor) -> None:
    SHOWN.append(x.clone())


shown.register_fake(lambda x: None)


class ShowsForward(Function):
    @staticmethod
    def forward(ctx, x):
        shown(x * 2)
        return x * 3

    @staticmethod
    def backward(ctx, g):
        return g * 3


class ShowsBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, g):
        shown(g)
        return g * 3


def test_operators_that_return_nothing_are_refused_inside_of_a_function():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedOpError, match="shown_in_function"):
        thunder.jit(lambda x: ShowsForward.apply(x), transforms=[SubclassTransform()])(x)
    result = thunder.jit(lambda x: ShowsBackward.apply(x).sum(), transforms=[SubclassTransform()])(x)
    with pytest.raises(UnsupportedOpError, match="ShowsBackward"):
        result.backward()


class Scaled(torch.autograd.Function):
    """A product whose options come in a dict."""

    @staticmethod
    def forward(ctx, a, b, options):
        ctx.save_for_backward(a, b)
        ctx.options = options
        return a * b * options["scale"]

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b * ctx.options["scale"], g * a * ctx.options["scale"], None


def test_a_function_that_takes_a_dict_is_traced():
    a, b = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    jf = thunder.jit(lambda a, b: Scaled.apply(a, b, {"scale": 0.5}), transforms=[NormTransform()])
    y = jf(a, b)
    y.sum().backward()
    assert torch.equal(y.detach(), a.detach() * b / 2) and torch.equal(a.grad, b / 2)


class Called(Function):
    """A function of a function, which may hold tensors."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return None, 2 * g * ctx.function(x)


def _times(y, x):
    return x * y


class _Scaling:
    def __init__(self, by):
        self.by = by

    def scaled(self, x):
        return x * self.by


def _nested(w):
    def shifted(x):
        return x + w

    return lambda x: shifted(x) * w


HOLDING = {
    "a closure": lambda w: lambda x: x * w,
    "a closure in a closure": _nested,
    "a partial": lambda w: functools.partial(_times, w),
    "a bound method": lambda w: _Scaling(w).scaled,
}


@pytest.mark.parametrize("kind", ["plain", "wrappers", "a wrapper inside", "a wrapper beside"])
@pytest.mark.parametrize("name", HOLDING)
def test_a_function_that_is_given_tensors_inside_of_an_object_is_eager_modes(name, kind):
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0])
    x = TwoTensor(a, b) if kind in ("wrappers", "a wrapper beside") else a.clone()
    w = TwoTensor(b, a) if kind in ("wrappers", "a wrapper inside") else b
    x.requires_grad_(kind != "a wrapper inside")

    def f(x, w):
        return Called.apply(HOLDING[name](w * 2), x) + Called.apply(HOLDING[name](w), x)

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        found, wanted = jf(x, w), f(x, w)
        assert type(found) is type(wanted)
        torch.testing.assert_close(found.detach(), wanted.detach())
        if x.requires_grad:
            gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)]
            torch.testing.assert_close(*gradients)
    assert thunder.cache_misses(jf) == 1


def _counting(w):
    n = 0

    def g(x):
        nonlocal n
        n += 1
        return x * w * n

    return g


def _keeping(w):
    seen = []

    def g(x):
        seen.append(x)
        return x * w

    return g


@pytest.mark.parametrize("make", [_counting, _keeping])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_object_that_changes_what_the_program_has_made_is_refused(make, transform):
    jf = thunder.jit(lambda x: Called.apply(make(x * 2), x), transforms=[transform()])
    with pytest.raises(UnsupportedOpError, match=r"given an object that (changes|holds)"):
        jf(torch.ones(2, requires_grad=True))


def test_norms_in_an_object_that_a_function_is_given_are_refused():
    jf = thunder.jit(lambda x: Called.apply(HOLDING["a closure"](x * 2), x), transforms=[NormTransform()])
    with pytest.raises(UnsupportedOpError, match="holds tensors of the traced program"):
        jf(RMSTensor.of(torch.ones(2)))


class _MadeIntoTwo(torch.autograd.Function):
    """A wrapper of two plain tensors."""

    @staticmethod
    def forward(ctx, x):
        return TwoTensor(x * 1, x * 2)

    @staticmethod
    def backward(ctx, g):
        return g.a


class _WithWrappersInItsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, is_returned):
        ctx.is_returned = is_returned
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return (TwoTensor(g, g * 2) if ctx.is_returned else _MadeIntoTwo.apply(g).b), None


@pytest.mark.parametrize("is_returned", [False, True])
def test_wrappers_that_a_backward_makes_of_plain_tensors_are_refused_where_it_runs(is_returned: bool):
    jf = thunder.jit(lambda x: _WithWrappersInItsBackward.apply(x, is_returned), transforms=[SubclassTransform()])
    x = torch.ones(3, requires_grad=True)
    y = jf(x)
    assert torch.equal(y.detach(), torch.full((3,), 2.0))  # the forward is right
    with pytest.raises(UnsupportedOpError, match="a TwoTensor where gradients of plain tensors are computed"):
        y.sum().backward()


class NoGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3, x > 0

    @staticmethod
    def backward(ctx, *gradients):
        return None


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "f",
    [
        lambda x: NoGradient.apply(x),
        lambda x: (x, NoGradient.apply(x.sin())[1].cos(), NoGradient.apply(x.detach())[0], x.detach() * 2),
        lambda x: (NoGradient.apply(x)[0], x * 2),
    ],
)
def test_results_that_no_gradient_goes_back_from_require_grad_all_the_same(f, transform):
    x = torch.randn(3, requires_grad=True)
    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(2):
        expected, found = f(x), jitted(x)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b) and (a.requires_grad, a.is_leaf) == (b.requires_grad, b.is_leaf)
            if a.requires_grad and a is not x:
                (wanted,), (got,) = (torch.autograd.grad(t.sum(), x, retain_graph=True, allow_unused=True) for t in (a, b))
                assert torch.equal(*(torch.zeros(3) if g is None else g for g in (wanted, got)))


class Rounded(torch.autograd.Function):
    """Its second result is no function of its argument for autograd."""

    @staticmethod
    def forward(x):
        return x * 2, x.round() + x, x > 0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, g, *_):
        return g * 3


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_results_that_are_marked_as_not_differentiable_do_not_require_grad(transform):
    def f(x):
        a, b, is_positive = Rounded.apply(x)
        flags = a.requires_grad, b.requires_grad, (b * 2).requires_grad, is_positive.requires_grad
        return (a * b * x).where(is_positive, b), flags

    x = torch.randn(3, requires_grad=True)
    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(2):
        expected, found = f(x), jitted(x)
        assert found[1] == expected[1]
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(*(torch.autograd.grad(r[0].sum(), x)[0] for r in (found, expected)))
    torch.testing.assert_close(grad(lambda x: f(x)[0].sum())(x), torch.autograd.grad(f(x)[0].sum(), x)[0])


def _leaving_out(x, a, b):
    return sum(g * n for g, n in ((a, 2), (b, 3)) if g is not None) * x


def _with_zeros(x, a, b):
    return _leaving_out(x, *(torch.zeros_like(x) if g is None else g for g in (a, b)))


def _other(x, a, b):
    return a * 7 if b is None else _leaving_out(x, a, b)


@pytest.mark.parametrize("is_used_inside", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("backward", [_leaving_out, _with_zeros, _other])
def test_gradients_that_are_missing_are_zeros_or_refused(backward, used, is_used_inside):
    """A backward is given None for what nobody differentiates, and one may do something else then than for zeros."""

    class Two(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, a, b):
            return backward(*ctx.saved_tensors, a, b)

    def f(x):
        results = Two.apply(x)
        return sum(results[i].sin() for i in used) if is_used_inside else tuple(results[i] for i in used)

    def gradient(f, x):
        found = f(x)
        return torch.autograd.grad(sum(t.sum() for t in (found if isinstance(found, tuple) else (found,))), x)[0]

    x = torch.tensor([0.5, -2.0], requires_grad=True)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    if backward is _other:
        with pytest.raises(UnsupportedOpError, match="another function for missing gradients"):
            gradient(jitted, x)
    else:
        torch.testing.assert_close(gradient(jitted, x), gradient(f, x))
