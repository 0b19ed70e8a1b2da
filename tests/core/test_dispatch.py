"""Which rule runs: arguments, kinds and modes, registrations, and the errors."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.core.norm_inputs import aten, rms
from thunder_norm import (
    L1Tensor,
    L2Tensor,
    LinfTensor,
    NormedTensor,
    RMSTensor,
    RMSToRMSTensor,
    norm_mode,
    normed_op,
    with_perturbation,
)
from thunder_norm.core.context import MODES
from thunder_norm.core.registry import _registry, has_rule
from thunder_norm.core.slots import hints_of
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, ThunderNormError

# -- which rule ------------------------------------------------------------------------------------------------------------


def answer(name: str):
    """A rule's result that tells which rule ran."""
    return {"first": LinfTensor(1.0), "second": LinfTensor(2.0), "third": LinfTensor(3.0)}[name]


def ran(op, *args, **kwargs) -> float:
    """Which rule ran."""
    return op(*args, **kwargs).norm_size.item()


def test_the_first_rule_that_fits_runs():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: L1Tensor):
        return answer("first")

    @f.register_norm
    def _(x: RMSTensor):
        return answer("second")

    @f.register_norm
    def _(x: NormedTensor):
        return answer("third")

    t = torch.ones(3)
    assert ran(f, L1Tensor.of(t)) == 1
    assert ran(f, RMSTensor.of(t)) == 2
    assert ran(f, LinfTensor.of(t)) == 2  # a subclass fits
    assert ran(f, L2Tensor.of(t)) == 3  # and no conversion is made while a rule takes it as it is
    assert f(t) is t


def test_conversions_are_made_only_if_no_rule_takes_the_kinds_as_they_are():
    @normed_op
    def f(x, y):
        return x

    @f.register_norm
    def _(x: L1Tensor, y: L1Tensor):
        return answer("first")

    @f.register_norm
    def _(x: L2Tensor, y: L1Tensor):
        return LinfTensor(x.norm_size * y.norm_size)

    t = torch.ones(4)
    assert ran(f, L1Tensor.of(t), L1Tensor.of(t)) == 1
    assert ran(f, L2Tensor.of(t), L1Tensor.of(t)) == 2 * 4  # l2 = 2, l1 = 4
    # neither takes (l2, l2): the first it can be converted to runs, with a sound size: l1 <= sqrt(N) l2
    assert ran(f, L2Tensor.of(t), L2Tensor.of(t)) == 1
    spike = torch.tensor([1.0, 0, 0, 0])
    assert ran(f, L2Tensor.of(spike), L1Tensor.of(spike)) == 1


def test_a_converted_argument_arrives_as_the_annotated_kind():
    seen = []

    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: L1Tensor):
        seen.append(x)
        return LinfTensor(x.norm_size)

    f(L2Tensor(3.0, backing=torch.ones(4)))
    (x,) = seen
    assert type(x) is L1Tensor and x.norm_size.item() == 6  # sqrt(4) * 3


def test_a_kernel_known_by_its_entries_or_by_sums_of_them_is_converted():
    conv = torch.randn(3, 2, 3, 3)
    x = rms(1.0, (1, 2, 5, 5), elem_dims=(1,))
    for kind in (RMSTensor, L1Tensor, L2Tensor):
        y = F.conv2d(x, kind.of(conv))
        assert y.norm_size >= RMSTensor.of(y.backing, y.elem_dims).norm_size


def test_a_rule_with_a_condition_goes_before_the_others():
    @normed_op
    def f(x, k=1):
        return x

    @f.register_norm
    def _(x: RMSTensor, k: Any = 1):
        return answer("first")

    @f.register_norm(when=lambda args: args["k"] == 2)
    def _(x: RMSTensor, k: Any = 1):
        return answer("second")

    x = rms()
    assert ran(f, x) == 1 and ran(f, x, 2) == 2 and ran(f, x, k=2) == 2


def test_a_rule_of_the_current_mode_goes_before_one_for_all_modes():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: RMSTensor):
        return answer("second")

    @f.register_norm(mode="typical")
    def _(x: RMSTensor):
        return answer("third")

    @normed_op
    def only_typical(x):
        return x

    @only_typical.register_norm(mode="typical")
    def _(x: RMSTensor):
        return answer("third")

    x = rms()
    assert ran(f, x) == 2
    with norm_mode("typical"):
        assert ran(f, x) == 3 and ran(only_typical, x) == 3
    with norm_mode("bound"):
        assert ran(f, x) == 2
        with pytest.raises(MissingNormRuleError, match=r"\[mode typical\]"):
            only_typical(x)
    with norm_mode("modula"):
        assert ran(f, x) == 1  # every size is 1 after every operation


