"""vmap against torch.func.vmap, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from tests.seeds import seeded
from thunder_norm.errors import DataDependentError, TransformError, TransformTypeError
from thunder_norm.functions.opaque import fallbacks
from thunder_norm.functions.registry import batching_rules, register_batching
from thunder_norm.transforms import SubclassTransform, grad, vmap
import thunder
from thunder.core.proxies import TensorProxy


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(seed)))


def indices(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seeded(0)))


def agree(function: Callable, args: tuple, **options: Any) -> None:
    torch.testing.assert_close(vmap(function, **options)(*args), torch.func.vmap(function, **options)(*args))


def operations(transformed: Callable, *args: Any) -> list[str]:
    """The names of the operations that the transformed program consists of."""
    jitted = thunder.jit(lambda *args: transformed(*args))
    jitted(*args)
    skipped = ("unpack_trivial", "python_return")
    return [b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.name not in skipped]


X, W, S = tensor(4, 3, 5), tensor(5), tensor(4)

PROGRAMS: dict[str, tuple[Callable, tuple, dict]] = {
    "one argument": (torch.sin, (X,), {}),
    "an argument that all samples share": (lambda x, w: x @ w, (X, W), {"in_dims": (0, None)}),
    "other dimensions": (lambda x, y: x.sum(0) * y, (X, tensor(5, 4)), {"in_dims": (0, 1), "out_dims": 1}),
    "negative dimensions": (lambda x: x.cumsum(0), (X,), {"in_dims": -1, "out_dims": -2}),
    "a dictionary": (lambda d: {"a": d["x"] * 2, "b": (d["s"], d["x"].sum())}, ({"x": X, "s": S},), {}),
    "dimensions in a structure": (
        lambda d: {"a": d["x"] * d["w"], "b": d["x"].sum()},
        ({"x": X, "w": W},),
        {"in_dims": ({"x": 0, "w": None},), "out_dims": {"a": 1, "b": 0}},
    ),
    "several results": (lambda x: (x.max(), x.argmax(), x.sort(-1)[0]), (X,), {"out_dims": (0, 0, 2)}),
    "a captured tensor": (lambda x: x * W, (X,), {}),
    "a result that is the same for all samples": (lambda x: (x.sum(), W * 2), (X,), {}),
    "new tensors have the shape of a sample": (lambda x: torch.ones(x.shape[0]) + x.size(1) + x.sum(), (X.float(),), {}),
    "a scalar of each sample meets a matrix": (lambda x, s: x * s + s.exp(), (X, S), {}),
    "a sum of each sample meets the sample": (lambda x: x / x.sum(), (X,), {}),
    "scalars of different dtypes": (lambda x, s: x * s, (X.float(), S), {}),
    "weights of each sample": (F.linear, (X, tensor(4, 7, 5), tensor(4, 7)), {}),
    "vectors and matrices": (lambda a, b: (a @ b, b.T @ a, a @ a), (tensor(4, 3), tensor(4, 3, 6)), {"out_dims": (0, 0, 0)}),
    "a shared matrix times vectors": (lambda a, b: a @ b, (tensor(2, 3), tensor(4, 3)), {"in_dims": (None, 0)}),
    "rows of a shared table": (lambda t, i: t[i], (tensor(6, 5), indices(4, 2, below=6)), {"in_dims": (None, 0)}),
    "a table of each sample's own": (lambda t, i: F.embedding(i, t), (tensor(4, 6, 5), indices(4, 2, 3, below=6)), {}),
    "gather": (lambda x, i: x.gather(1, i), (X, indices(4, 3, 2, below=5)), {}),
    "scatter": (lambda x, i, y: x.scatter_add(0, i, y), (X, indices(4, 2, 5, below=3), tensor(4, 2, 5)), {}),
    "index_put": (
        lambda x, i, v: torch.index_put(x, (i,), v, accumulate=True), (X, indices(4, 2, below=3), tensor(4, 2, 5)), {}
    ),
    "images": (lambda x, w: F.conv2d(x, w, padding=1), (tensor(4, 2, 3, 5, 5), tensor(6, 3, 3, 3)), {"in_dims": (0, None)}),
    "kernels of each sample": (lambda x, w, b: F.conv2d(x, w, b), (tensor(4, 2, 3, 5, 5), tensor(4, 6, 3, 3, 3), tensor(4, 6)), {}),
    "kernels of each sample on shared images, in groups": (
        lambda x, w: F.conv2d(x, w, groups=3), (tensor(2, 3, 5, 5), tensor(4, 6, 1, 3, 3)), {"in_dims": (None, 0)}
    ),
    "layer_norm with scales of each sample": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b), (X, tensor(4, 5), W), {"in_dims": (0, 0, None)}
    ),
    "an operation that torch batches": (torch.addmv, (tensor(4, 3), tensor(3, 5), tensor(4, 5)), {"in_dims": (0, None, 0)}),
    "what all samples have alike": (
        lambda x: x.contiguous() * x.ndimension() + x.nelement() * x.element_size() + x.is_signed() + x.is_same_size(x * 2), (X,), {}
    ),
    "attention": (F.scaled_dot_product_attention, (tensor(4, 2, 3, 5), tensor(4, 2, 6, 5), tensor(4, 2, 6, 5)), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_agrees_with_torch(name: str):
    function, args, options = PROGRAMS[name]
    agree(function, args, **options)


def test_a_row_of_each_sample():
    """torch 2.9 asks the index for its value there, and refuses."""
    x, i = X, indices(4, below=3)
    torch.testing.assert_close(vmap(lambda x, i: x[i])(x, i), torch.stack([x[k, i[k]] for k in range(4)]))


def cross_entropy(**options: Any) -> Callable:
    return lambda x, t: F.cross_entropy(x, t, **options).square().sum()


# Programs whose gradients Thunder writes with operations that have no decomposition of its own, and layers with weights
GRADIENTS: dict[str, tuple[Callable, tuple, tuple]] = {
    "cross entropy of a class": (cross_entropy(), (0, 0), (tensor(4, 5), indices(4, below=5))),
    "cross entropy": (cross_entropy(), (0, 0), (tensor(4, 6, 5), indices(4, 6, below=5))),
    "cross entropy of pixels": (cross_entropy(), (0, 0), (tensor(4, 2, 5, 3, 3), indices(4, 2, 3, 3, below=5))),
    "cross entropy, summed": (cross_entropy(reduction="sum"), (0, 0), (tensor(4, 6, 5), indices(4, 6, below=5))),
    "cross entropy of each": (cross_entropy(reduction="none"), (0, 0), (tensor(4, 6, 5), indices(4, 6, below=5))),
    "cross entropy, weighted": (cross_entropy(weight=tensor(5).abs()), (0, 0), (tensor(4, 6, 5), indices(4, 6, below=5))),
    "cross entropy without a class": (cross_entropy(ignore_index=2), (0, 0), (tensor(4, 6, 5), indices(4, 6, below=5))),
    "layer_norm": (lambda w, x: F.layer_norm(x, (5,), w).pow(3).sum(), (None, 0), (W, tensor(4, 5))),
    "embedding": (lambda w, i: F.embedding(i, w).pow(3).sum(), (None, 0), (tensor(7, 5), indices(4, 3, below=7))),
    "convolution": (
        lambda w, x: F.conv2d(x[None], w, padding=1).relu().sum(), (None, 0), (tensor(4, 3, 3, 3), tensor(5, 3, 6, 6))
    ),
    "pools": (
        lambda x: (F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) * F.adaptive_avg_pool2d(x, 3)).pow(3).sum(), (0,), (tensor(4, 2, 6, 6),)
    ),
    "attention": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True).pow(3).sum(), (0, 0),
        (tensor(4, 2, 3, 6, 5), tensor(4, 2, 3, 6, 5, seed=1)),
    ),
    "an operation that torch runs": (lambda v, m: torch.addmv(v, m, v).sin().sum(), (0, None), (tensor(4, 3), tensor(3, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_each_sample(name: str):
    function, in_dims, args = GRADIENTS[name]
    expected = torch.func.vmap(torch.func.grad(function), in_dims)(*args)
    torch.testing.assert_close(vmap(grad(function), in_dims)(*args), expected)


def test_nested_in_both_orders():
    x = tensor(3, 4, 5)
    nested = vmap(vmap(lambda a: a.unsqueeze(0)))
    assert nested(x).shape == (3, 4, 1, 5)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    rows, columns = tensor(3, 5), tensor(4, 5, seed=1)
    outer = vmap(vmap(product, (None, 0)), (0, None))(rows, columns)
    torch.testing.assert_close(outer, rows @ columns.T)
    torch.testing.assert_close(vmap(vmap(product, (0, None)), (None, 0))(rows, columns), outer.T)


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x * x,
        lambda x: x.softmax(-1),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: x.to(x.dtype),  # the very tensor, which keeps its gradient
        lambda x: torch.linalg.svdvals(x).sum(),  # which torch batches
        lambda x: x.clone().mul_(2),
    ],
)
def test_what_samples_compute_under_no_grad_is_a_constant_to_gradients_around(made: Callable):
    """And only to these: what is made of it afterwards has its gradient, and so has what was given."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            constant = made(x)
        return (constant * x).sin() + x

    expected = torch.func.grad(lambda x: torch.func.vmap(function)(x).square().sum())(X)
    torch.testing.assert_close(grad(lambda x: vmap(function)(x).square().sum())(X), expected)
    nested = torch.func.grad(lambda x: torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(x).square().sum())(X)
    torch.testing.assert_close(grad(lambda x: vmap(grad(lambda x: function(x).sum()))(x).square().sum())(X), nested)
    given = X.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(vmap(function)(given).square().sum(), given)[0], expected)


