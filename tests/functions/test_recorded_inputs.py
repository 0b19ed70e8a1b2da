"""Plain inputs that a program writes into while autograd records it have their history after the call, as in eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten

from tests.seeds import seeded
from thunder_norm.errors import UnsupportedOpError
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

pytestmark = pytest.mark.filterwarnings("error::thunder_norm.errors.RunByPythonWarning")  # which is eager mode itself

PROGRAMS: dict[str, Callable] = {}


def _program(f: Callable) -> Callable:
    PROGRAMS[f.__name__.strip("_")] = f
    return f


@_program
def _whole(x, w):
    x += w
    return (x * w).sum()


@_program
def _returned_with_views(x, w):
    x.add_(w)
    return x, x.view(-1), x[0], x.t(), x.detach()


@_program
def _row(x, w):
    x[0] = (w * 2)[0]
    return x.sin()


@_program
def _view_in_place(x, w):
    x[0].mul_(w[0])
    return (x * w).sum()


@_program
def _in_a_loop(x, w):
    for i in range(3):
        x[i] = (x[i - 1] + w[i]).sin()
    return x.sum()


@_program
def _multiplied(x, w):
    x.mul_(w)
    return x + w


@_program
def _view_of_before(x, w):
    v = x.view(-1)
    x.add_(w)
    return v * 2, x


@_program
def _then_without_autograd(x, w):
    x.add_(w)
    with torch.no_grad():
        x.mul_(2)
    return x * w


@_program
def _first_without_autograd(x, w):
    with torch.no_grad():
        x.mul_(2)
    x.add_(w)
    return x * w


@_program
def _by_numbers(x, w):
    x.mul_(2)
    return (x * w).sum()


@_program
def _detached(x, w):
    x.add_(w)
    d = x.detach()
    d.mul_(2)
    return x * w, d


@_program
def _truncated(x, w):
    x.mul_(w)
    x = x * 1
    x.detach_()
    return x * w


@_program
def _data(x, w):
    x.add_(w)
    x.data.mul_(2)
    return x * w


@_program
def _diagonal(x, w):
    x.diagonal().add_(w[0])
    return x.sum()


@_program
def _copied_from_what_was_written(x, w):
    y = torch.zeros(3, 3)
    y.copy_(w)
    x.copy_(y * 2)
    return x * w


@_program
def _filled(x, w):
    x.fill_(w.sum())
    return x * 2


@_program
def _overwritten(x, w):
    x.add_(w)
    x[1:].zero_()
    return x * w


@_program
def _batch_norm(x, w):
    mean, var = torch.zeros(3), torch.ones(3)
    x.add_(torch.nn.functional.batch_norm(w, mean, var, training=True))
    return x, mean


@_program
def _indices(x, w):
    x.index_add_(0, torch.tensor([0, 2]), w[:2])
    return x.exp()


@_program
def _mask(x, w):
    x[w > 0] = w[w > 0].sum()
    return x * w


@_program
def _asked(x, w):
    was_leaf = x.is_leaf
    x.add_(w)
    return x * (2 if x.requires_grad else 3) * (5 if x.is_leaf else 7), was_leaf


@_program
def _nothing_returned(x, w):
    x.add_(w)


@_program
def _copied_twice_and_nothing_returned(x, w):
    x.copy_(w)
    x.copy_(w.exp())


@_program
def _overwritten_inside(x, w):
    y = w * 2
    y.copy_(x)
    x.add_(w)
    return y


def _check_same(found: Any, expected: Any) -> None:
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(expected)
    assert spec == other_spec
    assert [v for v in leaves if not isinstance(v, torch.Tensor)] == [v for v in others if not isinstance(v, torch.Tensor)]
    for tensors in zip(leaves, others, strict=True):
        if isinstance(tensors[1], torch.Tensor):
            torch.testing.assert_close(*tensors)


def _given(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What gets gradients, or is looked at, and the tensor that a program is given."""
    values = torch.linspace(0.2, 1.1, 9).view(3, 3)
    if kind == "plain":
        return values, values
    if kind == "a view":
        base = torch.zeros(4, 3)
        base[:3] = values
        return base, base[:3]
    values.requires_grad_()
    return values, values * 1 if kind == "no leaf" else torch.cat([values, values[:1]])[:3]


def _outcome(f: Callable, kind: str, times: int) -> Any:
    """What comes of calls one after the other: results, the input, its base, gradients."""
    leaf, x = _given(kind)
    w = torch.linspace(-0.4, 0.9, 9).view(3, 3).requires_grad_()
    found: list[Any] = []
    for _ in range(times):
        result = f(x, w)
        results = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
        memory = x.untyped_storage().data_ptr()
        found += [
            (r.detach().clone(), r.requires_grad, r is x, r.untyped_storage().data_ptr() == memory, r._is_view()) for r in results
        ]
        found.append((x.detach().clone(), x.requires_grad, x.is_leaf, leaf.detach().clone()))
    weighted = [(r * torch.arange(1.0, r.numel() + 1).view(r.shape)).sum() for r in (*results, x) if r.requires_grad]
    leaves = [w, leaf] if leaf.requires_grad and leaf.is_leaf else [w]
    return found, torch.autograd.grad(sum(weighted), leaves, allow_unused=True)


