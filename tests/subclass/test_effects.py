"""Operators that write into their arguments, and operators that return nothing: as eager runs them, once, in order, used or not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import ThunderNormError, UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad
import thunder

heard: list[tuple[str, float]] = []


@torch.library.custom_op("effects::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("effects::log", mutates_args=())
def log(x: torch.Tensor, what: str) -> None:
    heard.append((what, round(x.double().sum().item(), 3)))


@log.register_fake
def _(x, what):
    return None


@torch.library.custom_op("effects::look_", mutates_args={"x"})
def look_(x: torch.Tensor, what: str) -> None:  # as torchao's log_tensor: so that nobody leaves it out
    heard.append((what, round(x.double().sum().item(), 3)))


@torch.library.custom_op("effects::swap_", mutates_args={"a", "b"})
def swap_(a: torch.Tensor, b: torch.Tensor, k: int = 1) -> torch.Tensor:
    before = a.clone()
    a.copy_(b)
    b.copy_(before)
    return before + k


@swap_.register_fake
def _(a, b, k=1):
    return torch.empty_like(a)


@torch.library.custom_op("effects::fill_all_", mutates_args={"xs", "maybe"})
def fill_all_(xs: list[torch.Tensor], maybe: torch.Tensor | None = None) -> None:
    for i, x in enumerate(xs):
        x.fill_(i)
    if maybe is not None:
        maybe.fill_(7)


@torch.library.custom_op("effects::add_to_both_", mutates_args={"a", "b"})
def add_to_both_(a: torch.Tensor, b: torch.Tensor, k: float = 1.0) -> None:
    a.add_(k)
    b.mul_(a)


@torch.library.custom_op("effects::add_", mutates_args={"a"})
def add_(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(1)
    a.add_(b)


@torch.library.custom_op("effects::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture(autouse=True)
def nothing_heard() -> Iterator[None]:
    heard.clear()
    yield


def plain(*shape: int, **options: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape or (3, 4), **options)


def two(**options: Any) -> Callable[[], torch.Tensor]:
    return lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_(**options)


def outcome(f: Callable, makers: tuple[Callable, ...], is_differentiated: bool) -> tuple:
    """What a call gives, makes of its arguments and says, and the gradients."""
    torch.manual_seed(seeded(0))
    heard.clear()
    args = [make() for make in makers]
    result = f(*args)
    said = list(heard)
    if is_differentiated:
        first = result[0] if isinstance(result, tuple) else result
        first.backward(torch.ones_like(first))
        assert heard == said  # nothing is done in the backward, or again
    return result, args, said, [a.grad for a in args if a.requires_grad]


def check(f: Callable, *makers: Callable, is_differentiated: bool = False, transform: type = SubclassTransform, **options: Any):
    jf = thunder.jit(f, transforms=[transform()], **options)
    with torch.set_grad_enabled(is_differentiated):
        expected = outcome(f, makers, is_differentiated)
        for _ in range(2):
            assert_same(outcome(jf, makers, is_differentiated), expected)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def logged(x):
    log(x, "in")
    y = x * 2
    torch.ops.effects.log(y, "middle")
    torch.ops.effects.log.default(y.sin(), "of what nobody uses")
    return y + 1


def looked_at(x):
    y = x * 2
    look_(y, "first")
    z = y * y
    look_(z, "second")
    return z


def scaled(x):
    y = x * 2
    scale_(y, 3.0)
    return y + 1


def swapped(x, y):
    a, b = x * 2, y * 3
    before = torch.ops.effects.swap_(a, b, k=4)
    return before, a - b


def used_in_many_ways(x):
    y = x * 2
    scale_(y, 3.0)
    return sum([y, y]), torch.stack([y, y]), y[0], y.view(-1), y @ y.T, y.sum().exp(), y


def changed_on(x):
    y = x * 2
    scale_(y, 3.0)
    y.add_(1)
    z = y * 2
    y.mul_(z)
    return y, z


PROGRAMS = [logged, looked_at, scaled, changed_on]


@pytest.mark.parametrize("make", [plain(), two(requires_grad=False)], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_it_is_as_in_eager(f, make):
    check(f, make)


@pytest.mark.parametrize("f", [swapped, lambda x, y: (swap_(x, y), x - y)])
def test_several_are_written_into_and_something_is_returned(f):
    check(f, plain(3), plain(3))


def test_it_is_as_in_eager_whatever_is_done_with_it():
    check(used_in_many_ways, plain(3, 3))
    check(scaled, plain(), transform=NormTransform)
    check(looked_at, plain(), transform=NormTransform)


def test_lists_and_optional_arguments_are_written_into():
    def f(x, y):
        a, b, c = x * 1, y * 2, x + y
        fill_all_([a, b], c)
        d = x - y
        if takes_omitted:
            fill_all_([d])
        return a, b, c, d

    try:
        fill_all_([torch.ones(3)])
        takes_omitted = True
    except IndexError:  # torch's own, with torch 2.11
        takes_omitted = False
    check(f, plain(3), plain(3))


def given_twice(x):
    y = x * 2
    add_to_both_(y, y)
    torch.ops.effects.add_to_both_(b=y, a=y, k=3.0)
    add_(y, y)
    return y + 1, y


def given_twice_in_a_list(x):
    y, z = x * 2, x + 1
    fill_all_([y, z, y], y)
    torch.ops.aten._foreach_add_.Scalar([z, y, z], 1.0)
    return y, z


@pytest.mark.parametrize("make", [plain(), two(requires_grad=False)], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("f", [given_twice, given_twice_in_a_list], ids=lambda f: f.__name__)
def test_a_tensor_given_twice_is_one_tensor(f, make):
    check(f, make)


def test_a_tensor_given_twice_keeps_its_history_and_may_be_an_input():
    check(lambda x: given_twice(x)[1] * x, plain(requires_grad=True), is_differentiated=True)
    check(lambda x: (add_to_both_(x, x), x * 1)[1], plain())


def test_torch_s_own_operators_on_lists_are_written_down():
    def f(x, y):
        a, b = x * 1, y * 2
        torch.ops.aten._foreach_mul_.Scalar([a, b], 3.0)
        return a, b

    check(f, plain(3), plain(3))


@pytest.mark.parametrize("make", [plain(requires_grad=True), two()], ids=["plain", "TwoTensor"])
@pytest.mark.parametrize("f", [logged, looked_at], ids=lambda f: f.__name__)
def test_differentiated_programs_do_it_in_the_forward_once(f, make):
    check(f, make, is_differentiated=True)


def test_what_is_written_into_keeps_its_history():
    def under_no_grad(x):
        y = x * 2
        with torch.no_grad():
            scale_(y, 3.0)
        return (y * x).sum()

    for f in (lambda x: scaled(x).sum(), under_no_grad):
        check(f, plain(requires_grad=True), is_differentiated=True)


def test_an_input_is_written_into():
    def f(x):
        y = x + 1
        scale_(x, 3.0)
        z = x.sin()
        scale_(x, 2.0)
        return y, z, x, x * 1

    check(f, plain())
    check(f, two(requires_grad=False))
    x = torch.randn(3)
    jf = thunder.jit(lambda x: scale_(x, 3.0), transforms=[SubclassTransform()])
    assert jf(x) is None


def test_what_writes_into_an_input_returns_the_input():
    def f(x):
        scale_(x, 3.0)
        return x

    x = torch.ones(3)
    assert thunder.jit(f, transforms=[SubclassTransform()])(x) is x and torch.equal(x, torch.full((3,), 3.0))


def test_two_inputs_in_one_memory_are_refused():
    x = torch.ones(4)

    def f(x, y):
        scale_(x, 3.0)
        return x + y

    with pytest.raises(ThunderNormError, match="shares its memory"):
        thunder.jit(f, transforms=[SubclassTransform()])(x, x[:4].view(4))
    assert thunder.jit(f, transforms=[SubclassTransform()])(x, x).tolist() == [6.0] * 4  # one tensor by two names


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x):
        scale_(self.factor, 2.0)
        log(self.factor, "factor")
        return self.linear(x) * self.factor


def test_a_buffer_of_a_module_is_written_into_in_training():
    own, other = (model := Counting()), copy.deepcopy(model)
    jm = thunder.jit(other, transforms=[SubclassTransform()])
    for _ in range(3):
        x = torch.randn(2, 4)
        assert_same(jm(x), own(x))
        assert_same(other.factor, own.factor)
    assert heard[0::2] == heard[1::2] and len(heard) == 6
    for call in (own, jm):
        call(torch.ones(2, 4)).sum().backward()
    assert_same([p.grad for p in other.parameters()], [p.grad for p in own.parameters()])


def viewed(x):
    y = x * 2
    view = y.view(-1)
    scale_(y, 3.0)
    return view + 1


def a_view(x):
    y = x * 2
    scale_(y[0], 3.0)
    return y


def changed_before(x):
    y = x * 2
    y.add_(1)
    log(y, "before")
    scale_(y, 3.0)
    return y * 2


@pytest.mark.parametrize("make", [plain(), two()])
@pytest.mark.parametrize("f", [viewed, a_view, changed_before])
def test_operators_write_into_what_there_are_views_of(f, make):
    check(f, make)


def refused_programs() -> Iterator[Any]:
    yield pytest.param(lambda x: unknown(x), "register_fake", id="unknown")
    yield pytest.param(lambda x: grad(lambda y: (log(y, "y"), (y * y).sum())[1])(x), "", id="transformed")


@pytest.mark.parametrize("f, match", refused_programs())
def test_what_cannot_be_written_down_is_refused(f, match: str):
    with pytest.raises(ThunderNormError, match=match):
        thunder.jit(f, transforms=[SubclassTransform()])(torch.randn(3, 4))
    assert heard == []


def test_the_trace_shows_what_is_done():
    jf = thunder.jit(logged, transforms=[SubclassTransform()])
    jf(torch.randn(3))
    assert str(thunder.last_traces(jf)[-1]).count("effects_log_default(") == 3


def test_a_failing_operator_fails_when_it_is_run():
    def f(x):
        torch.ops.aten._assert_async.msg(x.sum() > 0, "not positive")
        return x * 2

    jf = thunder.jit(f, transforms=[SubclassTransform()])
    assert torch.equal(jf(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="not positive"):
        jf(-torch.ones(3))


def test_unknown_operators_say_what_they_need():
    with pytest.raises(UnsupportedOpError, match="register_fake"):
        thunder.jit(lambda x: unknown(x), transforms=[SubclassTransform()])(two(requires_grad=False)())


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform, CheckpointTransform])
def test_a_differentiated_program_may_have_effects_alone(transform):
    def f(x):
        log(x.sum() * 2, "seen")
        torch.rand(3)
        return x

    x = torch.ones(3, requires_grad=True)
    torch.manual_seed(seeded(0))
    f(x)
    expected, following = list(heard), torch.rand(2)
    heard.clear()
    torch.manual_seed(seeded(0))
    assert thunder.jit(f, transforms=[transform()])(x) is x
    assert heard == expected
    assert torch.equal(torch.rand(2), following)


def scales(x, w):
    scale_(x, 3.0)
    return x * w


def scales_a_view(x, w):
    v = x[1:]
    scale_(v, 3.0)
    return x * w, v


def writes_what_moves(x, w):
    add_(x, w * 2)
    return x * x, w


def writes_what_moves_into_a_view(x, w):
    y = x * 1
    add_(y[1:], w[1:] * 2)
    return y * w, y


def writes_and_returns_nothing(x, w):
    add_(x, w * 2)


@pytest.mark.parametrize("kind", ["a leaf", "plain", "with a history"])
@pytest.mark.parametrize("is_wrapper", [False, True])
@pytest.mark.parametrize(
    "f", [scales, scales_a_view, writes_what_moves, writes_what_moves_into_a_view, writes_and_returns_nothing]
)
def test_what_an_operator_writes_has_the_history_that_its_argument_had(f: Callable, is_wrapper: bool, kind: str):
    def run(f: Callable) -> Any:
        torch.manual_seed(seeded(0))
        x = (two() if is_wrapper else plain())().requires_grad_(kind != "plain")
        w, given = torch.randn(3, 4, requires_grad=True), x * 1 if kind == "with a history" else x
        result = f(given, w)
        tensors = [t for t in (*(result if isinstance(result, tuple) else (result,)), given) if t is not None]
        flags = [(t.requires_grad, t.is_leaf) for t in tensors]
        moving = [(t * t).sum() for t in tensors if t.grad_fn is not None]
        if moving:
            loss = sum(moving[1:], moving[0])
            loss.backward(torch.ones_like(loss))
        return [t.detach().clone() for t in tensors], flags, x.grad, w.grad

    expected, jf = run(f), thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(2):
        assert_same(run(jf), expected)
