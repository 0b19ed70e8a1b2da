"""Which way a call of a jitted program goes, the short one or Thunder's, and that both are right."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from thunder_norm import executors, transforms
from thunder_norm.errors import TransformError, UnsupportedOpError
from thunder_norm.tracing import hooks
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder


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


def test_a_module_from_elsewhere_keeps_its_own_parameters():
    """Of the same class and names as the jitted one: each is read where it is."""
    other = nn.Linear(4, 4)

    class Both(nn.Linear):
        def forward(self, x):
            return super().forward(x) + other(x)

    x, model = torch.randn(3, 4), Both(4, 4)
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(4):
        torch.testing.assert_close(jitted(x), model(x))
    assert not goes_thunders_way(jitted, x)
    other.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(jitted(x), model(x))


def _replaced_dict(m):
    before = m.__dict__
    m.__dict__ = {**before, "negative_slope": 0.5}
    return lambda: setattr(m, "__dict__", before)


def _own_forward(m):
    m.forward = torch.neg
    return lambda: delattr(m, "forward")


def _other_class(m):
    before, m.__class__ = type(m), type("Negated", (nn.LeakyReLU,), {"forward": lambda self, x: -x})
    return lambda: setattr(m, "__class__", before)


def _equal_number(m):
    m.negative_slope = True
    return lambda: setattr(m, "negative_slope", 1)


@pytest.fixture(scope="module")
def called_often():
    """A model whose modules were looked at, and what it became."""
    model = nn.Sequential(*(nn.Sequential(nn.LeakyReLU(1), nn.LeakyReLU(1)) for _ in range(2)))
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for _ in range(4):
        jitted(torch.randn(3, 4))
    return model, jitted


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.register_forward_hook(lambda m, args, y: -y).remove,
        _replaced_dict,
        _own_forward,
        _other_class,
        _equal_number,
    ],
    ids=["hook", "dict", "forward", "class", "equal number"],
)
def test_what_is_set_in_a_module_is_seen_after_many_calls(called_often, change):
    """Conditions of modules are asked again only where a dict of theirs was written into, or another class stands there."""
    (model, jitted), x = called_often, -torch.ones(3, 4)
    assert not goes_thunders_way(jitted, x)
    misses = thunder.cache_misses(jitted)
    back = change(model[1][0])
    assert_close(jitted(x), model(x))
    assert thunder.cache_misses(jitted) == misses + 1
    back()
    assert_close(jitted(x), model(x))
    assert not goes_thunders_way(jitted, x)


def test_a_module_that_counts_its_calls_stays_right():
    """What is set in each call is not what the program reads: it is asked for its conditions alone after a while."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0))
    jitted, x = thunder.jit(model, transforms=[NormTransform()]), torch.randn(3, 4)
    for model[1].calls in range(40):
        jitted(x)
    assert thunder.cache_misses(jitted) == 1
    model.eval()
    jitted(x)
    assert thunder.cache_misses(jitted) == 2
    model[0].register_forward_hook(lambda m, args, y: -y)
    torch.testing.assert_close(jitted(x), model(x))


def test_functions_that_close_over_modules_are_short():
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    jitted = thunder.jit(lambda x: model(x) * 2, transforms=[NormTransform()])
    for _ in range(3):
        torch.testing.assert_close(jitted(x), model(x) * 2)
    assert not goes_thunders_way(jitted, x)
    model[0].bias = nn.Parameter(torch.randn(4))
    torch.testing.assert_close(jitted(x), model(x) * 2)
    model[0] = nn.Linear(4, 4, bias=False)
    torch.testing.assert_close(jitted(x), model(x) * 2)


@pytest.mark.parametrize("with_grad", [False, True])
def test_each_autocast_is_another_program_and_as_short(with_grad):
    x = torch.randn(3, 4)
    jitted = jitted_after(0)
    model = jitted._model

    def found(f: Callable, dtype: torch.dtype | None) -> tuple:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = f(x)
            is_on = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")
        gradients = torch.autograd.grad(y.float().square().sum(), list(model.parameters())) if with_grad else ()
        return y, is_on, gradients, torch.is_autocast_enabled("cpu")

    dtypes = (None, torch.bfloat16, torch.float16)
    with torch.set_grad_enabled(with_grad):
        for dtype in (*dtypes, *dtypes, *reversed(dtypes), *dtypes):
            (y, *state), (wanted, *expected) = found(jitted, dtype), found(model, dtype)
            assert_close(y, wanted)
            assert y.dtype is wanted.dtype and (state[0], state[2]) == (expected[0], expected[2])
            assert_close(state[1], expected[1], rtol=2e-2, atol=2e-2)
        assert thunder.cache_misses(jitted) == len(dtypes)
        for dtype in dtypes:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                assert not goes_thunders_way(jitted, x)


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


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_short_call_keeps_thunders_statistics(requires_grad: bool):
    x = torch.randn(3, 4, requires_grad=requires_grad)
    jitted = jitted_after(3, x)
    stats = thunder.compile_stats(jitted)
    stats.last_computation = None
    for n in range(4, 7):
        assert not goes_thunders_way(jitted, x)
        times = stats.last_trace_host_start, stats.last_trace_host_execution_start, stats.last_trace_host_execution_stop
        assert stats.calls == n and (*times, stats.last_trace_host_stop) == tuple(sorted((*times, stats.last_trace_host_stop)))
        assert callable(stats.last_computation) and stats.last_traces[-1] is thunder.last_traces(jitted)[-1]