def test_modes_nest_and_unknown_ones_are_refused():
    with pytest.raises(NormMismatchError, match="'bound', 'typical', 'modula'"), norm_mode("sound"):
        pass
    x = rms(2.0, (4, 16))
    with norm_mode("typical"):
        with norm_mode("bound"):
            assert F.relu(x).norm_size.item() == 2
        assert F.relu(x).norm_size.item() == pytest.approx(2 / math.sqrt(2))
    assert F.relu(x).norm_size.item() == 2
    assert set(MODES) == {"bound", "typical", "modula"}


# -- slots -----------------------------------------------------------------------------------------------------------------


def test_optional_arguments():
    w = RMSToRMSTensor.of(torch.randn(5, 8))
    b = RMSTensor(0.5, backing=torch.ones(5) / 2)
    x = rms(2.0)
    expected = 2 * w.norm_size
    assert torch.equal(F.linear(x, w).norm_size, expected)
    assert torch.equal(F.linear(x, w, None).norm_size, expected)
    assert torch.equal(F.linear(x, w, bias=None).norm_size, expected)
    assert torch.equal(F.linear(x, w, b).norm_size, expected + 0.5)
    assert torch.equal(F.linear(x, w, bias=b).norm_size, expected + 0.5)


def test_lists_of_tensors_lift_and_convert_their_elements():
    @normed_op
    def f(tensors, scale):
        return sum(tensors) * scale

    @f.register_norm
    def _(tensors: list[RMSTensor], scale: int | float):
        assert all(isinstance(x, RMSTensor) for x in tensors)
        return RMSTensor(sum(x.norm_size for x in tensors) * abs(scale), sensitivity={"tensors": [abs(scale)] * len(tensors)})

    t = torch.ones(4)
    out = f([RMSTensor(1.0, backing=t), t, L2Tensor(6.0, backing=t)], -2)
    assert out.norm_size.item() == 2 * (1 + 1 + 3)  # the plain one is measured; l2 6 over 4 entries is rms 3
    assert out.shape == (4,)
    moving = f([with_perturbation(RMSTensor(1.0, backing=t)), L2Tensor(6.0, backing=t, perturbation_size=2.0)], -2)
    assert moving.perturbation_size.item() == 2 * (0 + 1)
    with pytest.raises(MissingNormRuleError):
        f([RMSTensor(1.0, backing=t)], torch.tensor(2.0))  # a tensor where only a number will do


def test_tuples_work_as_lists():
    x, y = rms(1.0), rms(3.0)
    assert torch.cat((x, y)).norm_size.item() == torch.cat([x, y]).norm_size.item() == 3


def test_a_plain_tensor_in_a_normed_slot_is_measured():
    t = torch.randn(4, 8, dtype=torch.float64)
    out = rms(1.0) + t
    assert out.norm_size.item() == pytest.approx(1 + t.pow(2).mean(-1).sqrt().max().item(), rel=1e-6)


def test_measuring_a_plain_tensor_is_differentiable():
    w = torch.randn(5, 8, requires_grad=True)
    y = F.linear(rms(2.0), w)
    (got,) = torch.autograd.grad(y.norm_size, w)
    (want,) = torch.autograd.grad(2 * torch.linalg.matrix_norm(w, 2) * math.sqrt(8 / 5), w)
    torch.testing.assert_close(got, want)


def test_integer_tensors_are_not_measured():
    with pytest.raises(MissingNormRuleError):
        F.linear(rms(), torch.ones(5, 8, dtype=torch.long))