def test_keyword_arguments_are_the_same_for_all_samples():
    agree_on = tensor(4, 3)
    got = vmap(lambda x, *, y: x + y)(agree_on, y=tensor(3))
    torch.testing.assert_close(got, agree_on + tensor(3))


def test_modules_and_calls_inside_jit():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    torch.testing.assert_close(vmap(model)(X), model(X))
    jitted = thunder.jit(lambda x: vmap(torch.sin)(x) + 1)
    torch.testing.assert_close(jitted(X), X.sin() + 1)


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_dimensions(data: st.DataObject):
    in_dims = (data.draw(st.integers(-3, 2)), data.draw(st.sampled_from([None, 0, 1, -1])))
    out_dims = data.draw(st.integers(-2, 1))
    x, y = tensor(3, 3, 3), tensor(3, 3, seed=1)
    agree(lambda a, b: (a * b).sum(0), (x, y), in_dims=in_dims, out_dims=out_dims)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 9])
def test_chunks_give_the_same(chunk_size: int):
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * w).sum(0), w.sum()

    agree(function, (X, W), in_dims=(0, None), out_dims=(1, 0), chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_random_operations_draw_for_each_sample_or_once(chunk_size: int | None):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, dtype=torch.float64) + F.dropout(torch.ones(3, dtype=torch.float64), 0.5)

    x = torch.zeros(6, 3, dtype=torch.float64)
    different = vmap(function, randomness="different", chunk_size=chunk_size)(x)
    same = vmap(function, randomness="same", chunk_size=chunk_size)(x)
    assert len({tuple(row.tolist()) for row in different}) == 6
    assert len({tuple(row.tolist()) for row in same}) == 1
    with pytest.raises(TransformError, match=r"random operation rand(?s:.*)test_vmap.py:\d+:  return x \+ torch.rand"):
        vmap(function, chunk_size=chunk_size)(x)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.normal(x, 1.0),
        lambda x: torch.normal(1.0, x),
        torch.bernoulli,
        torch.poisson,
        torch._standard_gamma,
        lambda x: torch.multinomial(x, 2),
        lambda x: torch.binomial(torch.full_like(x, 5.0), x),
    ],
)
def test_numbers_drawn_by_values_of_each_sample_cannot_be_the_same(draw):
    x = torch.rand(2, 3)
    with pytest.raises(RuntimeError, match="same randomness"):
        torch.func.vmap(draw, randomness="same")(x)
    with pytest.raises(TransformError, match="draws by values that are others for each sample"):
        vmap(lambda x: draw(x), randomness="same")(x)


