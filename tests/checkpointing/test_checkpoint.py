"""Checkpointed regions: structure, gradients against programs without them, what is kept, and what random operations draw."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.errors import CheckpointError, TransformTypeError, UnsupportedOpError, WrittenOnceWarning
from thunder_norm.functions.gradients import grad
from thunder_norm.transforms import (
    CheckpointTransform,
    NormTransform,
    SplitBiasTransform,
    SubclassTransform,
    checkpoint,
    checkpoint_functions,
)
import thunder


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def gradients(f: Callable, *inputs: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """The result of `f` and the gradients of its weighted sum."""
    inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
    torch.manual_seed(seeded(seed))
    out = f(*inputs)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    return [out.detach(), *(t.grad for t in inputs)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def kept(jitted: Any) -> set[str]:
    """The names of what the forward keeps for the backward."""
    return {p.name for p in thunder.last_traces(jitted)[-1].bound_symbols[-1].args[1][0]}


def runs(jitted: Any, operation: str) -> int:
    """How often an operation stands in the backward."""
    return [b.sym.name for b in thunder.last_backward_traces(jitted)[-1].bound_symbols].count(operation)


def four_levels(run: Callable) -> Callable:
    """Nested regions: three levels in one another, beside a fourth inside the second."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def innermost(x):
            return torch.erf(x)

        def inner(x):
            return run(innermost, torch.tanh(x @ w))

        def middle(x):
            return run(inner, x.cos()) * x + run(innermost, x)

        def outer(x):
            return run(middle, x.cosh()) + x

        return run(outer, x.sin()) * 2

    return program


def call(f: Callable, *args: Any) -> Any:
    return f(*args)


def nonreentrant(f: Callable, *args: Any) -> Any:
    return torch_checkpoint(f, *args, use_reentrant=False)


def reentrant(f: Callable, *args: Any) -> Any:
    return torch_checkpoint(f, *args, use_reentrant=True, preserve_rng_state=True)


def ours(f: Callable, *args: Any) -> Any:
    return checkpoint(f)(*args)


@pytest.mark.parametrize("run", [nonreentrant, reentrant, ours])
def test_nested_regions_keep_their_structure(run: Callable) -> None:
    x, w = rand(3, 3), rand(3, 3)
    transforms = [] if run is ours else [CheckpointTransform()]
    jf = thunder.jit(four_levels(run), transforms=transforms)
    assert_same(gradients(jf, x, w), gradients(four_levels(call), x, w))
    text = checkpoint_functions(jf)
    defined = [line.split("(")[0].removeprefix("def ") for line in text.splitlines() if line.startswith("def ")]
    expected = ["checkpoint_0_0_0_0", "checkpoint_0_0_0", "checkpoint_0_0_1", "checkpoint_0_0", "checkpoint_0", "computation"]
    assert defined == expected
    assert "return run(inner, x.cos()) * x" in text  # the user's lines
    assert len(kept(jf)) == 3  # what goes into the region: x.sin() and w; and x, for the derivative of sin
    # cosh once, for the backward through checkpoint_0; erf and tanh for that through 0_0, which multiplies by them; tanh for 0_0_0 too
    assert (runs(jf, "cosh"), runs(jf, "erf"), runs(jf, "tanh")) == (1, 1, 2)


def test_what_eager_does_with_our_function() -> None:
    x, w = rand(3, 3), rand(3, 3)
    assert_same(gradients(four_levels(ours), x, w), gradients(four_levels(call), x, w))
    with pytest.raises(TransformTypeError):
        checkpoint(3)


def dropped(run: Callable) -> Callable:
    def program(x: torch.Tensor) -> torch.Tensor:
        def inner(x):
            return F.dropout(x.sin(), 0.3)

        def outer(x):
            return F.dropout(run(inner, F.dropout(x, 0.2) * x).exp(), 0.4) + torch.rand_like(x) * x

        return run(outer, x) * F.dropout(x, 0.5)

    return program


def test_random_operations_draw_the_same_again() -> None:
    x = rand(200)
    checkpointed, plain = thunder.jit(dropped(nonreentrant), transforms=[CheckpointTransform()]), dropped(call)
    for seed in range(3):  # the same numbers as torch without regions: forward, and in the backward
        assert_same(gradients(checkpointed, x, seed=seed), gradients(plain, x, seed=seed))
    state = torch.get_rng_state()
    y = x.clone().requires_grad_()
    out = checkpointed(y)
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(after, state)  # the backward draws nothing