def test_allow_plain_tensors_takes_a_tensor_as_it_is():
    @normed_op
    def mul_with_scaler(input: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert scale.ndim == 0
        return input * scale

    @mul_with_scaler.register_norm(allow_plain_tensors=True)
    def _(input: NormedTensor, scale: torch.Tensor) -> NormedTensor:
        assert scale.ndim == 0
        return type(input)(input.norm_size * scale.abs(), elem_dims=input.elem_dims, sensitivity={"input": scale.abs()})

    scale = torch.tensor(-3.0, requires_grad=True)
    t = torch.randn(2, 4)
    for kind in (RMSTensor, L1Tensor, L2Tensor):
        x = kind(2.0, backing=t, elem_dims=(0,))
        y = mul_with_scaler(x, scale)
        assert type(y) is kind and y.elem_dims == (-2,) and y.norm_size.item() == 6
        assert torch.autograd.grad(y.norm_size, scale)[0].item() == -2
    assert torch.equal(mul_with_scaler(t, scale), t * scale)
    y = mul_with_scaler(RMSTensor(2.0, backing=t, perturbation_size=0.5), scale)
    assert y.perturbation_size.item() == 1.5


def test_a_rule_may_return_plain_values_and_tuples():
    @normed_op
    def f(x):
        return x.relu(), x > 0, 3

    @f.register_norm
    def _(x: RMSTensor):
        return RMSTensor(x.norm_size), None, None

    x = rms(2.0)
    y, mask, three = f(x)
    assert y.norm_size.item() == 2 and torch.equal(y.backing, x.backing.relu())
    assert type(mask) is torch.Tensor and torch.equal(mask, x.backing > 0) and three == 3

    @normed_op
    def g(x):
        return x.relu(), x > 0

    @g.register_norm
    def _(x: RMSTensor):
        return (RMSTensor(x.norm_size),)

    with pytest.raises(NormMismatchError, match="returned 1 results"):
        g(x)


def test_arguments_a_rule_does_not_name_must_not_matter():
    x = rms(2.0)
    assert F.relu(x, inplace=False).norm_size.item() == 2

    @normed_op
    def f(x, scale=None, memory_format=None):
        return x if scale is None else x * scale

    @f.register_norm
    def _(x: RMSTensor):
        return RMSTensor(x.norm_size)

    assert f(x, scale=None).norm_size.item() == 2
    assert f(x, memory_format=torch.preserve_format).norm_size.item() == 2
    with pytest.raises(MissingNormRuleError):
        f(x, scale=3.0)


# -- registering -----------------------------------------------------------------------------------------------------------


def test_mistakes_in_a_registration_are_refused():
    @normed_op
    def f(x):
        return x

    with pytest.raises(NormMismatchError, match="allow_plain_tensors"):

        @f.register_norm
        def _(x: torch.Tensor):
            return None

    with pytest.raises(NormMismatchError, match="mode must be one of"):
        f.register_norm(lambda x: None, mode="loose")
    with pytest.raises(NormMismatchError, match="lifts for no argument of it: \\['y'\\]"):

        @f.register_norm(lift_dims={"y": lambda t, args: ()})
        def _(x: RMSTensor):
            return None

    assert f.rules == [] and not has_rule(f)


def test_normed_op_gives_one_entry_for_an_operation():
    assert normed_op(F.relu) is normed_op(aten.relu.default)
    assert normed_op(F.relu) is not normed_op(F.gelu)
    assert "rules" in repr(normed_op(F.relu))


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_the_error_for_a_missing_rule_says_everything():
    with pytest.raises(MissingNormRuleError) as e:
        torch.geqrf(rms())
    message = str(e.value)
    assert message.startswith("no norm rule for torch.geqrf\n")
    assert "called with" in message and "(RMSTensor[4, 8] over dims (-1,))" in message
    assert "registered" in message and "(none)" in message
    assert '@thunder_norm.normed_op(torch.geqrf).register_norm   -- see CONTRIBUTING.md, "Adding a rule"' in message
    assert isinstance(e.value, ThunderNormError) and isinstance(e.value, NotImplementedError)


def test_the_error_for_kinds_that_do_not_fit_lists_the_rules_there_are():
    @normed_op
    def f(x, y):
        return x

    @f.register_norm
    def for_operators(x: RMSToRMSTensor, y: L1Tensor | None = None) -> RMSTensor:
        return RMSTensor(1.0)

    x = rms(1.0, (4, 8, 2), elem_dims=(0, 1, 2))
    with pytest.raises(MissingNormRuleError) as e:
        f(x, None)
    assert "RMSTensor[4, 8, 2] over dims (-3, -2, -1), None" in str(e.value)
    assert "for_operators(x: 'RMSToRMSTensor', y: 'L1Tensor | None' = None)" in str(e.value)


def test_the_error_of_a_rule_names_the_operation_and_its_arguments():
    @normed_op
    def f(x):
        return x

    @f.register_norm
    def _(x: RMSTensor):
        raise NormMismatchError("the last dimension must be normed")

    with pytest.raises(NormMismatchError) as e:
        f(rms())
    assert "f: the last dimension must be normed" in str(e.value)
    assert "(RMSTensor[4, 8] over dims (-1,))" in str(e.value)


def test_elem_dims_that_do_not_fit_are_an_error_that_says_so():
    w = RMSToRMSTensor(1.0, backing=torch.randn(5, 8), elem_dims=(1, 0))
    y = F.linear(rms(), w)  # an operator the other way round: converted, soundly
    assert y.norm_size.item() == pytest.approx(8 / 5)
    w = RMSToRMSTensor(1.0, backing=torch.randn(3, 5, 8), elem_dims=(0, 1))
    with pytest.raises((NormMismatchError, MissingNormRuleError), match="RMSToRMSTensor"):
        torch.matmul(rms(), w.mT)


def test_a_failed_operation_leaves_its_arguments_as_they_were():
    x = 2 * rms()
    with pytest.raises(MissingNormRuleError):
        torch.detach_copy(x)
    x += 1
    assert x.norm_size.item() == 3


def test_annotations_of_rules_are_read_as_typing_reads_them():
    rules = [r.fn for op in set(_registry.values()) for r in op.rules]
    assert len(rules) > 900

    def of_a_user(a: "list['RMSTensor']", b: typing.Annotated[int, "number"], c: None, d: "RMSTensor | None" = None) -> None:  # noqa: UP037
        pass

    for rule in (*rules, of_a_user):
        assert hints_of(rule) == typing.get_type_hints(rule)
