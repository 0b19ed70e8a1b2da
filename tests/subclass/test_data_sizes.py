"""Results of a size that is a value: as in eager mode whatever the values are, and one trace for each size."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.op_coverage import compare
from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.errors import AcquiredAnewWarning, DataDependentError, UnsupportedOpError
from thunder_norm.subclass.acquiring import data_sizes
from thunder_norm.subclass.acquiring.sized import Sized
from thunder_norm.transforms import NormTransform, SubclassTransform
from thunder_norm.trees import flat_tensors
import thunder

aten = torch.ops.aten


def two(*values: float, dtype: torch.dtype = torch.float64) -> TwoTensor:
    """Both tensors select the same places, which the class asks for."""
    t = torch.tensor(values, dtype=dtype)
    return TwoTensor(t, t.clone())


def opened(tree: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: (t.a, t.b) if type(t) is TwoTensor else t, tree)


def jit(f: Callable, **options: Any) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform(**options)])


PROGRAMS: dict[str, Callable] = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero as_tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0) * 2,
    "mask": lambda x: x[x > 0].sin(),
    "mask of a mask": lambda x: (y := x[x > 0])[y > 2],
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "unique of a dimension": lambda x: torch.unique(x, dim=0),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long().abs()),
    "bincount": lambda x: torch.bincount(x.long().abs()),
    "size asked for": lambda x: x * x[x > 0].shape[0] if x[x > 0].shape[0] > 1 else -x,
    "after a write": lambda x: (y := x.clone()).mul_(-1)[y > 0],
    "for a view": lambda x: (y := x.clone())[y.view(-1).neg_() > 0],
}
SEVERAL = [two(1, 0, 3, 0), two(0, 2, 2, 5), two(3, 0, 0, -1), two(0, 0, 0, 0)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_sizes_are_eagers(name: str) -> None:
    f = PROGRAMS[name]
    jf = jit(f)
    for x in (*SEVERAL, *SEVERAL):
        compare(opened(jf(x)), opened(f(x)))
    assert thunder.cache_misses(jf) <= len(SEVERAL)


PLAIN: dict[str, Callable] = {
    **{name: f for name, f in PROGRAMS.items() if name not in ("after a write", "for a view")},
    "mask of what is computed": lambda x: (x * 2)[torch.softmax(x, 0) > 0.3] * x.sum(),
    "mask of a column": lambda x: torch.stack([x, x * 2])[:, x > 0],
    "slice": lambda x: x.sort()[0][(x > 0).nonzero().shape[0] :],
}


@pytest.mark.parametrize("name", PLAIN)
def test_programs_on_plain_tensors(name: str) -> None:
    f = PLAIN[name]
    jf = thunder.jit(f, transforms=[NormTransform() if len(name) % 2 else SubclassTransform()])
    for x in (*SEVERAL, *SEVERAL):
        compare(jf(x.a), f(x.a))
    is_integer = not any(t.is_floating_point() for t in flat_tensors(f(SEVERAL[0].a)))
    for x in () if is_integer or "unique" in name else SEVERAL[:2]:
        found, expected = (differentiated(g, x.a) for g in (jf, f))
        torch.testing.assert_close(found, expected)


def written_between(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    first = max(ends[0], 0)
    y[first : ends[1], first : ends[1]] = x[: ends[1] - first, (first - ends[0]) : (ends[1] - first)]
    y[ends[1] :] = 2 * x[ends[1] :]
    return y


def test_gradients_of_what_is_written_between_places_that_are_values() -> None:
    """An error of Thunder's before, as of what Mask R-CNN pastes."""
    jf = thunder.jit(written_between, transforms=[NormTransform()])
    x = torch.randn(5, 5, dtype=torch.float64)
    for ends in (torch.tensor([1, 4]), torch.tensor([0, 2])):
        found, expected = (differentiated(lambda x, f=f, ends=ends: f(x, ends), x) for f in (jf, written_between))
        assert torch.equal(found, expected)