def _into_a_view(x):
    y = torch.zeros_like(x)
    y[1:].uniform_()
    return y * x


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize(
    "draw",
    [lambda x: x.clone().normal_(), lambda x: x * x.clone().exponential_(2.0), _into_a_view, lambda x: x.clone().erfinv_()],
)
def test_operations_in_place_that_thunder_does_not_know_are_torch_s_in_traced_programs(draw, randomness):
    def outcome(jit):
        torch.manual_seed(seeded(0))
        return jit(lambda x: torch.vmap(draw, randomness=randomness)(x))(torch.linspace(0.1, 0.9, 6).reshape(2, 3))

    torch.testing.assert_close(outcome(lambda f: thunder.jit(f, transforms=[SubclassTransform()])), outcome(lambda f: f))


def test_dropout_has_the_right_mean_and_masks_of_each_sample():
    ones = torch.ones(64, 100, dtype=torch.float64)
    dropped = vmap(lambda x: F.dropout(x, 0.25), randomness="different")(ones)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert abs(dropped.mean() - 1) < 0.05
    assert len({tuple(row.tolist()) for row in dropped}) == 64


DRAWING = {
    "dropout": lambda a: F.dropout(a, 0.3),
    "dropout of what has no batch": lambda a: a * F.dropout(torch.ones(4, 4), 0.3).t(),
    "dropout1d": lambda a: F.dropout1d(a),
    "dropout2d": lambda a: F.dropout2d(a[..., None]),
    "alpha_dropout": lambda a: F.alpha_dropout(a, 0.5, True),
    "feature_alpha_dropout": lambda a: F.feature_alpha_dropout(a[..., None], 0.5, True),
    "gumbel_softmax": F.gumbel_softmax,
    "twice": lambda a: a * (torch.randn(4) - torch.randn(4)),
    "integers": lambda a: a + torch.randint(0, 9, (4,)),
    "permutations": lambda a: a[torch.randperm(4)],
    "coins": lambda a: a * torch.bernoulli(torch.full((4,), 0.5)),
    "exponentially distributed": lambda a: a.clone().exponential_(2.0),
    "normal of a size": lambda a: a + torch.normal(1.0, 2.0, (4, 4)),
    "normal, one number": lambda a: a + torch.normal(1.0, 2.0, ()),
}


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("name", DRAWING)
def test_numbers_of_samples_are_those_of_torch(name: str, randomness: str):
    x = tensor(4, 4, 4).float()
    dims = (0, 0, 0) if DRAWING[name] is F.gumbel_softmax else (0, -1, 1)  # which torch draws as the whole lies in memory
    for in_dims, chunk_size in zip(dims, (None, None, 2), strict=True):
        options = {"in_dims": in_dims, "randomness": randomness, "chunk_size": chunk_size}
        torch.manual_seed(seeded(0))
        expected = torch.func.vmap(DRAWING[name], **options)(x), torch.rand(1)
        torch.manual_seed(seeded(0))
        torch.testing.assert_close((vmap(DRAWING[name], **options)(x), torch.rand(1)), expected)