@pytest.mark.parametrize("kind", ["plain", "a view", "no leaf", "a view with a history"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_input_has_the_history_of_what_is_written_into_it(name: str, kind: str) -> None:
    expected = _outcome(PROGRAMS[name], kind, times=2)
    for transform in (SubclassTransform, NormTransform, CheckpointTransform):
        _check_same(_outcome(thunder.jit(PROGRAMS[name], transforms=[transform()]), kind, times=2), expected)


class Recurrent(torch.nn.Module):
    """Its state is detached in place before each step, or not at all."""

    def __init__(self, is_truncated: bool):
        super().__init__()
        self.linear, self.is_truncated = torch.nn.Linear(3, 3), is_truncated
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x):
        if self.is_truncated:
            self.state.detach_()
        self.state.copy_(torch.tanh(self.linear(x) + self.state))
        return self.state.sum()


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_state_of_a_module_has_its_history(is_truncated: bool) -> None:
    torch.manual_seed(seeded(0))
    models = [Recurrent(is_truncated) for _ in range(4)]
    x, found = torch.randn(3), []
    for model, transform in zip(models, (None, SubclassTransform, NormTransform, CheckpointTransform), strict=True):
        model.load_state_dict(models[0].state_dict() | {"state": torch.zeros(3)})
        run = model if transform is None else thunder.jit(model, transforms=[transform()])
        losses = [run(x)]
        if is_truncated:
            losses[0].backward()
        losses += [run(x), run(x)]
        sum(losses[is_truncated:]).backward()
        found.append((*[v.detach() for v in losses], model.state.detach(), *[p.grad for p in model.parameters()]))
        assert model.state.requires_grad
    for others in found[1:]:
        torch.testing.assert_close(others, found[0])


def test_an_input_is_detached_in_place() -> None:
    def f(x, w):
        y = x + w
        x.detach_()
        return y, x * w

    found = []
    for run in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        leaf, w = torch.linspace(1, 2, 3).requires_grad_(), torch.linspace(0.5, 1, 3).requires_grad_()
        results = run(x := leaf * 2, w)
        assert not x.requires_grad and x.is_leaf
        found.append(torch.autograd.grad(sum(r.sum() for r in results), (leaf, w)))
    torch.testing.assert_close(*found)


def test_a_leaf_that_requires_grad_is_not_written_into() -> None:
    """Torch refuses it too; the trace of a tensor that is none does not serve one."""
    jf = thunder.jit(PROGRAMS["whole"], transforms=[SubclassTransform()])
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    jf(x * 1, w)
    for given in (x, x[:]):
        with pytest.raises(UnsupportedOpError, match=r"leaf that requires grad(.|\n)*test_recorded_inputs.py"):
            jf(given, w)
    assert torch.equal(x, torch.ones(3, 3))


BESIDE_WRAPPERS: dict[str, Callable] = {
    "of what is inside": lambda x, w, p: x.add_(w.a),
    "of what is computed": lambda x, w, p: x.add_((w * 2).b),
    "apart": lambda x, w, p: (x.add_(p), w * 2)[1],
    "before": lambda x, w, p: (x.add_(p), w * x),
    "a row": lambda x, w, p: (x[0].mul_(p[0]), w * x, x),
    "assigned": lambda x, w, p: (x.__setitem__(0, (w * p).a[0]), x.sin())[1],
    "a view is returned": lambda x, w, p: (x.add_(p), w.add(x), x.view(-1)),
    "twice": lambda x, w, p: (x.add_(p), x.mul_(w.b), x.sum()),
    "as it was": lambda x, w, p: (x.mul_(w.b), x.mul_(p), w * p),
    "as it was, by an operation": lambda x, w, p: (x.mul_(p), w * p),
}


def _beside(f: Callable, has_history: bool, requires_grad: str) -> Any:
    leaf, x = _given("no leaf" if has_history else "plain")
    a, b = torch.linspace(0.1, 1, 9).view(3, 3), torch.linspace(2, 1, 9).view(3, 3)
    p = torch.linspace(-0.4, 0.9, 9).view(3, 3).requires_grad_()
    if requires_grad == "all":
        a.requires_grad_()
        b.requires_grad_()
    w = TwoTensor(a, b)
    w = w if requires_grad == "none" else w.requires_grad_()
    result = f(x, w, p)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, torch.Tensor)]
    found: list[Any] = [(type(r).__name__, r.requires_grad, r is x) for r in results]
    found += [(r.a.detach(), r.b.detach()) if isinstance(r, TwoTensor) else r.detach() for r in results]
    found.append((x.requires_grad, x.detach().clone()))
    leaves = [t for t in (p, leaf, a, b, w) if t.requires_grad and t.is_leaf]
    for cls in (TwoTensor, torch.Tensor):
        moved = [(r * r).sum() for r in (*results, x) if type(r) is cls and r.requires_grad]
        ones = TwoTensor(torch.ones(()), torch.ones(())) if cls is TwoTensor else torch.ones(())
        if moved:
            gradients = torch.autograd.grad(sum(moved[1:], moved[0]), leaves, ones, allow_unused=True, retain_graph=True)
            found += [None if g is None or not g.any() else (g.a, g.b) if isinstance(g, TwoTensor) else (g, g) for g in gradients]
    return found