def differentiated(f: Callable, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(flat_tensors(f(x))[0].square().sum(), x)
    return gradient


def test_places_among_rows_that_a_mask_selected_of_a_normed_tensor() -> None:
    """Refused before as read from unwritten memory: the operation of the mask makes some that it does not use."""

    def f(x: torch.Tensor) -> torch.Tensor:
        values, places = x[x > 0].topk(2)
        return values[torch.where(places > 0)[0]]

    jf = thunder.jit(f, transforms=[NormTransform()])
    for x in (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([3.0, 0.5, -1.0])):
        assert torch.equal(jf(RMSTensor.of(x, ())).backing, f(x))


def test_one_trace_serves_other_values_of_one_size() -> None:
    jf = jit(lambda x: x[x > 0] * 2)
    for values in ((1, 0, 3), (0, 5, 7), (2, 2, -1)):
        x = two(*values)
        torch.testing.assert_close(jf(x).a, x.a[x.a > 0] * 2)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 2)
    assert jf(two(1, 1, 1)).shape == (3,) and thunder.cache_misses(jf) == 2


def gradients(f: Callable, *inputs: torch.Tensor) -> tuple[Any, list]:
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    result = f(*given)
    result.sum().backward()
    return opened(result.detach()), [opened(x.grad) for x in given]


DIFFERENTIATED: dict[str, Callable] = {
    "mask": lambda x, p: (x[x > 1] * x[x > 1]).sin(),
    "masked_select": lambda x, p: x.masked_select(x > 1) * 2 + x.sum(),
    "mask computed of plain tensors": lambda x, p: x[torch.softmax(p * 2, 0) > 0.3] * p.sum(),
    "selected rows": lambda x, p: x.index_select(0, (p > 0).nonzero().flatten()).exp(),
    "repeat_interleave": lambda x, p: x.repeat_interleave(p.long()).square(),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("differentiated", ["wrapper", "both"])
def test_gradients_are_eagers(name: str, differentiated: str) -> None:
    f = DIFFERENTIATED[name]
    jf = jit(f)
    for values, plain in (((1, 0, 3), (1, 0, 1)), ((2, 2, 3), (0, 0, 2)), ((1, 0, 3), (1, 1, 1))):
        x = two(*values).requires_grad_()
        p = torch.tensor(plain, dtype=torch.float64).requires_grad_(differentiated == "both" and "computed" in name)
        compare(gradients(jf, x, p), gradients(f, x, p))


def test_parameters_and_captured_tensors_may_decide() -> None:
    chosen = torch.tensor([1.0, -1.0, 1.0])

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))

        def forward(self, x: torch.Tensor) -> Any:
            return x[self.weight > 0], x[chosen > 0]

    model, x = Chosen(), two(1, 2, 3)
    jitted = jit(model)
    for change in (lambda: None, lambda: model.weight.data.neg_(), lambda: chosen.fill_(1), lambda: chosen[0].fill_(-1)):
        change()
        compare(opened(jitted(x)), opened(model(x)))


