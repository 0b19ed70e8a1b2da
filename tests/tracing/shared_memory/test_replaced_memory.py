"""Tensors that a program has lie in other memory, ``x.data = value`` and ``y.set_(value)``: as in eager mode, or refused."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.seeds import crossed, seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, ProfileTransform, SubclassTransform
import thunder


class Module(nn.Module):
    """An encoder, an average of it, and a buffer; `program` is its forward."""

    def __init__(self, program):
        super().__init__()
        torch.manual_seed(seeded(0))
        self.w = nn.Parameter(torch.randn(3, 3))
        self.k = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.register_buffer("r", torch.randn(3, 3))
        self.program = program

    def forward(self, x):
        return self.program(self, x)


def momentum(m, x):
    m.k.data = m.k.data * 0.9 + m.w.data * 0.1
    return x @ m.w - x @ m.k


def momentum_without_gradients(m, x):
    with torch.no_grad():
        m.k.data = m.k * 0.9 + m.w * 0.1
    return x @ m.w * (x @ m.k)


def momentum_of_all(m, x):
    for a, b in ((m.k, m.w), (m.r, m.w)):
        a.data = a.data.mul(0.9).add(b.data, alpha=0.1)
    return x @ m.k + m.r


def clipped(m, x):
    m.w.data = m.w.data.clamp(-0.5, 0.5)
    return (x @ m.w).sin()


def after_a_product(m, x):
    y = x @ m.w
    m.w.data = m.w.data * 2
    return y + (x @ m.w).exp()


def twice(m, x):
    m.w.data = m.w.data * 2
    y = x @ m.w
    m.k.data = m.w.data + 1
    m.k.data = m.k.data * 3
    return y * m.k


def another_parameter(m, x):
    m.k.data = m.w.data
    return x @ m.k


def what_is_given(m, x):
    m.k.data = x
    return x @ m.k


def what_is_returned(m, x):
    z = x * 2
    m.k.data = z
    return z, x @ m.k


def exchanged(m, x):
    before = m.k.data
    m.k.data = m.r.data
    m.r.data = before
    return x @ m.k - m.r


def transposed(m, x):
    m.k.data = (m.k * 1).t()
    return x @ m.k, m.k.t().contiguous().view(-1)


def views_keep_the_memory(m, x):
    row, flat = m.k[0], m.k.data.view(-1)
    m.k.data = m.k.data * 5
    return row + flat.sum() + m.k


def written_before(m, x):
    m.r.mul_(2)
    row = m.r[0]
    m.r.data = m.r + x
    return m.r + row


def written_after(m, x):
    z = x * 2
    m.r.data = z
    m.r.mul_(3)
    z.add_(1)
    return z + m.r


def written_before_and_after(m, x):
    same = m.r.mul_(2)
    m.r.data = m.r + x
    m.r.add_(1)
    return same * m.r


def the_input(m, x):
    y = x.sum()
    x.data = x * 2
    return y + x @ m.w


def another_shape(m, x):
    before = m.r.shape
    m.r.data = x[:2] * 3
    return m.r.sum(1) + len(before) + m.r.shape[0] + m.r.numel(), (x @ m.w).sum()


def returned_itself(m, x):
    m.r.data = m.r * 2
    return m.r


def size_by_values(m, x):
    m.r.data = x * 2
    y = m.r
    return y[x > 0]


def detached_and_written(m, x):
    m.r.data = x + 1
    m.r.data.mul_(2)
    return m.r.exp()


def written_through_its_data(m, x):
    m.w.data.mul_(0.5)
    return (x @ m.w).sin()


def written_detached_and_without_gradients(m, x):
    m.w.detach()[0].add_(1)
    with torch.no_grad():
        m.w.mul_(0.5)
    return x @ m.w * m.r


def kept_elsewhere(m, x):
    m.r.data = m.r.data + 1
    m.other = m.r * 1
    return x @ m.w + m.other


def beside_a_wrapper(m, x):
    pair = TwoTensor(x * 2, m.k)
    m.k.data = m.k.data * 3
    return (pair * m.k).a + x @ m.w.detach(), (pair + 1).b


def inside_of_a_wrapper(m, x):
    pair = TwoTensor(x * 1, m.k * 2)
    pair.b.data = x * 5
    return (pair + 1).b @ m.w + m.k


def an_input_inside_of_a_wrapper(m, x):
    pair = TwoTensor(x * 1, m.k)
    pair.b.data = x * 5
    return (pair + 1).b @ m.w + m.k


def put_back(m, x):
    kept = [t.data for t in (m.k, m.r)]
    for t in (m.k, m.r):
        t.data = t.data * 0.5
    y = x @ m.k + m.r
    for t, data in zip((m.k, m.r), kept, strict=True):
        t.data = data
    return y, x @ m.k, m.r * 2


def put_back_by_steps(m, x):
    first = m.r.data
    m.r.data = m.r * 2
    second = m.r.data
    m.r.data = m.r * 2
    y = m.r * x
    m.r.data = second
    z = m.r * x
    m.r.data = first.to(first.dtype)
    return y, z, m.r * x


def cast_to_what_it_is(m, x):
    m.w.data = m.w.data.to(device=x.device, dtype=x.dtype)
    m.r.data = m.r.data.float()
    return x @ m.w + m.r


INPUTS = [
    put_back, put_back_by_steps, cast_to_what_it_is,
    momentum, momentum_without_gradients, momentum_of_all, clipped, after_a_product, twice, another_parameter, what_is_given,
    what_is_returned, exchanged, transposed, views_keep_the_memory, written_before, written_after, written_before_and_after,
    the_input, another_shape, returned_itself, size_by_values, detached_and_written, written_through_its_data, written_detached_and_without_gradients,
    kept_elsewhere, beside_a_wrapper, inside_of_a_wrapper, an_input_inside_of_a_wrapper,
]  # fmt: skip


def made(m, x):
    y = x * 1
    y.data = x * 3
    return y + m.w


def made_with_a_history(m, x):
    y = m.w * 2
    before = y + 1
    y.data = x * 3
    return y * y + before


def made_of_another_shape(m, x):
    y = x @ m.w
    z = x * 1
    z.data = x[:2]
    return y + z.sum(0) + z.shape[0]


def made_and_written(m, x):
    z, y = x * 3, x * 1
    y.data = z
    y.mul_(2)
    return z * y * m.r


def made_and_viewed(m, x):
    y = x * 1
    v = y.view(-1)
    y.data = x * 3
    v.mul_(2)
    return v, y


def set_to_another_shape(m, x):
    y = torch.empty(3)
    y.set_(x * 2)
    return y + 1 + y.shape[0]


def set_and_written(m, x):
    z, y = x * 2, torch.empty(0)
    y.set_(z)
    z.mul_(2)
    return y + 1


def set_to_nothing(m, x):
    y = x * 2
    z = y.set_()
    return x + y.numel() + z.shape[0]


def set_without_history(m, x):
    y = torch.zeros(3)
    y.set_((m.w * 2).detach())
    return y @ m.w


MADE = [
    made, made_with_a_history, made_of_another_shape, made_and_written, made_and_viewed, set_to_another_shape, set_and_written,
    set_to_nothing, set_without_history,
]  # fmt: skip


def _tensors(result):
    return [
        u for t in (result if isinstance(result, tuple) else (result,)) for u in ((t.a, t.b) if type(t) is TwoTensor else (t,))
    ]


def _run(program, transform, x, *, gradients):
    """Results of three calls, and what the module holds after each, in the memory it has and in the memory it had."""
    module = Module(program)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    aliases = {n: t.detach() for n, t in held.items()}
    call = module if transform is None else thunder.jit(module, transforms=[transform()])
    found = []
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            given = x.clone().requires_grad_(gradients and x.requires_grad)
            outs = _tensors(call(given))
            loss = sum(t.sum() for t in outs)
            leaves = [t for t in (module.w, given) if t.requires_grad]
            if gradients and isinstance(loss, torch.Tensor) and loss.requires_grad:
                found += torch.autograd.grad(loss, leaves, allow_unused=True)
            tensors = [*outs, given, *held.values()]
            found += [t.detach().clone() for t in (*tensors, *aliases.values())]
            found += [t.stride() for t in held.values()]
            found += [a.data_ptr() == b.data_ptr() for a, b in itertools.combinations((*outs, *held.values(), given), 2)]
            assert all(t is held[n] for n, t in (*module.named_parameters(), *module.named_buffers()) if n in held)
    return found


@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(("program", "transform"), crossed(INPUTS + MADE, [SubclassTransform, NormTransform, ProfileTransform]))
def test_programs_are_eager_s(program, transform, gradients):
    if transform is ProfileTransform and program in (size_by_values, kept_elsewhere, beside_a_wrapper, inside_of_a_wrapper):
        pytest.skip("wrappers, sizes by values and what a module keeps are for SubclassTransform")
    x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75], [-2.0, 1.0, 3.0]])
    found, expected = (_run(program, t, x, gradients=gradients) for t in (transform, None))
    torch.testing.assert_close(found, expected)


def uses_it_before(m, x):
    y = m.w.exp()
    m.w.data = m.w.data * 2
    return y * m.w


def uses_it_beside_what_requires_grad(m, x):
    y = (x * m.w) @ m.w
    m.w.data = m.w.data * 2
    return y


def uses_what_it_made_before(m, x):
    y = m.w * 2
    before = y.sin()
    y.data = x * 3
    return y + before


def uses_a_factor_before(m, x):
    y = x * 2
    product = m.w @ y
    y.data = x * 3
    return product


def uses_a_condition_before(m, x):
    positive = x > 0
    chosen = torch.where(positive, m.w, -m.w)
    positive.data = ~positive
    return chosen


def writes_into_a_value_with_another_history(m, x):
    z = x * 2
    m.w.data = z
    with torch.no_grad():
        m.w.mul_(2)
    return x @ m.w + z


def of_another_dtype(m, x):
    m.r.data = m.r.double()
    return m.r * 2


def shape_that_gradients_have(m, x):
    y = m.w * 2
    y.data = x[:2]
    return y.sum()


def doubled(m, x):
    m.k.data = m.k.data * 2
    return x @ m.k * m.w


def doubled_in_a_region(m, x):
    return checkpoint(lambda x: doubled(m, x), x, use_reentrant=False)


def in_a_transformed_function(m, x):
    def loss(w):
        w.data = w.data * 2
        return (w * x).sum()

    return torch.func.grad(loss)(m.w) + x


def set_of_an_input(m, x):
    with torch.no_grad():
        m.k.set_(m.k * 2)
    return x @ m.k


def set_to_what_requires_grad(m, x):
    y = torch.zeros(3)
    y.set_(m.w * 2)
    return y + m.w


def set_of_a_storage(m, x):
    y = torch.empty(0)
    y.set_(x.untyped_storage(), 0, (9,))
    return y + m.w.sum()


def uses_a_view_from_before(m, x):
    view = m.w.t()
    m.w.data = m.w.data * 2
    return (x * m.k * m.w) @ view


def uses_a_view_before(m, x):
    y = (x * m.w) @ m.k.view(3, 3)
    m.k.data = m.k.data * 2
    return y


REFUSED = [
    uses_a_view_from_before, uses_a_view_before,
    uses_it_before, uses_it_beside_what_requires_grad, uses_what_it_made_before, uses_a_factor_before, uses_a_condition_before, writes_into_a_value_with_another_history,
    of_another_dtype, shape_that_gradients_have, in_a_transformed_function, set_of_an_input, set_to_what_requires_grad,
    set_of_a_storage,
]  # fmt: skip


@pytest.mark.parametrize("program", REFUSED)
def test_what_a_trace_cannot_do_is_refused_with_the_line(program):
    module = Module(program)
    before = {n: (t, t.data_ptr(), t.clone()) for n, t in (*module.named_parameters(), *module.named_buffers())}
    with pytest.raises(UnsupportedOpError) as error:
        thunder.jit(module, transforms=[SubclassTransform()])(torch.ones(3, 3))
    assert "test_replaced_memory.py:" in str(error.value)
    for n, (t, address, held) in before.items():
        assert getattr(module, n) is t and t.data_ptr() == address and torch.equal(t, held)


def test_norms_that_are_measured_are_of_what_is_there_by_then():
    torch.manual_seed(seeded(0))
    x, module = torch.randn(2, 3), Module(momentum)
    eager = copy.deepcopy(module)
    y = thunder.jit(module, transforms=[NormTransform()])(RMSTensor.of(x))
    expected = eager(x)
    torch.testing.assert_close(y.backing, expected)
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    assert expected.square().mean(-1).sqrt().max() <= y.norm_size * (1 + 1e-5)


def test_of_norms_what_changes_nothing_is_no_change():
    torch.manual_seed(seeded(0))
    x, module = torch.randn(3, 3), Module(cast_to_what_it_is)
    y = thunder.jit(module, transforms=[NormTransform()])(RMSTensor.of(x))
    torch.testing.assert_close(y.backing, module(x))


def _given_twice(a, b):
    a.data = b * 2
    return a + b


def test_a_tensor_that_is_given_twice_is_refused_and_another_call_is_not():
    jitted = thunder.jit(_given_twice, transforms=[SubclassTransform()])
    a, b = torch.ones(3), torch.full((3,), 2.0)
    for _ in range(2):
        with pytest.raises(UnsupportedOpError, match="given to the program at another place"):
            jitted(a, a)
        torch.testing.assert_close(jitted(a, b), torch.full((3,), 6.0))
        assert torch.equal(a, torch.full((3,), 4.0))


def test_inputs_in_one_memory_part():
    jitted = thunder.jit(_given_twice, transforms=[SubclassTransform()])
    for f in (_given_twice, jitted):
        memory = torch.ones(3)
        a, b = memory[:], memory.view(3)
        torch.testing.assert_close(f(a, b), torch.full((3,), 3.0))
        assert torch.equal(memory, torch.ones(3)) and torch.equal(a, torch.full((3,), 2.0))


def test_gradients_go_on_to_what_an_input_was_computed_from():
    def program(x):
        x.data = x.data * 3
        return x * x

    found = []
    for f in (program, thunder.jit(program, transforms=[SubclassTransform()])):
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        x = w * 5
        f(x).sum().backward()
        found += [w.grad, x.detach()]
    torch.testing.assert_close(found[2:], found[:2])


def test_a_wrapper_that_requires_grad_beside_it_is_refused():
    def program(x, k):
        k.data = k.data * 2
        return x * k

    x = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
    with pytest.raises(UnsupportedOpError, match="gradients of wrappers"):
        thunder.jit(program, transforms=[SubclassTransform()])(x, torch.ones(2))


def test_what_is_inside_of_a_wrapper_that_is_given_is_refused():
    def program(x):
        x.a.data = x.b * 2
        return x + 1

    with pytest.raises(UnsupportedOpError, match="inside of a wrapper"):
        thunder.jit(program, transforms=[SubclassTransform()])(TwoTensor(torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
def test_in_a_region_it_is_set_once(gradients):
    x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75], [-2.0, 1.0, 3.0]])
    found = _run(doubled_in_a_region, SubclassTransform, x, gradients=gradients)
    torch.testing.assert_close(found, _run(doubled, None, x, gradients=gradients))
    found = _run(doubled_in_a_region, CheckpointTransform, x, gradients=gradients)
    torch.testing.assert_close(found, _run(doubled, None, x, gradients=gradients))
