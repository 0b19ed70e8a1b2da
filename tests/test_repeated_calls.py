"""The second, third and fourth call of a jitted program, with one thing changed before them: what eager gives, each time."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeds import seeded
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.errors import TransformError, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

OFFSET = 1.0


class Scaled(nn.Linear):
    """A layer of another class than `nn.Linear`, with the same parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Model(nn.Module):
    """Layers, a buffer, attributes, a global, and what the process has as its default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.between = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4, track_running_stats=True))
        self.last = nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.scale: Any = 2
        self.mask: Any = None
        self.names = ["a"]

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, factor: Any = 1) -> Any:
        y = self.last(self.between(self.first(x))) * self.scale + self.shift * factor + OFFSET
        y = y + torch.ones(4).sum() + len(self.names) + torch.get_default_dtype().itemsize
        if self.mask is not None:
            y = y * self.mask
        for r in rest:
            y = y + r
        return y if torch.is_grad_enabled() else (y, y.mean())


class World:
    """A model, what it is called with, and what surrounds the call."""

    def __init__(self, wrap: Callable[[torch.Tensor], torch.Tensor]):
        self.wrap = wrap
        self.model = Model().eval()
        self.x = torch.randn(3, 4)
        self.rest: tuple[torch.Tensor, ...] = ()
        self.options: dict[str, Any] = {}
        self.surroundings: Callable[[], Any] = contextlib.nullcontext
        self.requires_grad = False

    def arguments(self) -> tuple[torch.Tensor, ...]:
        x = self.x.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
        return (self.wrap(x), *self.rest)

    def run(self, call: Callable, model: nn.Module) -> dict[str, Any]:
        """Results, gradients, and the buffers afterwards."""
        for p in model.parameters():
            p.grad = None
        args = self.arguments()
        with self.surroundings():
            result = call(*args, **self.options)
        tensors = result if isinstance(result, tuple) else (result,)
        total = sum(t.sum() for t in plain(tensors))
        if total.requires_grad:
            total.backward()
        gradients = [*plain([p.grad for p in model.parameters()]), *plain([args[0].grad])]
        return {"results": plain(tensors), "gradients": gradients, "buffers": list(model.buffers())}


def plain(tensors: Any) -> list[Any]:
    return [t.a if isinstance(t, TwoTensor) else t for t in tensors]


# -- what is changed ----------------------------------------------------------------------------------------------------------


def replaced_module(w: World) -> None:
    w.model.first = nn.Linear(4, 4, dtype=w.x.dtype).train(w.model.training)


def replaced_class(w: World) -> None:
    w.model.last = (Scaled if type(w.model.last) is nn.Linear else nn.Linear)(4, 4, dtype=w.x.dtype).train(w.model.training)


def replaced_activation(w: World) -> None:
    w.model.between[0] = random.choice([nn.GELU(), nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.3)])


def replaced_parameter(w: World) -> None:
    w.model.first.weight = nn.Parameter(torch.randn(4, 4, dtype=w.x.dtype))


def replaced_data(w: World) -> None:
    w.model.first.weight.data = torch.randn(4, 4, dtype=w.x.dtype)


def replaced_buffer(w: World) -> None:
    w.model.shift = torch.randn(4, dtype=w.x.dtype)


def frozen(w: World) -> None:
    p = w.model.last.weight
    p.requires_grad_(not p.requires_grad)


def without_bias(w: World) -> None:
    w.model.first.bias = None if w.model.first.bias is not None else nn.Parameter(torch.randn(4, dtype=w.x.dtype))


def tied(w: World) -> None:
    w.model.last.weight = w.model.first.weight


def a_hook(w: World) -> None:
    if w.model.first._forward_hooks:
        w.model.first._forward_hooks.clear()
    else:
        w.model.first.register_forward_hook(lambda module, args, output: output * 3)


def own_forward(w: World) -> None:
    if "forward" in vars(w.model.between):
        del w.model.between.forward
    else:
        w.model.between.forward = lambda x: x.sin()


def other_dtype(w: World) -> None:
    dtype = torch.float64 if w.x.dtype == torch.float32 else torch.float32
    w.model.to(dtype)
    w.x, w.rest = w.x.to(dtype), tuple(r.to(dtype) for r in w.rest)


def other_shape(w: World) -> None:
    w.x = torch.randn(w.x.shape[0] % 4 + 2, 4, dtype=w.x.dtype)


def other_strides(w: World) -> None:
    w.x = torch.randn(4, w.x.shape[0], dtype=w.x.dtype).t()


def other_attribute(w: World) -> None:
    w.model.scale = random.choice([3, 2.5, True, torch.tensor(1.5, dtype=w.x.dtype)])


def other_mask(w: World) -> None:
    w.model.mask = None if w.model.mask is not None else (torch.rand(4) > 0.5)


def longer_list(w: World) -> None:
    w.model.names.append("b")


def other_global(w: World) -> None:
    global OFFSET
    OFFSET = random.choice([0.5, 2, 3.0])


def other_default(w: World) -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)


def other_option(w: World) -> None:
    w.options = random.choice([{}, {"factor": 2}, {"factor": 0.5}, {"factor": True}])


def more_arguments(w: World) -> None:
    w.rest = () if w.rest else (torch.randn(4, dtype=w.x.dtype), torch.randn(1, dtype=w.x.dtype))


def one_tensor_twice(w: World) -> None:
    t = torch.randn(4, dtype=w.x.dtype)
    w.rest = (t, t)


def needs_grad(w: World) -> None:
    w.requires_grad = not w.requires_grad


def other_surroundings(w: World) -> None:
    w.surroundings = random.choice([contextlib.nullcontext, torch.no_grad, torch.inference_mode])


def in_training(w: World) -> None:
    w.model.train(not w.model.training)


def conjugate_or_negative(w: World) -> None:
    w.rest = (torch._neg_view(torch.randn(4, dtype=w.x.dtype)),)


CHANGES = (
    replaced_module, replaced_class, replaced_activation, replaced_parameter, replaced_data, replaced_buffer, frozen, without_bias,
    tied, a_hook, own_forward, other_dtype, other_shape, other_strides, other_attribute, other_mask, longer_list, other_global,
    other_default, other_option, more_arguments, one_tensor_twice, needs_grad, other_surroundings, in_training,
    conjugate_or_negative,
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was():
    global OFFSET
    yield
    OFFSET = 1.0
    torch.set_default_dtype(torch.float32)


def two_tensor(x: torch.Tensor) -> torch.Tensor:
    return TwoTensor(x.detach(), x.detach() * 2).requires_grad_(x.requires_grad)


SUBJECTS = {
    "plain module": (NormTransform, lambda x: x, False),
    "plain function": (SubclassTransform, lambda x: x, True),
    "wrapper": (SubclassTransform, two_tensor, False),
}


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_one_change_after_the_other(subject: str, part: int):
    """All of them in some order: three calls after each, of which the last is the short one."""
    rng = random.Random(seeded(17))
    changes = rng.sample(CHANGES, len(CHANGES))[part::2]
    transform, wrap, is_function = SUBJECTS[subject]
    random.seed(seeded(1))
    w = World(wrap)
    model = w.model
    jitted = thunder.jit((lambda *args, **kwargs: model(*args, **kwargs)) if is_function else model, transforms=[transform()])
    for n, change in enumerate([None, *changes]):
        if change is not None:
            change(w)
        for call in range(3):
            expected = w.run(own := copy.deepcopy(w.model), own)
            found = w.run(jitted, w.model)
            where = f"in call {call} after {', '.join(c.__name__ for c in changes[:n])}"
            for key, values in expected.items():
                torch.testing.assert_close(
                    found[key], values, rtol=1e-4, atol=1e-4, msg=lambda m, k=key, w=where: f"{k} {w}: {m}"
                )


# -- which way a call goes ------------------------------------------------------------------------------------------------------


def goes_thunders_way(jitted: Callable, *args: torch.Tensor) -> bool:
    """Whether Thunder's own prologue runs in a call."""
    stats = thunder.compile_stats(jitted)
    before = stats.last_prologue_execution_start
    hits = stats.cache_hits
    jitted(*args)
    assert stats.cache_hits == hits + 1
    return stats.last_prologue_execution_start != before