def _added_where(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As models of several modalities do in each layer: what is selected from was written into, the mask was not."""
    y = x * 2
    for _ in range(2):
        y[mask] += y[mask].exp()
    return y


@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_what_is_selected_from_may_have_been_written_into(transform: type) -> None:
    jf = thunder.jit(_added_where, transforms=[transform()])
    torch.manual_seed(seeded(0))
    for chosen in ([[True, False, True]], [[False, True, False]], [[True, True, False]]):
        x, mask = torch.randn(1, 3, 4), torch.tensor(chosen)
        torch.testing.assert_close(jf(x, mask), _added_where(x, mask))


def _asked_after_writes(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Torch's autograd follows the program from its first operation on: what it writes into is computed out of place."""
    y, i = x * 1, torch.arange(4)
    i[0] += 2
    z = y[1:]
    y.clamp_(-1, 1)
    q = x.sum() + F.one_hot(i, max(i.max() + 1, 5)).shape[1]
    for v in i.tolist():
        q = q * 2 + v
    if y.max() > z.min() + 1:
        q = q + int((y > 0).sum())
    return y, z, q, i, w


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_values_that_are_asked_for_are_those_that_were_written(transform: type, requires_grad: bool) -> None:
    jf = thunder.jit(_asked_after_writes, transforms=[transform()])
    for values in ([0.5, -3.0, 0.2, 2.0], [0.5, 0.6, 0.7, 0.8], [3.0, -3.0, 0.2, 0.1]):
        x = torch.tensor(values, requires_grad=requires_grad)
        compare(opened(jf(x, two(1, 2, 3, 4))), opened(_asked_after_writes(x, two(1, 2, 3, 4))))


def test_what_has_no_value_is_refused() -> None:
    x = two(1, 2, 3)
    meta = TwoTensor(torch.ones(3, device="meta"), torch.ones(3, device="meta"))
    refused: list[tuple[Callable, torch.Tensor, str]] = [
        (lambda x: x[torch.rand_like(x) > 0.5], x, "random numbers"),
        (lambda x: x[torch.rand(3) > 0.5], x, "random numbers"),
        (lambda x: x.nonzero(), meta, "without data"),
    ]
    for f, given, why in refused:
        with pytest.raises(
            (UnsupportedOpError, DataDependentError),
            match=f"(data-dep|the value of)(.|\n)*test_data_sizes.py(.|\n)*{why}",
        ):
            jit(f)(given)


def test_a_size_that_the_operation_does_not_find_again_is_an_error() -> None:
    select = Sized(aten.masked_select.default, (torch.float64,))
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert select(((1,),), x, x > 0).tolist() == [1.0]
    with pytest.raises(DataDependentError, match=r"sizes \[\[1\]\](.|\n)*\[\[2\]\]"):
        select(((2,),), x, x > 0)


def test_nothing_of_the_first_call_stays_with_the_trace() -> None:
    jf, x = jit(lambda x, p: x[torch.sigmoid(p) > 0.5]), two(1, 2, 3)
    p = torch.ones(3)
    gone = [weakref.ref(t) for t in (x.a, p)]
    jf(x, p)
    del x, p
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_of_ever_new_sizes_some_traces_are_kept() -> None:
    jf = jit(lambda x: x[x > 0] * 2)
    n = data_sizes.MAX_TRACES
    with pytest.warns(AcquiredAnewWarning, match=f"in {n} calls(.|\n)*test_data_sizes.py"):
        for size in range(n + 2):
            x = two(*([1] * size + [0] * (n + 2 - size)))
            assert jf(x).shape == (size,)
    assert len(thunder.compile_stats(jf).interpreter_cache) == n


def test_normed_traces_and_norm_maps_are_as_eager() -> None:
    mask = torch.tensor([True, False, True])
    f = lambda x, mask: x[:, mask] * 2  # noqa: E731
    jf = thunder.jit(f, transforms=[NormTransform()])
    for chosen in (mask, ~mask, mask):
        x = RMSTensor(2.0, backing=torch.ones(2, 3), perturbation_size=0.1)
        found, expected = jf(x, chosen), f(x, chosen)
        assert type(found) is type(expected)
        for name in ("backing", "norm_size", "perturbation_size"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    by_map = build_norm_map(f, torch.ones(2, 3), mask)
    for chosen in (mask, torch.tensor([True, False, False]), mask):  # also of one that is no argument
        x = RMSTensor(2.0, backing=torch.ones(2, 3))
        of_closure = build_norm_map(lambda x: f(x, chosen), torch.ones(2, 3))(RMSTensor(2.0))  # noqa: B023
        for found in (by_map(RMSTensor(2.0), chosen), of_closure):
            assert found.shape == f(x, chosen).shape and found.norm_size == f(x, chosen).norm_size
    with pytest.raises(UnsupportedOpError, match="data-dependent"):
        by_map(RMSTensor(2.0), mask.to("meta"))


def test_sizes_are_those_of_the_program_under_autocast() -> None:
    """Which products are above their mean is another question in bfloat16."""
    generator = torch.Generator().manual_seed(seeded(0))
    given = [TwoTensor(t, t.clone()) for t in (torch.randn(40, 30, generator=generator) for _ in range(3))]

    def f(x: torch.Tensor) -> Any:
        y = x @ x.t()
        with torch.autocast("cpu", torch.bfloat16):
            z = x @ x.t()
        return y[y > 3.0], z[z > 3.0], z[y > 3.0]

    for outside in (False, True):
        jf = jit(f)
        for x in given:
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                compare(opened(jf(x)), opened(f(x)))


def test_second_derivatives_are_eagers() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x[x > 1].square() * x.masked_select(x > 1)).sum()

    found = []
    for g in (jit(f), f):
        x = two(1, 2, 3).requires_grad_()
        y = g(x)
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, two(*[1.0]).sum())
        found.append([opened(first.detach()), opened(second.detach())])
    compare(*found)