@pytest.mark.parametrize("randomness", [("different", "different"), ("different", "same"), ("same", "different")])
@pytest.mark.parametrize("size", [(), (3,)])
def test_numbers_of_samples_of_samples_are_those_of_torch(size: tuple[int, ...], randomness: tuple[str, str]):
    def nested(transform: Any) -> Any:
        of_rows = transform(lambda a: a + torch.normal(1.0, 2.0, size), randomness=randomness[0])
        return transform(lambda a: of_rows(a) * 2, randomness=randomness[1])

    x = tensor(5, 4).float()
    torch.manual_seed(seeded(0))
    expected = nested(torch.func.vmap)(x)
    torch.manual_seed(seeded(0))
    torch.testing.assert_close(nested(vmap)(x), expected)


def test_a_mask_of_dropout_is_drawn_in_the_order_of_the_memory():
    def function(a: torch.Tensor) -> Any:
        return torch.native_dropout(a, 0.5, True)

    torch.manual_seed(seeded(0))
    expected = torch.func.vmap(function, in_dims=1, randomness="different")(X)
    torch.manual_seed(seeded(0))
    torch.testing.assert_close(vmap(function, in_dims=1, randomness="different")(X), expected)


def test_what_torch_draws_once_is_drawn_for_each_sample_or_refused():
    """Of a tensor that is the same for all samples."""
    drawn = thunder.jit(lambda x: torch.vmap(F.gumbel_softmax, randomness="different")(x), transforms=[SubclassTransform()])
    assert len({tuple(row.tolist()) for row in drawn(torch.ones(4, 5))}) == 4
    with pytest.raises(TransformError, match="random operation randperm"):
        vmap(lambda a: a[torch.randperm(4)])(tensor(3, 4))


