"""MaskedTensor: its operations ask whether two masks are equal, which a trace takes for granted and checks where it is not known."""

from __future__ import annotations

import pytest
import torch
from torch.masked import MaskedTensor, as_masked_tensor, masked_tensor

from tests.seeds import seeded
from tests.subclasses import assert_same
from thunder_norm.errors import DataDependentError, UnsupportedOpError, UnsupportedSubclassError
from thunder_norm.transforms import SubclassTransform, grad
import thunder

pytestmark = pytest.mark.filterwarnings("ignore")  # the class warns whenever one is made


def masked(seed: int = 0, requires_grad: bool = False, mask: torch.Tensor | None = None) -> MaskedTensor:
    torch.manual_seed(seeded(seed))
    data, own = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    return masked_tensor(data, own if mask is None else mask.clone(), requires_grad=requires_grad)


def other_mask(x: MaskedTensor) -> torch.Tensor:
    return ~x._masked_mask


def jit(function):
    return thunder.jit(function, transforms=[SubclassTransform()])


def checks(jf) -> int:
    return sum("check_same_values" in b.sym.name for b in thunder.last_traces(jf)[-1].bound_symbols)


def test_masks_belong_to_the_data_that_they_came_with():
    jf = jit(lambda x: x.sum(-1))
    x, y = masked(), masked()
    y._masked_mask.logical_not_()
    for z in (x, y):
        assert_same(jf(z), z.sum(-1))
    assert (thunder.cache_misses(jf), thunder.cache_hits(jf)) == (1, 1)
    assert type(jf(torch.ones(3, 4))) is torch.Tensor  # a plain tensor in its place has a trace of its own


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * x,
        lambda x: x * x.sin() + x.exp(),
        lambda x: x.view(4, 3).t() * x.view(4, 3).t(),
        lambda x: x.sum(-1) * x.cos().sum(-1),
        lambda x: masked_tensor(x.get_data(), x.get_mask()) + x,
        lambda x: x.softmax(-1) * x,
    ],
)
def test_what_has_one_mask_needs_no_check(f):
    jf = jit(f)
    for seed in (0, 1):
        assert_same(jf(masked(seed)), f(masked(seed)))
    assert checks(jf) == 0 and thunder.cache_hits(jf) == 1


def test_masks_of_two_inputs_are_compared_in_each_call():
    jf = jit(lambda x, y: x + y)
    for seed in (0, 1):
        x = masked(seed)
        y = masked(seed + 2, mask=x._masked_mask)
        assert_same(jf(x, y), x + y)
    assert checks(jf) == 1 and thunder.cache_hits(jf) == 1
    x = masked()
    y = masked(1, mask=other_mask(x))
    with pytest.raises(ValueError, match="masks must match"):
        torch.add(x, y)
    with pytest.raises(DataDependentError, match=r"two tensors differ[\s\S]*test_masked_tensors"):
        jf(x, y)


def test_a_check_whose_result_nobody_uses_is_made_all_the_same():
    def f(x, y):
        torch.add(x, y)
        return x * 2

    x = masked()
    jf = jit(f)
    assert_same(jf(x, masked(1, mask=x._masked_mask)), x * 2)
    with pytest.raises(DataDependentError):
        jf(x, masked(1, mask=other_mask(x)))


def test_a_check_in_a_differentiated_program_is_made_before_its_result_is_handed_out():
    x = masked(requires_grad=True)
    jf = jit(lambda x, y: (x * y).sum())
    jf(x, masked(1, mask=x._masked_mask)).backward()
    y = masked(requires_grad=True)
    (y * masked(1, mask=y._masked_mask)).sum().backward()
    assert_same(x.grad, y.grad)
    with pytest.raises(DataDependentError):
        jf(x, masked(1, mask=other_mask(x)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sin() * x,
        lambda x: (x * x).sum(-1),
        lambda x: x.mean(-1),
        lambda x: x.softmax(-1) * x.exp(),
        lambda x: x.amax(-1),
        lambda x: x.view(4, 3).t() * 2,
        lambda x: torch.where(torch.eye(3, 4) > 0, x, torch.ones(3, 4)),
        lambda x: x.sin().to_tensor(0.0),
        lambda x: x.get_data() * 3,
    ],
)
def test_gradients_are_eager_s(f):
    found = []
    for function in (f, jit(f)):
        x = masked(requires_grad=True)
        y = function(x)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), x.grad))
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "name",
    ["sum", "mean", "prod", "amax", "argmin", "norm", "var", "std", "median", "logsumexp", "softmax", "log_softmax", "cumsum"],
)
def test_functions_of_torch_masked_take_masked_tensors(name: str):
    order = (2.0,) if name == "norm" else ()

    def f(x):
        return getattr(torch.masked, name)(x * 2, *order, dim=1)

    jf = jit(f)
    for x in (masked(), masked(1)):
        assert_same(jf(x), f(x))
    if name in (
        "argmin",
        "median",
        "softmax",
        "log_softmax",
        "cumsum",
    ):  # no gradient, or none that eager mode has of such results
        return
    gradients = []
    for function in (f, jit(f)):
        x = masked(requires_grad=True)
        y = function(x)
        (y * torch.arange(3.0) if y.dim() == 1 else y * x.detach()).sum().backward()
        gradients.append(x.grad)
    assert_same(*gradients)


def test_a_gradient_that_comes_in_with_another_mask_is_refused():
    x = masked(requires_grad=True)
    y = jit(torch.sin)(x)
    with pytest.raises((DataDependentError, RuntimeError), match="two tensors differ"):
        y.backward(masked_tensor(torch.ones(3, 4), other_mask(x)))


def test_a_masked_tensor_is_made_inside_with_a_gradient():
    data, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    found = []
    for function in (lambda f: f, jit):
        leaf = data.clone().requires_grad_()
        function(lambda a, m: as_masked_tensor(a, m).sin().sum())(leaf, mask).backward()
        found.append(leaf.grad)
    assert_same(found[1], found[0])


def test_a_mask_that_was_changed_meanwhile_is_compared():
    def f(x, y):
        copy = masked_tensor(y.get_data(), x.get_mask())
        x._masked_mask.logical_not_()
        return copy + x

    with pytest.raises((DataDependentError, UnsupportedOpError)):
        jit(f)(masked(), masked(1))
    with pytest.raises(ValueError, match="masks must match"):
        f(masked(), masked(1))


def test_plain_masks_that_the_program_changes_are_compared():
    def f(data, mask):
        x = masked_tensor(data, mask)
        mask.logical_not_()
        return masked_tensor(data, mask) + x

    args = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    with pytest.raises(ValueError, match="masks must match"):
        f(*(a.clone() for a in args))
    with pytest.raises((DataDependentError, UnsupportedOpError)):
        jit(f)(*args)


def test_where_functions_are_transformed_a_comparison_is_refused():
    def loss(a, x):
        return (as_masked_tensor(a, a > 0) + x).get_data().sum()

    with pytest.raises(UnsupportedOpError):
        jit(lambda a, x: grad(loss)(a, x))(torch.randn(3, 4), masked())


def test_other_comparisons_decide_as_in_eager_mode():
    f = lambda x: x * 2 if x.get_data().sum() > 0 else x  # noqa: E731
    jf = jit(f)
    for seed in range(4):
        assert_same(jf(masked(seed)), f(masked(seed)))


def test_sparse_masked_tensors_are_refused():
    mask = torch.eye(3).bool()
    x = masked_tensor(torch.eye(3).to_sparse(), mask.to_sparse())
    with pytest.raises(UnsupportedSubclassError, match="layout"):
        jit(lambda x: x * 2)(x)