def test_an_error_in_a_short_call_leaves_the_next_one_as_it_was():
    def f(x):
        if not (x > 0).all():  # an assert is another program here: pytest writes it anew, and the whole would be traced
            raise AssertionError("positive")
        return x.log()

    jitted = thunder.jit(f, transforms=[NormTransform()], executors=[executors.inductor])
    x = torch.rand(3) + 1
    for _ in range(3):
        assert_close(jitted(x), x.log())
    for with_grad in (True, False):
        with torch.set_grad_enabled(with_grad):
            for _ in range(3):
                assert_close(jitted(x), x.log())
            with pytest.raises(AssertionError, match="positive"):
                jitted(-x)
            assert torch.is_grad_enabled() is with_grad
            assert_close(jitted(x), x.log())


@pytest.mark.parametrize("number", [2, 0.0, -0.0, float("inf"), float("nan"), -2.0, True, np.float64(2.0)])
def test_numbers_are_told_apart_in_short_calls(number: float):
    """Of another type too: ``int`` times 2 is an integer, times 2.0 it is none."""

    class Scaled(nn.Module):
        by = 2.0

        def forward(self, x, more):
            return x * self.by, x * more, torch.atan2(x, torch.full((3,), float(self.by))), x / more

    model, x = Scaled(), torch.tensor([1, 2, 3])
    jitted = thunder.jit(model, transforms=[NormTransform()])
    for given, by in ((2.0, 2.0), (2.0, 2.0), (2.0, 2.0), (number, 2.0), (2.0, number), (2.0, 2.0), (number, number)):
        for _ in range(2):
            model.by = by
            assert_close(jitted(x, given), model(x, given), equal_nan=True)


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
    second = [torch.autograd.grad(torch.autograd.grad(z, x, create_graph=True)[0].sum(), x) for z in (y.sum(), model(x).sum())]
    torch.testing.assert_close(*second)


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


@pytest.mark.parametrize("is_jitted", [True, False])
def test_a_function_transform_or_an_executor_of_ours_makes_a_compilation_one_with_us(is_jitted: bool):
    given: list[hooks.Participant] = []
    f = transforms.vmap(lambda x: x.tanh().exp())
    jitted = (
        thunder.jit(f, transforms=given)
        if is_jitted
        else thunder.jit(f.function, transforms=given, executors=[executors.inductor])
    )
    assert not given and any(isinstance(t, hooks.Participant) for t in thunder.list_transforms(jitted))
    symbolic = thunder.jit(lambda x: x + 1, cache="symbolic values", executors=[executors.inductor])
    assert not thunder.list_transforms(symbolic)
    plain = thunder.jit(f.function, transforms=given)
    assert not thunder.list_transforms(plain)


def test_guards_hold_where_a_function_transform_or_an_executor_brings_them():
    scale = {"by": 2.0}
    jitted = thunder.jit(transforms.vmap(transforms.grad(lambda x: (x * x).sum() * scale["by"])))
    x = torch.randn(3, 4)
    for by in (2.0, 2.0, 3.0, 2.0):
        scale["by"] = by
        assert_close(jitted(x), 2 * by * x)
    assert not goes_thunders_way(jitted, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(jitted(x), 4 * x)
    both = thunder.jit(lambda a, b: a.add_(b) * b, executors=[executors.inductor])  # inputs that share memory, and that do not
    for _ in range(3):
        a, b = torch.ones(2, 2), torch.full((2, 2), 3.0)
        assert_close(both(a, b), torch.full((2, 2), 12.0))
        a = torch.ones(2, 2)
        assert_close(both(a, a), torch.full((2, 2), 4.0))
        assert_close(a, torch.full((2, 2), 2.0))


def test_modules_that_a_transformed_function_closes_over_are_looked_at_in_short_calls():
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(inner, nn.Dropout(0.5)).eval()

    def f(x: torch.Tensor) -> torch.Tensor:
        return model(x).tanh().sum()

    jitted = thunder.jit(transforms.grad(f))
    x = torch.randn(3, 4)
    changes = (
        lambda: None,
        lambda: inner.__setitem__(0, nn.Linear(4, 4)),
        lambda: setattr(inner[0], "bias", None),
        lambda: setattr(inner[0], "weight", nn.Parameter(torch.randn(4, 4))),
        lambda: setattr(inner[1], "running_mean", torch.randn(4)),
        lambda: setattr(inner[1], "eps", 0.5),
        lambda: model.__setitem__(1, nn.Tanh()),
        lambda: setattr(inner[0], "weight", nn.Parameter(inner[0].weight.detach(), requires_grad=False)),
        lambda: setattr(model, "0", nn.Linear(4, 4)),
    )
    for change in changes:
        change()
        for _ in range(3):
            assert_close(jitted(x), torch.func.grad(f)(x))
        assert not goes_thunders_way(jitted, x)


def test_a_tensor_that_is_an_argument_and_a_parameter_may_be_two():
    model = nn.Linear(4, 4)
    jitted = thunder.jit(transforms.grad(lambda p, x: (torch.func.functional_call(model, p, (x,)) * model.weight).sum()))
    x = torch.randn(4, 4)
    same = dict(model.named_parameters())
    other = {name: nn.Parameter(2 * p.detach()) for name, p in same.items()}
    for parameters in (same, same, other, other, same, other):
        found = jitted(parameters, x)
        expected = torch.func.grad(lambda p: (torch.func.functional_call(model, p, (x,)) * model.weight.detach()).sum())(
            {name: p.detach() for name, p in parameters.items()}
        )
        assert_close({k: v.detach() for k, v in found.items()}, expected)