def test_draws_by_weights_of_each_sample():
    weights = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    draw = vmap(lambda w: torch.multinomial(w, 5, replacement=True), randomness="different")
    assert draw(weights).tolist() == [[0] * 5, [1] * 5, [2] * 5]
    of_shared = vmap(lambda x, w: torch.multinomial(w, 20, replacement=True), (0, None), randomness="different")
    assert len({tuple(row.tolist()) for row in of_shared(torch.zeros(4), torch.ones(5))}) == 4


def test_the_program_is_what_one_would_write():
    layer = torch.nn.Linear(5, 7).double()
    assert operations(vmap(lambda x, w, b: F.gelu(F.linear(x, w, b)), (0, None, None)), X, layer.weight, layer.bias) == [
        "linear",
        "gelu",
    ]
    assert operations(vmap(lambda x: torch.softmax(x.sum(0), -1)), X) == ["sum", "_softmax"]
    assert operations(vmap(lambda x, w: x.sin() * w.cos(), (0, None)), X, W) == ["sin", "cos", "mul"]


def test_numbers_in_programs_are_numbers():
    """Not Thunder's stand-ins for them, which executors that compile again do not know."""

    rows = torch.tensor([0, 2])
    jitted = thunder.jit(vmap(lambda x, value: torch.index_fill(x, 0, rows, value)))
    jitted(torch.randn(5, 4), torch.randn(5))

    def numbers(bsyms):
        for b in bsyms:
            yield from (v for v in tree_leaves((b.args, b.kwargs)) if isinstance(v, int | float))
            yield from numbers(b.subsymbols)

    found = list(numbers(thunder.last_traces(jitted)[0].bound_symbols))
    assert found
    assert {type(v) for v in found} <= {int, float, bool}


def test_operations_that_torch_batches_are_listed():
    jitted = thunder.jit(lambda a, m, v: vmap(torch.addmv, (0, None, 0))(a, m, v))
    jitted(tensor(4, 3), tensor(3, 5), tensor(4, 5))
    ((name, at),) = fallbacks(thunder.last_traces(jitted)[0])
    assert name == "vmap_torch_addmv"
    assert at is not None and "test_vmap.py" in at