def test_a_budget_before_what_interprets_wrappers_is_of_plain_programs() -> None:
    model, x = torch.nn.MultiheadAttention(4, 2), torch.randn(3, 1, 4)
    jm = thunder.jit(model, transforms=[CheckpointTransform(memory_budget=10**6), NormTransform()])
    found, expected = (
        torch.autograd.grad(f(x, x, x, need_weights=False)[0].sin().sum(), list(model.parameters())) for f in (jm, model)
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(CheckpointError, match="(?s)memory budget.*behind that transform"):
        jm(*(RMSTensor.of(x),) * 3, need_weights=False)


@pytest.mark.parametrize("others", [[], [SubclassTransform]])
def test_the_mask_is_that_of_the_forward(others: list) -> None:
    def f(x):
        return torch_checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False).sum()

    jf = thunder.jit(f, transforms=[CheckpointTransform(), *(other() for other in others)])
    for _ in range(3):
        x = torch.ones(1000, requires_grad=True)
        out = jf(x)
        out.backward()
        assert x.grad is not None and out.item() == x.grad.sum().item() / 2  # f is quadratic in x where it is not dropped
    states = [p for p in thunder.last_traces(jf)[-1].bound_symbols[-1].args[1][0] if p.name != "x"]
    assert [tuple(p.shape) for p in states] == [tuple(torch.get_rng_state().shape)]  # not a mask


def test_several_results_and_what_gets_out_by_the_side() -> None:
    def program(run):
        def f(x, w):
            seen = []

            def region(x):
                y = x @ w
                seen.append(y.sin())
                return {"a": y.cos(), "b": (y, x)}, 3

            results, number = run(region, x * 2)
            return results["a"] * results["b"][0] + results["b"][1] * number + seen[0]

        return f

    x, w = rand(3, 3), rand(3, 3)
    jf = thunder.jit(program(nonreentrant), transforms=[CheckpointTransform()])
    assert_same(gradients(jf, x, w), gradients(program(call), x, w))


def test_without_gradients_a_region_is_what_is_in_it() -> None:
    x, w = rand(3, 3), rand(3, 3)
    jf = thunder.jit(four_levels(nonreentrant), transforms=[CheckpointTransform()])
    torch.testing.assert_close(jf(x, w), four_levels(call)(x, w))

    def partly(run):
        def f(x):
            def region(x):
                with torch.no_grad():
                    y = x.exp()
                return x * y, y

            return run(region, x)[0] + run(region, x)[1]

        return f

    jf = thunder.jit(partly(nonreentrant), transforms=[CheckpointTransform()])
    assert_same(gradients(jf, x), gradients(partly(call), x))


def test_in_place_operations() -> None:
    def own(x):
        def region(x):
            y = x.sin()
            y.mul_(x)
            return y.exp()

        return torch_checkpoint(region, x, use_reentrant=False)

    jf = thunder.jit(own, transforms=[CheckpointTransform()])
    x = rand(4)
    assert_same(gradients(jf, x), gradients(lambda x: (x.sin() * x).exp(), x))

    def counts(x, n):
        def region(x):
            n.add_(1)
            return x.sin().exp()

        return torch_checkpoint(region, x, use_reentrant=False)

    n = torch.zeros(4, dtype=torch.float64)
    y = x.clone().requires_grad_()
    thunder.jit(counts, transforms=[CheckpointTransform()])(y, n).sum().backward()
    torch.testing.assert_close(y.grad, gradients(lambda x: x.sin().exp(), x)[1] * 0 + x.cos() * x.sin().exp())
    assert n.tolist() == [1] * 4  # once
    with pytest.raises(UnsupportedOpError, match="test_checkpoint.py"):
        thunder.jit(lambda x, n: checkpoint(lambda x: (n.add_(1), x.sin())[1])(x))(y, n)