def test_what_the_program_writes_into_an_input_decides_as_in_eager_mode() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.sub_(1)
        return x[x > 0] * 2

    jf, x, y = jit(f), two(1, 2, 3, 4), two(1, 2, 3, 4)
    for _ in range(3):
        compare(opened((jf(x), x)), opened((f(y), y)))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _wrapped(*shape: int) -> TwoTensor:
    return TwoTensor(_random(*shape), _random(*shape))


def _assigned(x: Any, mask: Any, value: Any) -> Any:
    y = x * 2
    y[mask] = value
    return y.sin()


def _of_selected(x: Any, mask: Any, value: Any) -> Any:
    y = x * 2
    y[mask] = value[mask] * 3
    return y.sin()


def _by_comparison(x: Any, p: Any, value: Any) -> Any:
    y = x * 2
    y[p > 0] = value
    return y * y


def _out_of_place(x: Any, mask: Any, value: Any) -> Any:
    return torch.index_put(x * 2, (mask,), value, accumulate=True).cos()


def _after_a_write(x: Any, mask: Any, value: Any) -> Any:
    y = x * 2
    mask[0] = True
    y[mask] = value
    return y.sin()


ROWS = torch.tensor([True, False, True])
ASSIGNED: dict[str, tuple[Callable, Callable[[], tuple]]] = {
    "a number that has a gradient": (_assigned, lambda: (_wrapped(3, 4), _random(3, 4) > 0, _random())),
    "plain rows": (_assigned, lambda: (_wrapped(3, 4), ROWS.clone(), _random(2, 4))),
    "rows of a wrapper": (_assigned, lambda: (_wrapped(3, 4), ROWS.clone(), _wrapped(2, 4))),
    "a broadcast row": (_assigned, lambda: (_wrapped(3, 4), ROWS.clone(), _random(4))),
    "selected": (_of_selected, lambda: (_wrapped(3, 4), _random(3, 4) > 0, _random(3, 4))),
    "selected of a wrapper": (_of_selected, lambda: (_wrapped(3, 4), _random(3, 4) > 0, _wrapped(3, 4))),
    "where a plain tensor is positive": (_by_comparison, lambda: (_wrapped(3, 4), _random(3, 4), _random())),
    "out of place": (_out_of_place, lambda: (_wrapped(3, 4), ROWS.clone(), _wrapped(2, 4))),
}
WRITTEN = {"a mask that the program writes into": (_after_a_write, lambda: (_wrapped(3, 4), ROWS.clone(), _random(4)))}


@pytest.mark.parametrize(
    ("name", "second"), [*((name, second) for name in ASSIGNED for second in (False, True)), *((name, False) for name in WRITTEN)]
)
def test_gradients_of_what_is_assigned_at_a_mask_are_eagers(name: str, second: bool) -> None:
    f, make = (ASSIGNED | WRITTEN)[name]

    def gradients(g: Callable) -> list:
        torch.manual_seed(seeded(0))
        x, mask, value = make()
        moving = [x.requires_grad_(), value.requires_grad_()]
        loss = g(x, mask, value).sum()
        found = torch.autograd.grad(loss, moving, torch.ones_like(loss.detach()), create_graph=second)
        if second:
            total = sum((t * t).sum() for t in found)
            found = torch.autograd.grad(total, moving, torch.ones_like(total.detach()), allow_unused=True)
        return [None if t is None else opened(t.detach()) for t in (loss, *found)]

    jf, want = jit(f), gradients(f)
    for _ in range(2):
        compare(gradients(jf), want)
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)


