"""What a program asserts of values holds in every call of its trace, or raises what eager PyTorch raises."""

from __future__ import annotations

import pytest
import torch

from tests.seeds import seeded
from tests.tracing.guarding import asserting_programs as programs
from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.errors import DataDependentError
from thunder_norm.transforms import NormTransform, SubclassTransform, grad, jvp, vmap
import thunder

PROGRAMS = [
    programs.asserted, programs.asserted_with_message, programs.asserted_not, programs.asserted_both, programs.asserted_by_an_integer, programs.asserted_of_a_number, programs.raised, programs.raised_without_message, programs.raised_between,
    programs.by_torch, programs.by_torch_later, programs.finally_undone,
]  # fmt: skip


def said(f, *args):
    """The class and the message of what a call raises."""
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as e:
        f(*args)
    return type(e.value), str(e.value)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("transform", [SubclassTransform, NormTransform])
def test_a_call_that_does_not_hold_raises_what_eager_mode_raises(f, transform):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(0))).requires_grad_()
    jitted = thunder.jit(f, transforms=[transform()])
    for _ in range(2):
        y = jitted(x)
        assert torch.equal(y, f(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(f(x).sum(), x))
        assert said(jitted, x - 100) == said(f, x - 100)
        if f in OF_NAN:
            assert said(jitted, torch.full_like(x, torch.nan)) == said(f, torch.full_like(x, torch.nan))


OF_NAN = (programs.asserted, programs.asserted_of_a_number, programs.asserted_with_message, programs.asserted_both)


@pytest.mark.parametrize("f", [programs.asserted_with_message, programs.raised], ids=lambda f: f.__name__)
def test_norms_go_by_what_is_asserted(f):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seeded(0)))
    jitted = thunder.jit(f, transforms=[NormTransform()])
    y = jitted(RMSTensor.of(x))
    assert torch.equal(y.backing, f(x)) and y.norm_size == f(RMSTensor.of(x)).norm_size
    assert said(jitted, RMSTensor.of(x - 100)) == said(f, x - 100)

    class Module(torch.nn.Module):
        def forward(self, x):
            return f(x)

    assert build_norm_map(Module(), torch.empty(3, 4, device="meta"))(RMSTensor(3.0)).norm_size == 6


def test_a_message_that_is_computed_gives_way_to_the_line():
    jitted = thunder.jit(programs.asserted_with_computed_message, transforms=[SubclassTransform()])
    assert torch.equal(jitted(torch.ones(3)), 2 * torch.ones(3))
    with pytest.raises(AssertionError, match=r"not so: .*asserting_programs.py:\d+:  assert \(x > 0\).all\(\)"):
        jitted(-torch.ones(3))


@pytest.mark.parametrize("f", [programs.caught, programs.caught_outside, programs.one_of_two], ids=lambda f: f.__name__)
def test_where_the_program_may_go_on_it_is_followed_either_way(f):
    jitted = thunder.jit(f, transforms=[SubclassTransform()])
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3), torch.tensor([1.0, -1.0, 1.0])):
        try:
            expected = f(x)
        except AssertionError:
            with pytest.raises(AssertionError):
                jitted(x)
        else:
            assert torch.equal(jitted(x), expected)


_UNDER = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([torch.ones_like(x), x])),
    "vmap of grad": lambda f: lambda x: vmap(grad(lambda x: f(x).sum()))(torch.stack([torch.ones_like(x), x])),
}


@pytest.mark.parametrize("transformed", _UNDER.values(), ids=_UNDER)
@pytest.mark.parametrize(
    "f", [programs.asserted_with_message, programs.raised, programs.by_torch_later], ids=lambda f: f.__name__
)
def test_functions_under_transforms_raise_it_too(f, transformed):
    g = transformed(f)
    g(torch.ones(3))
    assert said(g, torch.full((3,), -100.0)) == said(f, torch.full((3,), -100.0))


def test_several_values_are_no_condition():
    with pytest.raises((DataDependentError, RuntimeError)):
        thunder.jit(programs.several, transforms=[SubclassTransform()])(torch.ones(3))


def test_a_trace_shows_what_it_looks_at():
    jitted = thunder.jit(programs.asserted_with_message, transforms=[NormTransform()])
    jitted(torch.ones(3))
    assert "thunder_norm" in (text := str(thunder.last_traces(jitted)[-1])) and "too small" in text