def test_running_statistics_are_updated_once() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Tanh()), torch.nn.Linear(3, 2)).double()
    other, x = copy.deepcopy(model), rand(5, 3)
    thunder.jit(model, transforms=[CheckpointTransform("every block")])(x).square().sum().backward()
    other(x).square().sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert_same([b.double() for b in model.buffers()], [b.double() for b in other.buffers()])


def test_arguments_of_torchs_checkpoint() -> None:
    def with_keywords(x):
        return torch_checkpoint(
            lambda x, scale: (x * scale).sin(), x, scale=3, use_reentrant=False, determinism_check="none", debug=False
        )

    def with_contexts(x):
        contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
        return torch_checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: contexts([]))

    x = rand(3)
    jf = thunder.jit(with_keywords, transforms=[CheckpointTransform()])
    assert_same(gradients(jf, x), gradients(lambda x: (x * 3).sin(), x))
    with pytest.raises(UnsupportedOpError, match="context_fn"):
        thunder.jit(with_contexts, transforms=[CheckpointTransform()])(x)
    assert_same(gradients(thunder.jit(with_contexts, transforms=[NormTransform()]), x), gradients(torch.sin, x))


class _Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * 2


def test_contexts_of_a_checkpoint_that_compute_are_refused() -> None:
    def f(x):
        return torch_checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: (_Doubled(), _Doubled()))

    with pytest.raises(UnsupportedOpError, match="context_fn[^$]*_Doubled"):
        thunder.jit(f, transforms=[NormTransform()])(rand(3))


class Block(torch.nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.up, self.down = torch.nn.Linear(n, 2 * n), torch.nn.Linear(2 * n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(4) for _ in range(2))
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("policy", "regions"),
    [
        ("every block", ["checkpoint_0", "checkpoint_1"]),
        (["blocks.1", "*.1.up", "head"], ["checkpoint_0", "checkpoint_1"]),
    ],
)
def test_policies_by_module(policy: Any, regions: list[str]) -> None:
    model, x = Model().double(), rand(3, 4)
    names = [n for n, _ in model.named_parameters()]

    def run(m):
        model.zero_grad()
        out = m(x)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    jm = thunder.jit(model, transforms=[SplitBiasTransform(), CheckpointTransform(policy)])
    assert_same(run(jm), run(model))
    assert [b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols if b.sym.name.startswith("checkpoint")] == regions
    assert len(names) == 10
    if policy == "every block":  # inputs of the blocks and of the head, and parameters
        made = {n for n in kept(jm) if not n.startswith("t_")}
        assert len(made) == 3 and runs(jm, "tanh") == 2


def test_printed_functions_are_the_program() -> None:
    """With what other transforms did to it; and it runs."""
    model, x = Model().double(), rand(3, 4)
    jm = thunder.jit(model, transforms=[CheckpointTransform(["blocks.1"]), SplitBiasTransform()])
    jm(x)
    assert thunder.last_backward_traces(jm)
    text = checkpoint_functions(jm)
    region, rest = text.split("def computation")
    assert region.startswith("def checkpoint_0") and "checkpoint_0(" in rest
    assert region.count("ltorch.linear(") == 2 and region.count("ltorch.add(") == 3  # two biases, and the residual
    namespace: dict[str, Any] = {"ltorch": thunder.torch}
    exec(text, namespace)
    parameters = {"t_" + n.replace(".", "_"): p.detach() for n, p in model.named_parameters()}
    names = inspect.signature(namespace["computation"]).parameters
    (found,) = thunder.jit(namespace["computation"])(*(parameters.get(n, x) for n in names))
    torch.testing.assert_close(found, model(x).detach())


def test_mistakes_in_policies() -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        thunder.jit(Model(), transforms=[CheckpointTransform(["nowhere.*"])])
    with pytest.raises(CheckpointError, match="every block"):
        thunder.jit(torch.nn.Linear(2, 2), transforms=[CheckpointTransform("every block")])
    with pytest.raises(CheckpointError, match="function"):
        thunder.jit(torch.sin, transforms=[CheckpointTransform(["a"])])(torch.ones(2))
    with pytest.raises(CheckpointError, match="blocks.0"):
        CheckpointTransform("blocks.0")
    with pytest.raises(CheckpointError, match="both"):
        CheckpointTransform("every block", memory_budget=3)
    with pytest.raises(CheckpointError, match="positive"):
        CheckpointTransform(memory_budget=0)
    with pytest.raises(CheckpointError, match="report"):
        _ = CheckpointTransform().report