REFUSED: dict[str, tuple[Callable, tuple, dict, type[Exception], str]] = {
    "no arguments": (lambda: W, (), {}, TransformError, "at least one positional argument"),
    "different numbers of samples": (torch.add, (X, W), {}, TransformError, "4 in argument 0, 5 in argument 1"),
    "nothing to map over": (torch.sin, (X,), {"in_dims": (None,)}, TransformError, "nothing to map over"),
    "a dimension out of range": (torch.sin, (X,), {"in_dims": 3}, TransformError, "in_dims is 3 for argument 0"),
    "a scalar": (lambda d: d["s"], ({"s": S.sum()},), {}, TransformError, r"argument 0\['s'\](?s:.*)no dimension to map over"),
    "a number": (lambda x, n: x * n, (X, 2), {}, TransformError, "argument 1, which is no tensor"),
    "another structure": (torch.add, (X, X), {"in_dims": (0,)}, TransformError, "does not fit the arguments"),
    "no dimensions at all": (torch.sin, (X,), {"in_dims": None}, TransformError, "in_dims is None"),
    "dimensions that are no ints": (torch.sin, (X,), {"in_dims": (0.5,)}, TransformTypeError, "made of ints"),
    "out_dims out of range": (torch.sin, (X,), {"out_dims": 3}, TransformError, "out_dims is 3"),
    "out_dims None": (torch.sin, (X,), {"out_dims": None}, TransformError, "different for each sample"),
    "out_dims of another structure": (torch.sin, (X,), {"out_dims": (0, 0)}, TransformError, "does not fit what the function"),
    "a result that is no tensor": (lambda x: 3, (X,), {}, TransformTypeError, "returns a int where out_dims is 0"),
    "an unknown randomness": (torch.sin, (X,), {"randomness": "any"}, TransformError, "'error' or 'different' or 'same'"),
    "chunks of nothing": (torch.sin, (X,), {"chunk_size": 0}, TransformError, "a positive int"),
    "a number read out of a sample": (
        lambda x: x * x.sum().item(), (X,), {}, DataDependentError, r"test_vmap.py:\d+:  lambda x: x \* x.sum\(\).item\(\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    function, args, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        vmap(function, **options)(*args)


def test_a_result_that_is_no_tensor_may_pass_by():
    result, number = vmap(lambda x: (x.sin(), x.shape[0]), out_dims=(0, None))(X)
    torch.testing.assert_close(result, X.sin())
    assert number == 3


def test_a_rule_of_ones_own():
    calls = []

    @register_batching(torch.trace)
    def trace(axis_size: int, in_dims: tuple, a: torch.Tensor) -> Any:
        calls.append((axis_size, in_dims))
        return torch.diagonal(a, dim1=1, dim2=2).sum(-1), 0

    try:
        agree(torch.trace, (tensor(4, 3, 3),))
        assert calls == [(4, (0,))]
        with pytest.raises(TransformError, match="has a batching rule already"):
            register_batching(torch.trace)(trace)

        @register_batching(torch.trace, override=True)
        def wrong(axis_size: int, in_dims: tuple, a: torch.Tensor) -> Any:
            return torch.diagonal(a, dim1=1, dim2=2), 0

        with pytest.raises(
            TransformError, match=r"batching rule of torch.trace returned(?s:.*)\(4, 3\)(?s:.*)expected +shape \(4,\)"
        ):
            vmap(torch.trace)(tensor(4, 3, 3))
    finally:
        batching_rules.remove(torch.trace)
    assert not hasattr(TensorProxy, "__torch_function__")
    agree(torch.trace, (tensor(4, 3, 3),))


def test_no_samples_have_results_of_the_right_shape_where_torch_batches_one_after_the_other():
    def places(row: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.nonzero_static(row, size=2)

    found, one = vmap(places)(torch.zeros(0, 3)), places(torch.zeros(3))
    assert found.shape == (0, *one.shape) and found.dtype == one.dtype