def jitted_after(calls: int, *args: torch.Tensor) -> Callable:
    jitted = thunder.jit(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), transforms=[NormTransform()])
    for _ in range(calls):
        jitted(*args)
    return jitted


def test_the_third_call_is_short():
    x = torch.randn(3, 4)
    jitted = jitted_after(1, x)
    assert [goes_thunders_way(jitted, x) for _ in range(3)] == [True, False, False]


def test_each_of_several_programs_is_short():
    sizes = [torch.randn(n, 4) for n in (1, 2, 5)]
    jitted = jitted_after(0)
    for x in (*sizes, *sizes):
        jitted(x)
    assert not any(goes_thunders_way(jitted, x) for x in (*sizes, *reversed(sizes)))
    assert thunder.cache_misses(jitted) == 3


def test_other_forms_of_a_tensor_are_learnt():
    x = torch.randn(3, 4)
    jitted = jitted_after(3, x)
    assert [goes_thunders_way(jitted, torch._neg_view(x)) for _ in range(2)] == [True, False]
    assert not goes_thunders_way(jitted, x)


def test_a_mode_goes_thunders_way():
    x = torch.randn(3, 4)
    jitted = jitted_after(3, x)
    with torch.device("cpu"):
        assert goes_thunders_way(jitted, x)
    assert not goes_thunders_way(jitted, x)