def test_with_function_transforms() -> None:
    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin(), 0.0).exp())(x).sum()

    x = rand(4)
    torch.testing.assert_close(grad(f)(x), torch.func.grad(lambda x: x.sin().exp().sum())(x))
    twice = grad(lambda x: grad(f)(x).sum())(x)
    torch.testing.assert_close(twice, x.sin().exp() * (x.cos() ** 2 - x.sin()))


def test_with_norms() -> None:
    model, x = Model(), torch.randn(3, 4)
    jm = thunder.jit(model, transforms=[NormTransform(), CheckpointTransform(["blocks.1"])])
    torch.testing.assert_close(jm(x), model(x))
    torch.testing.assert_close(
        jm(RMSTensor.of(x)).norm_size, model(RMSTensor.of(x)).norm_size, rtol=1e-5, atol=0
    )  # of float32 data


def test_beside_wrappers_a_region_is_what_is_in_it() -> None:
    x = rand(3)

    def constructs(x):
        return torch_checkpoint(lambda x: TwoTensor(x.sin(), x * 2).exp().b, x, use_reentrant=False) + 1

    jf = thunder.jit(constructs, transforms=[SubclassTransform(), CheckpointTransform()])
    torch.testing.assert_close(jf(x), (x * 2).exp() + 1)
    jf = thunder.jit(
        lambda x: torch_checkpoint(torch.sin, x, use_reentrant=False), transforms=[SubclassTransform(), CheckpointTransform()]
    )
    torch.testing.assert_close(jf(TwoTensor(x, 2 * x)).b, torch.sin(2 * x))


@pytest.mark.parametrize("others", [[], [SubclassTransform], [NormTransform]])
@pytest.mark.parametrize(
    "write",
    [lambda y, x: y.mul_(x), lambda y, x: y.view(-1)[::2].mul_(2), lambda y, x: y[1:].add_(x[1:]), lambda y, x: y.zero_()],
)
def test_what_a_region_writes_into_what_it_makes_is_read_in_it(write, others) -> None:
    def f(x):
        def region(x):
            y = x.sin()
            write(y, x)
            return y.exp()

        return torch_checkpoint(region, x, use_reentrant=False) * x

    def plain(x):
        y = x.sin()
        write(y, x)
        return y.exp() * x

    x = rand(4)
    assert_same(gradients(thunder.jit(f, transforms=[*(t() for t in others), CheckpointTransform()]), x), gradients(plain, x))


class _Repeating(torch.nn.Module):
    """Thunder has no ``repeat_interleave`` along a dimension."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.down(x).repeat_interleave(2, dim=-1), x], axis=-2).tanh()


def test_regions_have_what_thunder_lacks():
    torch.manual_seed(seeded(0))
    model = torch.nn.Sequential(_Repeating(), _Repeating())
    jm = thunder.jit(model, transforms=[CheckpointTransform("every block")])
    for rows in (2, 3, 2):
        x = torch.randn(rows, 8)
        found, wanted = jm(x), model(x)
        torch.testing.assert_close(found, wanted)
        gradients = [torch.autograd.grad(y.square().sum(), list(model.parameters())) for y in (found, wanted)]
        torch.testing.assert_close(*gradients)
    assert [b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols if b.sym.name.startswith("checkpoint")] == [
        "checkpoint_0",
        "checkpoint_1",
    ]


@pytest.mark.parametrize("transform", [SubclassTransform, CheckpointTransform])
def test_writes_of_a_region_are_done_once_and_not_silently(transform):
    model, x = torch.nn.BatchNorm1d(2).double(), rand(4, 2)
    jitted = thunder.jit(
        lambda x: torch_checkpoint(lambda x: model(x * 2).sin(), x, use_reentrant=False), transforms=[transform()]
    )
    with pytest.warns(WrittenOnceWarning, match=r"(?s)writes into .*test_checkpoint\.py"):
        jitted(x.requires_grad_()).sum().backward()
    once = torch.nn.BatchNorm1d(2).double()
    once(x.detach() * 2)
    torch.testing.assert_close(model.running_mean, once.running_mean)
    assert model.num_batches_tracked == 1