@pytest.mark.parametrize("requires_grad", ["none", "all", "outer"])
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("name", BESIDE_WRAPPERS)
def test_an_input_has_its_history_beside_wrappers(name: str, has_history: bool, requires_grad: str) -> None:
    f = BESIDE_WRAPPERS[name]
    found = _beside(thunder.jit(f, transforms=[SubclassTransform()]), has_history, requires_grad)
    _check_same(found, _beside(f, has_history, requires_grad))


def test_an_input_and_a_wrapper_are_written() -> None:
    def f(x, w, p):
        return x.add_(p), w.mul_(p), w + x

    found = _beside(thunder.jit(f, transforms=[SubclassTransform()]), True, "none")
    _check_same(found, _beside(f, True, "none"))


INSIDE: dict[str, Callable] = {
    "added": lambda w, p: (w.a.add_(p), w * 2)[1],
    "multiplied": lambda w, p: (w.a.mul_(p), (w.a * 2).sum())[1],
    "beside a gradient": lambda w, p: (w.a.mul_(p), w * p)[1],
    "a row": lambda w, p: (w.b[0].mul_(p[0]), w.b.sin())[1],
    "by the wrapper": lambda w, p: (w.mul_(p), w.a * 2)[1],
    "returned": lambda w, p: (w.a.add_(p), w.a.view(-1), w)[1:],
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_inside_of_an_input_wrapper_has_its_history(name: str) -> None:
    found: list[Any] = []
    for run in (INSIDE[name], thunder.jit(INSIDE[name], transforms=[SubclassTransform()])):
        a, b = torch.linspace(0.1, 1, 9).view(3, 3), torch.linspace(2, 1, 9).view(3, 3)
        w, p = TwoTensor(a, b), torch.linspace(-0.4, 0.9, 9).view(3, 3).requires_grad_()
        result = run(w, p)
        results = result if isinstance(result, tuple) else (result,)
        flags = [t.requires_grad for t in (*results, a, b, w, w.a, w.b)]
        moved = [(t * t).sum() for t in (*results, a, b) if type(t) is torch.Tensor and t.requires_grad]
        gradient = torch.autograd.grad(sum(moved), p) if moved else None
        found.append((flags, w.a is a, w.b is b, a.detach().clone(), b.detach().clone(), gradient))
    _check_same(*found)


@torch.library.custom_op("thunder_norm_tests::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: (x.mul_(w), add_one(x), x * w)[2],
        lambda x, w: (add_one(x), x.mul_(w), x * w)[2],
        lambda x, w: (add_one(x), x * w)[1],
    ],
)
def test_an_operator_that_writes_into_an_input_leaves_it_its_history(f: Callable, has_history: bool) -> None:
    found: list[Any] = []
    for run in (f, thunder.jit(f, transforms=[SubclassTransform()])):
        leaf, x = _given("no leaf" if has_history else "plain")
        w = torch.linspace(0.5, 2, 9).view(3, 3).requires_grad_()
        result = run(x, w)
        leaves = [t for t in (leaf, w) if t.requires_grad and t.is_leaf]
        loss = result.sum() + (x.sum() if x.requires_grad else 0)
        found.append((x.requires_grad, x.detach().clone(), torch.autograd.grad(loss, leaves)))
    _check_same(*found)


def test_a_gradient_of_a_class_does_not_arrive_at_a_plain_result() -> None:
    """The backward was written for one that is plain, and would put wrappers into wrappers."""
    jf = thunder.jit(BESIDE_WRAPPERS["before"], transforms=[SubclassTransform()])
    w, p = TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(2, requires_grad=True)
    _, y = jf(x := torch.zeros(2), w, p)
    loss = (x * x).sum() + (y * y).sum()
    with pytest.raises(UnsupportedOpError, match="a TwoTensor, arrives at a plain result"):
        loss.backward(TwoTensor(torch.ones(()), torch.ones(())))