def test_autocast_is_another_program():
    x = torch.randn(3, 4)
    jitted = jitted_after(3, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert jitted(x).dtype == torch.bfloat16
    assert jitted(x).dtype == torch.float32 and thunder.cache_misses(jitted) == 2


def test_a_cache_that_was_emptied_is_filled_again():
    x = torch.randn(3, 4)
    jitted = jitted_after(3, x)
    thunder.compile_stats(jitted).interpreter_cache.clear()
    torch.testing.assert_close(jitted(x), jitted._model(x))
    assert thunder.cache_misses(jitted) == 2


def test_a_trace_for_all_sizes_is_refused():
    """Thunder's would take the first call's branch in each: ``x * 2`` for five rows."""
    jitted = thunder.jit(lambda x: x * 3 if x.shape[0] > 3 else x * 2, transforms=[NormTransform()], cache="symbolic values")
    with pytest.raises(UnsupportedOpError, match="symbolic values"):
        jitted(torch.ones(2, 4))


def test_a_plain_program_is_as_thunder_has_it():
    x = torch.randn(3, 4)
    NormTransform()
    jitted = thunder.jit(nn.Linear(4, 4))
    for _ in range(3):
        jitted(x)
    assert goes_thunders_way(jitted, x)


def test_what_a_transform_put_in_is_not_forgotten():
    class Doubling(thunder.core.transform_common.Transform):
        def transform_module(self, model):
            model._overrides_parameters["0.weight"] = nn.Parameter(model._overrides_parameters["0.weight"].detach() * 2)

    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4))
    doubled = copy.deepcopy(model)
    doubled[0].weight.data *= 2
    jitted = thunder.jit(model, transforms=[Doubling(), NormTransform()])
    for _ in range(4):
        torch.testing.assert_close(jitted(x), doubled(x))
    model[0].bias = doubled[0].bias = nn.Parameter(torch.randn(4))
    torch.testing.assert_close(jitted(x), doubled(x))
    model[0].weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(TransformError, match="0.weight of the model was replaced after a transform"):
        jitted(x)


# -- gradients ------------------------------------------------------------------------------------------------------------------


def test_gradients_of_a_short_call():
    x, model = torch.randn(3, 4, requires_grad=True), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    jitted = thunder.jit(model, transforms=[NormTransform()])
    leaves = [x, *model.parameters()]
    for _ in range(4):
        y = jitted(x)
        found = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for _ in range(2)]
    expected = torch.autograd.grad(model(x).square().sum(), leaves)
    for gradients in found:
        torch.testing.assert_close(gradients, expected)
    with pytest.raises(RuntimeError, match="once_differentiable|not have been used"):
        torch.autograd.grad(torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].sum(), x)


def test_results_that_are_inputs_views_or_large():
    def f(x, w):
        y = x * w
        return x, y, y[0], y.view(-1), (y, 3), torch.cat([y] * 3)

    def run(call):
        x, w = (torch.arange(1.0, 13.0).view(3, 4).requires_grad_() for _ in range(2))
        results = call(x, w)
        a, b, c, d, (e, number), g = results
        assert a is x and number == 3
        torch.autograd.backward([(t * (i + 1)).sum() for i, t in enumerate((a, b, c, d, e, g))])
        return x.grad, w.grad

    expected = run(f)
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for _ in range(4):
        torch.testing.assert_close(run(jitted), expected)

    large = torch.ones(2**22 + 1, requires_grad=True)  # more than 2**24 bytes: Thunder's two nodes
    jitted = thunder.jit(lambda x: x * 3, transforms=[SubclassTransform()])
    for _ in range(4):
        (gradient,) = torch.autograd.grad(jitted(large).sum(), large)
        assert torch.equal(gradient, torch.full_like(large, 3))
    assert not goes_thunders_way(jitted, large)


def test_nothing_of_a_short_call_stays():
    x = torch.randn(3, 4, requires_grad=True)
    jitted = thunder.jit(lambda x: (x * 2).sin().view(-1), transforms=[SubclassTransform()])
    for _ in range(4):
        y = jitted(x)
    y.sum().backward()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
