"""Programs under `NormTransform`: containers, in-place operations, custom operations, and the errors they meet."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.norms.norm_models import Net, assert_same_normed, jit
from tests.seeds import seeded
from thunder_norm import (
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    normed_op,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import (
    MissingNormRuleError,
    NormMapKeyError,
    NormMismatchError,
    ThunderNormError,
    UnsupportedOpError,
)
from thunder_norm.transforms import NormTransform

# -- what a program returns is a tensor like any other --------------------------------------------------------------------------


_RETURNED = {
    "relu": torch.relu,
    "a row": lambda x: x[0] * 2,
    "exp": lambda x: x.exp(),
    "softmax": lambda x: torch.softmax(x, -1),
    "a product": lambda x: (x @ x.t())[0] * 2,
    "sizes": lambda x: F.layer_norm(x, (4,)).square(),
}
_AFTERWARDS = (lambda y: y * 2, torch.relu, lambda y: y.sum(), lambda y: y.exp().log(), lambda y: torch.cat([y, y]), lambda y: -y)


@pytest.mark.parametrize("name", _RETURNED)
def test_results_are_computed_with_as_those_of_eager_mode(name):
    """What rules have left in them is of that call alone: their norms are no smaller than where rules go on knowing it."""
    torch.manual_seed(seeded(0))
    x = RMSTensor.of(torch.randn(4, 4))
    found, wanted = jit(_RETURNED[name])(x), _RETURNED[name](x)
    assert vars(found).keys() == vars(x).keys()
    for after in _AFTERWARDS:
        a, b = after(found), after(wanted)
        torch.testing.assert_close(a.backing, b.backing)
        assert a.norm_size >= b.norm_size * (1 - 1e-5)


# -- eager and traced agree ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Net:
    """Shared by tests that only read it."""
    torch.manual_seed(seeded(1))
    return Net()


# -- programs --------------------------------------------------------------------------------------------------------------


@dataclass
class Outputs:
    """What a model returns."""

    logits: torch.Tensor
    hidden: Any


def test_normed_tensors_in_and_out_of_containers():
    def f(x, *, pair, by_name):
        a, b = pair
        return Outputs(a + b, {"sum": [x + by_name["z"], None], "same": x, "number": 3, "plain": by_name["t"] * 2})

    x, t = RMSTensor.of(torch.ones(3)), torch.ones(3)
    arguments = {"pair": (x, L2Tensor.of(t)), "by_name": {"z": LinfTensor.of(t), "t": t}}
    got, want = jit(f)(x, **arguments), f(x, **arguments)
    assert type(got) is Outputs
    assert_same_normed(got.logits, want.logits)
    assert_same_normed(got.hidden, want.hidden)


def test_dataclasses_as_arguments():
    def f(inputs):
        return inputs.logits + inputs.hidden

    x = RMSTensor.of(torch.ones(3))
    assert jit(f)(Outputs(x, 2.0)).norm_size.item() == 3


def test_a_program_may_look_at_what_it_is_given():
    def f(x):
        if isinstance(x, NormedTensor):
            assert type(x) is RMSTensor and x.elem_dims == (-1,) and x.shape == (3,)
            return x * 2
        return x * 3

    jf, t = jit(f), torch.ones(3)
    assert jf(RMSTensor.of(t)).norm_size.item() == 2
    assert torch.equal(jf(t), 3 * t)


def test_a_program_may_compute_with_norms():
    def f(x):
        return x * 2, x.norm_size * 3, x.backing + 1

    x = RMSTensor(2.0, backing=torch.ones(3), norm_size_requires_grad=True)
    y, size, backing = jit(f)(x)
    assert y.norm_size.item() == 4 and size.item() == 6 and torch.equal(backing, torch.full((3,), 2.0))
    assert torch.autograd.grad(size, x.norm_size)[0].item() == 3


def test_custom_operations_with_a_rule():
    @normed_op
    def mul_with_scaler(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return input * scale

    @mul_with_scaler.register_norm(allow_plain_tensors=True)
    def _(input: NormedTensor, scale: torch.Tensor) -> NormedTensor:
        return type(input)(input.norm_size * scale.abs(), elem_dims=input.elem_dims, sensitivity={"input": scale.abs()})

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(-3.0))

        def forward(self, x):
            return mul_with_scaler(F.relu(x), self.scale)

    model = Scaled()
    jm = jit(model)
    x = with_perturbation(RMSTensor(2.0, backing=torch.ones(4)))
    y = jm(x)
    assert_same_normed(y, model(x))
    assert y.norm_size.item() == 6
    assert torch.autograd.grad(y.norm_size, model.scale, retain_graph=True)[0].item() == -2
    assert sensitivities(y, [x])[0].item() == 3
    assert torch.equal(jm(torch.ones(4)), torch.full((4,), -3.0))


def test_in_place_on_an_intermediate():
    def f(x):
        y = x + 1
        y += x
        y.mul_(2)
        return F.relu(y, inplace=True)

    x = RMSTensor.of(torch.randn(3, 4))
    assert_same_normed(jit(f)(x), f(x))


@pytest.mark.parametrize("name", ["input", "alias", "alias of the input"])
def test_in_place_where_another_owner_would_not_notice_is_refused(name):
    def on_input(x):
        x += 1
        return x

    def on_alias(x):
        y = 2 * x
        z = y.unfold(0, 2, 1)
        y += 1
        return z

    def on_alias_of_input(x):
        x.view(-1).mul_(2)
        return x

    program = {"input": on_input, "alias": on_alias, "alias of the input": on_alias_of_input}[name]
    x = RMSTensor.of(torch.ones(3, 4))
    with pytest.raises(UnsupportedOpError, match="in-place"):
        jit(program)(x)
    with pytest.raises(UnsupportedOpError, match="in-place"):
        program(x)


# -- errors ----------------------------------------------------------------------------------------------------------------


def sometimes(x, is_bad):
    """A program with a branch that has no rule."""
    if is_bad:
        x = torch.detach_copy(x)
    return x * 2


def test_a_missing_rule_is_reported_at_the_users_line_and_leaves_the_function_usable():
    jf, x, t = jit(sometimes), RMSTensor.of(torch.randn(3, 4)), torch.randn(3, 4)
    for _ in range(2):
        with pytest.raises(MissingNormRuleError) as e:
            jf(x, True)
        message = str(e.value)
        assert message.startswith("no norm rule for torch.detach_copy\n")
        lines, first = inspect.getsourcelines(sometimes)
        line = next(i for i, text in enumerate(lines) if "detach_copy" in text)
        assert f"{__file__}:{first + line}:  {lines[line].strip()}" in message
        assert "RMSTensor[3, 4] over dims (-1,)" in message and "to add one" in message
        assert_same_normed(jf(x, False), x * 2)
        assert torch.equal(jf(t, True), torch.detach_copy(t) * 2)
        assert torch.equal(jf(t, False), t * 2)


def test_a_rule_that_refuses_is_reported_at_the_users_line():
    def f(x):
        return torch.log(x)

    x = RMSTensor.of(torch.ones(3))
    with pytest.raises(ThunderNormError, match=rf"(?s)at +{__file__}:\d+:  return torch.log\(x\)"):
        jit(f)(x)
    with pytest.raises(ThunderNormError):
        f(x)


def test_names_the_module_does_not_have_are_refused_when_it_is_jitted():
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    with pytest.raises(NormMapKeyError) as e:
        jit(model, parameters={"0.wieght": 1.0, "0.bias": 1.0})
    assert "'0.wieght'" in str(e.value) and "did you mean" in str(e.value) and "'0.weight'" in str(e.value)
    assert isinstance(e.value, KeyError)


def test_sizes_that_are_no_sizes_are_refused(model):
    x = RMSTensor.of(torch.randn(2, 6))
    sizes: dict[str, Any] = {}
    jm = jit(model, parameters=sizes)
    bad = [-1.0, math.nan, torch.tensor(-1.0), torch.ones(2), torch.tensor(1), "1", None]
    for when in ("before a trace", "after it"):
        for size in bad:
            sizes["w1"] = size
            with pytest.raises(NormMismatchError, match="norm_size must be"):
                jm(x)
        sizes["w1"] = 1.0
        assert jm(x).norm_size > 0, when


def test_a_given_kind_that_does_not_fit_is_refused(model):
    x = RMSTensor.of(torch.randn(2, 6))
    with pytest.raises(ThunderNormError, match="parameter 'w1'.*5 is out of range"):
        jit(model, parameters={"w1": RMSToRMSTensor(1.0, elem_dims=(0, 5))})(x)


@pytest.mark.parametrize("options", [{"parameters": "ones"}, {"parameters": 1.0}, {"mode": "sound"}, {"parameters": None}])
def test_unknown_policies_and_modes_are_refused(options):
    with pytest.raises(NormMismatchError, match="must be"):
        NormTransform(**options)


def test_an_unfinalized_input_is_refused(model):
    jm = jit(model)
    with pytest.raises(NormMismatchError, match="unfinalized"):
        jm(RMSTensor(1.0))
    assert jm(RMSTensor(1.0, backing=torch.ones(2, 6))).shape == (2, 3)
