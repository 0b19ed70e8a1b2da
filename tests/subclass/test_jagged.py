"""Jagged nested tensors: what a trace serves, which of them fit together, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nested import as_nested_tensor, nested_tensor_from_jagged

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.subclass.acquiring.lengths import Lengths
from thunder_norm.transforms import SubclassTransform
import thunder


def jit(f: Callable) -> Callable:
    return thunder.jit(f, transforms=[SubclassTransform()])


def counts(jf: Callable) -> tuple[int, int]:
    return thunder.cache_misses(jf), thunder.cache_hits(jf)


def jagged(*lengths: int, features: int = 4, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    """Nothing is remembered of the shortest and longest length."""
    offsets = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    values = torch.randn(sum(lengths), features).to(dtype)
    return nested_tensor_from_jagged(values, offsets).detach().requires_grad_(requires_grad)


def in_heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, **options) -> torch.Tensor:
    return F.scaled_dot_product_attention(in_heads(q), in_heads(k), in_heads(k.sin()), **options)


# -- which offsets a trace serves -----------------------------------------------------------------------------------------

SERVES_ALL = {
    "pointwise": lambda x: x.sin() * x,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "padding to a length": lambda x: x.to_padded_tensor(0.5, (3, 12, 4)),
    "padding": lambda x: x.to_padded_tensor(0.5),
    "attention": lambda x: attend(x, x),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "a plain tensor for each": lambda x: x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
}
SERVES_ITS_OWN = {
    "unbind": lambda x: [part.cumsum(0) for part in x.unbind()],
    "one sequence": lambda x: x[1] * 2,
    "product over the ragged dimension": lambda x: x.transpose(1, 2) @ x,
    "parts of the batch": lambda x: [y * 2 for y in x.chunk(2, 0)],
}
LENGTHS = [(2, 3, 4), (4, 3, 2), (3, 2, 4), (1, 7, 1), (9, 0, 0), (2, 3, 4)]
OTHER_LENGTHS = [(20, 30, 51), (1, 0, 2), (30, 40, 33)]  # together


def assert_eager_s(program: Callable, all_lengths: list, *, expected: tuple[int, int], requires_grad: bool) -> None:
    jf = jit(program)
    for lengths in all_lengths:
        torch.manual_seed(seeded(0))
        x = jagged(*lengths, dtype=torch.float64, requires_grad=requires_grad)
        own = nested_tensor_from_jagged(x.values().detach().clone(), x.offsets().clone()).detach().requires_grad_(requires_grad)
        want, got = program(x), jf(own)
        assert_same(got, want)
        if requires_grad and isinstance(want, torch.Tensor) and want.requires_grad:
            try:
                want.backward(torch.ones_like(want))
            except (NotImplementedError, RuntimeError):  # torch has no gradient of a sum over the ragged dimension
                continue
            got.backward(torch.ones_like(got))
            assert_same(own.grad, x.grad)
    assert counts(jf) == expected


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", SERVES_ALL)
def test_one_trace_serves_all_offsets_of_the_first_total_length_and_one_those_of_all_others(name: str, requires_grad: bool):
    requires_grad = requires_grad and name not in ("sum", "mean")
    lengths = LENGTHS if name == "padding to a length" else LENGTHS[:3] + OTHER_LENGTHS + LENGTHS[:1]
    assert_eager_s(SERVES_ALL[name], lengths, expected=(1, 5) if lengths is LENGTHS else (2, 5), requires_grad=requires_grad)


def test_where_the_longest_is_asked_for_one_trace_serves_all_offsets_with_it():
    assert_eager_s(lambda x: x.softmax(1), LENGTHS, expected=(3, 3), requires_grad=True)
    assert_eager_s(lambda x: x.softmax(1), [(2, 3, 5), (5, 5, 5), (1, 5, 5)], expected=(2, 1), requires_grad=True)


@pytest.mark.parametrize("name", SERVES_ITS_OWN)
def test_where_sequences_are_taken_apart_other_lengths_are_traced_anew(name: str):
    assert_eager_s(SERVES_ITS_OWN[name], LENGTHS, expected=(5, 1), requires_grad=False)


W = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()
ANY_TOTAL = {
    "a loss of values": lambda x: F.mse_loss(F.linear(x, W).values(), x.values().tanh()),
    "values in and out": lambda x: F.linear(x.values(), W).reshape(-1, 2).relu().view(-1, 4),
    "made of values": lambda x: nested_tensor_from_jagged(F.layer_norm(x.values() @ W, (4,)), x.offsets()).softmax(-1),
    "rows with rows": lambda x: (x.values() @ W @ x.values().t()).mean(),
    "written into": lambda x: F.linear(x, W).mul_(2).sub_(1).sum(),
    "several": lambda x: (F.linear(x, W).sum(), x.sin(), torch.cat([x.values(), x.values() @ W])),
}
ITS_TOTAL = {
    "branch": lambda x: x.sum() * 2 if x.values().shape[0] > 10 else x.sum(),
    "len": lambda x: x.sum() / len(x.values()),
    "numel": lambda x: x.sum() / x.numel() + torch.numel(x.values()),
    "rows one by one": lambda x: sum(row.sum() * i for i, row in enumerate(x.values())),
    "size of another": lambda x: x.values() + torch.arange(x.values().size(0)).unsqueeze(1),
    "taken from a dict": lambda x: max([x.values()], key=lambda v: v.size(0)).sum(),
    "a function under vmap": lambda x: torch.func.vmap(lambda row: row.sum())(x.values()),
}


@pytest.mark.parametrize("name", ANY_TOTAL)
def test_a_second_trace_serves_all_total_lengths(name: str):
    jf = jit(ANY_TOTAL[name])
    for lengths in ((2, 3), (40, 61), (2, 1), (31, 72)):
        torch.manual_seed(seeded(0))
        x = jagged(*lengths, dtype=torch.float64, requires_grad=True)
        results = [program(x) for program in (jf, ANY_TOTAL[name])]
        assert_same(*results)
        sums = [sum(t.square().sum() for t in (r if isinstance(r, tuple) else (r,))) for r in results]
        assert_same(*(torch.autograd.grad(s, (W, x)) for s in sums))
    assert counts(jf) == (2, 2)
    for trace in (thunder.last_traces(jf)[-1], thunder.last_backward_traces(jf)[-1]):  # of the call with 101 rows
        assert not re.search(r"\b(101|202|404|10201)\b", re.sub("#.*", "", str(trace)))


@pytest.mark.parametrize("name", ITS_TOTAL)
def test_where_something_hangs_on_the_total_length_each_is_traced_anew(name: str):
    jf = jit(ITS_TOTAL[name])
    for lengths in ((2, 3), (5, 6), (6, 6), (6, 6)):
        x = jagged(*lengths)
        assert_same(jf(x), ITS_TOTAL[name](x))
    assert counts(jf) == (3, 1)


def test_total_lengths_of_zero_and_one_and_values_with_gaps_have_traces_of_their_own():
    jf = jit(lambda x: (x * 2, x.values() + 1))
    for lengths in ((2, 3), (4, 4), (1, 0), (0, 0), (3, 4)):
        x = jagged(*lengths)
        assert_same(jf(x), (x * 2, x.values() + 1))
    assert counts(jf) == (4, 1)
    apart = nested_tensor_from_jagged(torch.randn(7, 8)[:, ::2], torch.tensor([0, 3, 7]))
    assert_same(jf(apart), (apart * 2, apart.values() + 1))
    assert counts(jf) == (5, 1)


def test_total_lengths_of_two_that_have_to_be_equal():
    def f(x, y):
        return x.values() * y.values()

    jf = jit(f)
    for n in (3, 5, 9, 4):
        x, y = jagged(n, 2), jagged(1, n + 1)
        assert_same(jf(x, y), f(x, y))
    assert counts(jf) == (2, 2)
    with pytest.raises(RuntimeError, match="must match the size"):
        jf(jagged(3, 3), jagged(3, 4))


def test_total_lengths_of_two_may_differ_and_so_may_that_of_a_permuted_one():
    def f(x, y):
        return attend(x, y).sum() + x.values().t().sum(0).square().mean(), y.transpose(1, 2) * 2

    jf = jit(f)
    for n, m in ((3, 5), (6, 4), (9, 9), (4, 8)):
        x, y = (jagged(k, 2, requires_grad=True) for k in (n, m))
        found, expected = jf(x, y), f(x, y)
        assert_same(found, expected)
        assert_same(*(torch.autograd.grad(r[0] + r[1].sum(), (x, y)) for r in (found, expected)))
    assert counts(jf) == (2, 2)


def test_second_derivatives_and_writes_into_inputs_of_any_total_length():
    twice, written = jit(lambda x: x.sin() * x), jit(lambda x: x.mul_(3).sum())
    for n in (3, 5, 9):
        x = jagged(n, 2, dtype=torch.float64, requires_grad=True)
        found = []
        for result in (twice(x), x.sin() * x):
            (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
            found.append(torch.autograd.grad((gradient * gradient).sum(), x))
        assert_same(*found)
        own, eager_s = jagged(n, 2), jagged(n, 2)
        own.values().copy_(eager_s.values())
        assert_same((written(own), own), (eager_s.mul_(3).sum(), eager_s))
    assert counts(twice) == counts(written) == (2, 1)


def test_backwards_of_calls_with_several_total_lengths_in_any_order_and_of_some_results_alone():
    def f(x):
        return x.sin(), F.linear(x, W), x.values().exp()

    jf = jit(f)
    inputs = [jagged(n, 2, dtype=torch.float64, requires_grad=True) for n in (3, 9, 5)]
    for x, found in reversed([(x, jf(x)) for x in inputs]):
        for got, want in zip(found, f(x), strict=True):
            assert_same(*(torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True) for y in (got, want)))
    assert counts(jf) == (2, 1)


def test_a_program_that_cannot_be_acquired_for_all_total_lengths_is_for_one(monkeypatch):
    jf = jit(lambda x: x.unflatten(-1, (2, 2)) * 2)
    tried = []

    def late(*_):
        tried.append(1)
        raise TypeError("unhashable")

    for n in (3, 5, 9, 5):
        x = jagged(n, 2)
        assert_same(jf(x), x.unflatten(-1, (2, 2)) * 2)
        monkeypatch.setattr(Lengths, "late", lambda self, *call: late() if self.is_on else call)
    assert counts(jf) == (3, 1) and len(tried) == 1


def test_a_longest_length_that_is_given_is_eager_s():
    def made(**extremes) -> torch.Tensor:
        return nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]), **extremes)

    jf = jit(lambda x: x.to_padded_tensor(0.0))
    for extremes in ({"max_seqlen": 7}, {}, {"max_seqlen": 6}, {"max_seqlen": 7, "min_seqlen": 2}, {"max_seqlen": 7}):
        assert_same(jf(made(**extremes)), made(**extremes).to_padded_tensor(0.0))
    assert counts(jf) == (4, 1)


def test_offsets_that_are_changed_in_place_are_read_again():
    jf = jit(lambda x: [part * 2 for part in x.unbind()])
    x = jagged(2, 3)
    assert_same(jf(x), [part * 2 for part in x.unbind()])
    x.offsets()[1] = 4
    assert_same(jf(x), [part * 2 for part in x.unbind()])


# -- which fit together ---------------------------------------------------------------------------------------------------


def with_offsets_of(x: torch.Tensor) -> torch.Tensor:
    return nested_tensor_from_jagged(torch.randn_like(x.values()), x.offsets())


def test_results_and_gradients_have_the_ragged_length_of_their_inputs():
    x = jagged(2, 3, requires_grad=True)
    y, z = jit(lambda x: (x * 2, (x + 1).transpose(1, 2)))(x)
    assert y.offsets() is x.offsets()
    assert y.shape == x.shape and z.shape[2] == x.shape[1]
    (y * x + z.transpose(1, 2)).sum().backward()  # eager mode takes them for tensors of one shape
    assert x.grad.shape == x.shape


def test_results_that_are_made_with_common_offsets_fit_together():
    def f(values, offsets):
        return nested_tensor_from_jagged(values, offsets), nested_tensor_from_jagged(values * 2, offsets), offsets

    offsets = torch.tensor([0, 2, 5])
    x, y, same = jit(f)(torch.randn(5, 4), offsets)
    assert x.shape == y.shape and x.offsets() is same is offsets
    assert_same(x + y, x * 3)


def test_inputs_that_fit_together_have_a_trace_of_their_own():
    def f(x, y):
        return x * 2 if x.shape == y.shape else y * 3

    jf = jit(f)
    x = jagged(2, 3)
    for y in (with_offsets_of(x), jagged(2, 3), with_offsets_of(x), jagged(3, 2)):
        assert_same(jf(x, y), f(x, y))
    assert counts(jf) == (2, 2)


def test_plain_offsets_that_are_those_of_an_input():
    def f(values, offsets, x):
        y = nested_tensor_from_jagged(values, offsets)
        return y + x if y.shape == x.shape else y.sum() * x

    def last(x, values, offsets):
        return f(values, offsets, x)

    for program in (f, last):
        jf = jit(program)
        x, values = jagged(2, 3), torch.randn(5, 4)
        for offsets in (x.offsets(), x.offsets().clone(), x.offsets()):
            args = (values, offsets, x) if program is f else (x, values, offsets)
            assert_same(jf(*args), program(*args))
        assert counts(jf) == (2, 1)


def test_those_that_do_not_fit_are_torch_s_error_also_after_a_trace():
    jf = jit(lambda x, y: x + y)
    x = jagged(2, 3)
    assert_same(jf(x, x), x + x)
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function"):
        jf(x, jagged(2, 3))
    assert_same(jf(x, with_offsets_of(x) * 0), x)


# -- values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype):
    x = jagged(2, 3, dtype=dtype)
    program = (lambda x: ~x) if dtype is torch.bool else lambda x: x * x + 1
    assert_same(jit(program)(x), program(x))


def test_dropout_and_random_tensors_are_those_of_the_seed():
    def program(x):
        return F.dropout(x, 0.5) + torch.rand_like(x)

    x = jagged(2, 3)
    found = []
    for f in (program, jit(program)):
        torch.manual_seed(seeded(0))
        found.append(f(x))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_of_each_sequence(dtype: torch.dtype):
    torch.manual_seed(seeded(0))
    x, y = jagged(2, 3, 1, dtype=dtype, requires_grad=True), jagged(2, 1, 5, dtype=dtype, requires_grad=True)
    got = jit(lambda x, y: attend(x, y, scale=0.7))(x, y)
    weights = torch.randn_like(got.values())
    (got.values() * weights).sum().backward()

    exact = [t.detach().double().requires_grad_() for t in (x.values(), y.values())]
    parts = [list(t.split(u.offsets().diff().tolist())) for t, u in zip(exact, (x, y), strict=True)]
    want = []
    for q, k in zip(*parts, strict=True):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(0, 1) for t in (q, k, k.sin()))
        want.append(F.scaled_dot_product_attention(q, k, v, scale=0.7))
    want = torch.cat(want, 1)
    (want * weights).sum().backward()
    near = {"rtol": 0.1, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got.values().double(), want, **near)
    for t, e in zip((x, y), exact, strict=True):
        torch.testing.assert_close(t.grad.values().double(), e.grad, **near)


def test_values_that_are_returned_have_their_gradient():
    x = jagged(2, 3, requires_grad=True)
    values, offsets = jit(lambda x: (x.values(), x.offsets()))(x)
    assert values.requires_grad and offsets is x.offsets()
    (values * 3).sum().backward()
    assert_same(x.grad.values(), torch.full((5, 4), 3.0))


def test_a_split_has_a_gradient_although_eager_mode_has_none():
    x = jagged(2, 3, requires_grad=True)
    first, second = jit(lambda x: x.split([1, 3], -1))(x)
    (first.values().sum() + 2 * second.values().sum()).backward()
    assert_same(x.grad.values(), torch.tensor([1.0, 2, 2, 2]).expand(5, 4).contiguous())


# -- refusals -------------------------------------------------------------------------------------------------------------


BY_NAME = [
    lambda x: torch.split(tensor=x, split_size_or_sections=3, dim=-1),
    lambda x: x.split(split_size=[1, 3], dim=2),
    lambda x: torch.chunk(input=x, chunks=2, dim=-1),
    lambda x: x.chunk(chunks=2),
    lambda x: torch.select(input=x, dim=0, index=1),
    lambda x: x.select(dim=0, index=-1),
    lambda x: torch.unbind(input=x),
    lambda x: x.unbind(dim=0),
]


@pytest.mark.parametrize("program", BY_NAME)
def test_arguments_by_torch_s_names(program: Callable):
    x = jagged(2, 3, 4)
    assert_same(jit(program)(x), program(x))


def refused(program: Callable, *args: object, match: str) -> None:
    with pytest.raises((UnsupportedOpError, UnsupportedSubclassError), match=match):
        jit(program)(*args)


def test_a_ragged_length_is_no_number():
    """Eager mode computes with a placeholder, 7777777."""
    refused(lambda x, y: y * x.size(1), jagged(2, 3), torch.ones(2), match="mul.Tensor of a ragged length")


def test_what_is_refused():
    x = jagged(2, 3)
    refused(lambda a: torch.nested.nested_tensor([a, a]), torch.randn(2), match="strided layout")
    refused(lambda a: as_nested_tensor([a, a]), torch.randn(2), match="strided layout")
    refused(lambda x: x * 2, torch.nested.nested_tensor([torch.randn(2, 4)]), match="strided layout")
    made = "torch.nested.nested_tensor with requires_grad=True"
    refused(lambda a: torch.nested.nested_tensor([a], layout=torch.jagged, requires_grad=True), torch.randn(2, 4), match=made)
    refused(lambda x: attend(x, x, dropout_p=0.5), x, match="dropout")
    refused(lambda x: attend(x, x, is_causal=True), x, match="causal")  # by torch too
    assert_same(jit(lambda x: x * 2)(x), x * 2)


def test_a_plain_value_of_it_may_decide():
    f = lambda x: x * 3 if x.sum() > 0 else x * 2  # noqa: E731
    jf = jit(f)
    for x in (a := jagged(2, 3), -a, a * a, jagged(2, 3)):
        assert_same(jf(x), f(x))


def _set(o):
    o[1] = 1


CHANGES = [_set, lambda o: o.copy_(torch.tensor([0, 1, 5])), lambda o: o[1:2].sub_(1)]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_lengths_that_the_program_has_changed_are_the_new_ones(change, is_before):
    def program(values, offsets):
        if is_before:
            change(offsets)
        x = nested_tensor_from_jagged(values, offsets)
        if not is_before:
            change(offsets)
        return [part.sum() for part in x.unbind()]

    jitted, values = thunder.jit(program, transforms=[SubclassTransform()]), torch.arange(10.0).reshape(5, 2)
    for lengths in ([0, 2, 5], [0, 3, 5], [0, 2, 5]):
        given, expected = torch.tensor(lengths), torch.tensor(lengths)
        torch.testing.assert_close(jitted(values, given), program(values, expected))
        assert torch.equal(given, expected)