def test_another_mask_in_a_backward_is_a_trace_of_its_own() -> None:
    jf = jit(_assigned)
    for rows in ([True, False, False], [False, True, False], [True, True, False]):
        found = []
        for g in (jf, _assigned):
            torch.manual_seed(seeded(0))
            x, value = _wrapped(3, 4).requires_grad_(), _random(4).requires_grad_()
            loss = g(x, torch.tensor(rows), value).sum()
            found.append([opened(t) for t in torch.autograd.grad(loss, (x, value), torch.ones_like(loss.detach()))])
        compare(*found)
    assert thunder.cache_misses(jf) == 2


def test_new_memory_that_is_written_into_is_not_the_input():
    """It takes the input for its dtype: what it holds before is no part of the mask."""

    def f(x):
        y = x.new_empty(4)
        y.index_fill_(0, (x > 0).nonzero()[:, 0], 3.0)
        return y.index_fill_(0, (x <= 0).nonzero()[:, 0], 2.0)

    jf = jit(f)
    for x in SEVERAL:
        compare(jf(x.a), f(x.a))


def test_values_of_a_tensor_that_a_rule_is_the_first_to_meet_are_known() -> None:
    """Making its fake was taken for an operation of the program, `torch.empty`, where a rule asked for it (a graph network that counts neighbours)."""

    def mean_of_neighbours(x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        _, to = edges
        to[:, None].expand_as(x)
        return x / torch.bincount(to, minlength=4).clamp(min=1)[:, None]

    torch.manual_seed(seeded(0))
    x, edges = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3], [1, 1, 3, 0]])
    found = thunder.jit(mean_of_neighbours, transforms=[NormTransform()])(RMSTensor.of(x), edges)
    torch.testing.assert_close(found.backing, mean_of_neighbours(x, edges))


_NORMALIZED = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(3, track_running_stats=True),
    "two": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.BatchNorm1d(3)),
}
_ASKED = {
    "condition": lambda y: y * (2 if y.sum() > 0 else 3),
    "mask": lambda y: y[y > 0],
    "number": lambda y: y * y.sum().item(),
}


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("name", "asked"), crossed(_NORMALIZED, _ASKED))
def test_statistics_are_written_once_a_call(name, asked, is_wrapped):
    """What is computed to learn a value writes into nothing of the model's."""
    module, ask = _NORMALIZED[name](), _ASKED[asked]
    copied = copy.deepcopy(module)
    jitted = thunder.jit(lambda x: ask(module(x)).sum(), transforms=[SubclassTransform()])
    for x in map(torch.clone, torch.randn(3, 8, 3, 4)):
        given = TwoTensor(x, x.clone()) if is_wrapped else x
        assert_close(jitted(given), ask(copied(given)).sum())
    for name, t in copied.state_dict().items():
        assert_close(module.state_dict()[name], t, msg=lambda m, name=name: f"{name}: {m}")


def layers_that_ask(x: torch.Tensor, n: int = 8) -> torch.Tensor:
    total = 0.0
    for i in range(n):
        x = torch.sin(x)
        if x.sum() > 0:
            x = x * 2
        if i % 4 == 3:
            total = total + x[0].max().item()
            x = x + total
        if (x > 0.5).any():
            x = x - x[x > 0.5].mean()
    return x


def test_what_is_before_several_questions_runs_once_for_all_of_them() -> None:
    """Once for the questions and once for the result, however many questions there are."""
    torch.manual_seed(seeded(5))
    x = torch.rand(4, 4)
    jitted = thunder.jit(layers_that_ask, transforms=[NormTransform()])
    for _ in range(2):  # in the second one Thunder's prologue runs, and ours is made
        torch.testing.assert_close(jitted(x), layers_that_ask(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        found = jitted(x)
    assert thunder.cache_misses(jitted) == 1
    torch.testing.assert_close(found, layers_that_ask(x))
    assert sum(event.name == "aten::sin" for event in profiled.events()) == 2 * 8
    for other in (-x, 3 * x, x - 0.5):
        torch.testing.assert_close(jitted(other), layers_that_ask(other))
