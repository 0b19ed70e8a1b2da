"""Within a radius of the data, of operations that are curved: normalizations, softmax, attention, inverses and logarithms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.seeds import crossed, seeded
from thunder_norm import L1Tensor, RMSTensor, certified_radii, norm_sensitivity, sensitivities, with_perturbation
from thunder_norm.rules.layers._attention_nearby import Moved, Nearby, _ratios

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # the oracle's Jacobians of fused attention


def inputs(shape, radius):
    """A sample with a norm over all of it, within a Euclidean distance."""
    x = torch.randn(1, *shape, dtype=torch.float64)
    dims, moved = tuple(range(-len(shape), 0)), radius / math.sqrt(math.prod(shape))
    return x, with_perturbation(RMSTensor._wrap(x.clone(), RMSTensor.of(x, dims).norm_size + moved, None, dims), moved)


def bound_of(f, given):
    """The Lipschitz constant near the data, both ends Euclidean, by the norm of the result."""
    with norm_sensitivity("within"):
        y = f(given)
    found = sensitivities(y, given).item()
    over = math.prod(y.shape[d] for d in y.elem_dims)
    # a norm that is the largest of several rows bounds all of them; a sum is no less than the length
    length = 1.0 if isinstance(y, L1Tensor) else math.sqrt(over)
    return found * length * math.sqrt(y.numel() / over / given.numel())


def steepest(f, x, radius):
    """The largest Jacobian norm at a point within the radius that a search finds."""
    generator = torch.Generator().manual_seed(seeded(5))

    def norms(points):
        return torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(lambda v: f(v).flatten()))(points).flatten(2), 2)

    best, found = x, norms(x).max()
    for step in (1.0, 0.5, 0.3, 0.1):
        moved = torch.randn(100, *x.shape[1:], generator=generator, dtype=x.dtype)
        moved = best - x + step * radius * moved / moved.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))
        lengths = moved.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))
        points = x + moved * (radius / lengths).clamp(max=1.0)
        tried = norms(points)
        if tried.max() > found:
            best, found = points[tried.argmax()][None], tried.max()
    return found.item()


W = torch.linspace(0.3, -2.0, 5, dtype=torch.float64)
SEEN = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)


def of_three(f):
    """Queries, keys and values from one tensor of tokens."""
    torch.manual_seed(seeded(6))
    maps = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    return lambda x: f(*(x @ m for m in maps))


PLACES = torch.tensor([[2, 0, 0, 1, 2], [1, 1, 0, 2, 0]])
FUNCTIONS = {
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "layer_norm, gain and bias": lambda x: F.layer_norm(x, (5,), W, W + 1, 1e-2),
    "layer_norm of all": lambda x: F.layer_norm(x, (3, 5)),
    "rms_norm": lambda x: F.rms_norm(x, (5,), W),
    "rms_norm, eps": lambda x: F.rms_norm(x, (5,), None, 0.3),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "written out": lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5),
    "written out, a negative multiple": lambda x: W * (x * (-3.0 * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 0.2))),
    "written out, beside itself": lambda x: x + (x @ torch.diag(W)).square().mean(-1, keepdim=True).rsqrt() * (x @ torch.diag(W)),
    "softmax, mixed": lambda x: x.softmax(-1) @ torch.vander(W),
    "softmax": lambda x: x.softmax(-1),
    "softmax, large": lambda x: (4 * x).softmax(-2),
    "attention": of_three(F.scaled_dot_product_attention),
    "attention, causal": of_three(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "attention, masked": of_three(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, SEEN)),
    "attention, negative scale": of_three(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=-0.7)),
    "attention, bias": of_three(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, 3.0 * SEEN.double())),
    "attention to itself": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention by a fixed query": of_three(lambda q, k, v: F.scaled_dot_product_attention(W[:4].expand(1, 2, 4), k, v)),
    "grouped heads": of_three(
        lambda q, k, v: F.scaled_dot_product_attention(
            q.unflatten(-1, (2, 2)).transpose(-2, -3), k[..., None, :, :2], v[..., None, :, 2:], enable_gqa=True
        ).transpose(-2, -3)
    ),
    "heads": of_three(
        lambda q, k, v: F.scaled_dot_product_attention(*(t.unflatten(-1, (2, 2)).transpose(-2, -3) for t in (q, k, v))).transpose(
            -2, -3
        )
    ),
    "group_norm": lambda x: F.group_norm(x, 3, 1 + torch.arange(3).double(), torch.ones(3).double()),
    "instance_norm": lambda x: F.instance_norm(x, weight=W[:3], bias=W[:3]),
    "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax, mixed": lambda x: (3 * x).log_softmax(-1) @ torch.vander(W),
    "product, mixed": lambda x: (x * x[:, :1]) @ torch.vander(W),
    "matrix product, mixed": lambda x: x @ x.mT @ torch.vander(W)[:3],
    "exponential": lambda x: (0.5 * x).exp() @ torch.vander(W),
    "powers": lambda x: (x + 5) ** -1.5 + x**3 + (x + 6).rsqrt() + x.square(),
    "inverse": lambda x: 1 / (x * x + 0.1),
    "inverse of what is positive": lambda x: 1 / (x + 4),
    "logarithm": lambda x: (x.abs() + 4 - x).log(),
    "root": lambda x: (x + 5).sqrt(),
    "gate": lambda x: F.silu(x @ torch.diag(W)) * x,
    "gate, of halves": lambda x: F.glu(3 * x[..., :4]) @ torch.vander(W)[:2],
    "gate, of halves of tokens": lambda x: F.glu(x[..., :2, :], dim=-2),
    "scores": lambda x: (x @ x.mT).softmax(-1) @ x,
    "taken, gather": lambda x: torch.gather(x.tanh(), 1, PLACES[None]) @ torch.vander(W),
    "taken, take": lambda x: torch.take(x.sigmoid(), PLACES)[None] @ torch.vander(W),
    "taken, take_along_dim": lambda x: torch.take_along_dim(x.tanh(), PLACES[None], 1) @ torch.vander(W),
    "taken, index_select": lambda x: x.tanh().index_select(1, PLACES[0]) @ torch.vander(W),
    "put, scatter": lambda x: x.tanh().scatter(1, PLACES[None, :1], x.sigmoid()[:, :1]) @ torch.vander(W),
    "put, a number": lambda x: x.tanh().scatter(1, PLACES[None, :1], 2.0) @ torch.vander(W),
    "put, scatter_add": lambda x: x.tanh().scatter_add(1, PLACES[None], x.sigmoid()[:, :2]) @ torch.vander(W),
    "put, index_copy": lambda x: x.tanh().index_copy(1, PLACES[0, :1], x[:, 2:]) @ torch.vander(W),
    "put, index_fill": lambda x: x.tanh().index_fill(1, PLACES[0], 3.0) @ torch.vander(W),
    "put, index_put": lambda x: x.tanh().index_put((PLACES[0, :1] * 0, PLACES[0, :1]), x[:, 1]) @ torch.vander(W),
    "put, index_add": lambda x: x.tanh().index_add(1, PLACES[0, :2], x[:, 1:], alpha=0.5) @ torch.vander(W),
    "log_sum_exp": lambda x: torch.logsumexp(3 * x, -1),
    "log_sum_exp of all": lambda x: torch.logsumexp(x, (1, 2), keepdim=True),
    "variance": lambda x: (x @ torch.vander(W)).var(-1),
    "variance of tokens": lambda x: x.var(1, unbiased=False, keepdim=True),
    "variance of all": lambda x: x.var((1, 2), correction=2, keepdim=True),
    "deviation": lambda x: (x @ torch.vander(W)).std(-1),
    "inner": lambda x: torch.inner(x[0], x[0].tanh())[None],
    "outer": lambda x: torch.outer(x[0, 0], x[0, 1].tanh())[None],
    "waves": lambda x: (3 * x).sin() @ torch.vander(W) + (2 * x).cos(),
    "gelu by tanh": lambda x: F.gelu(2 * x, approximate="tanh") @ torch.vander(W),
    "mish": lambda x: F.mish(3 * x) @ torch.vander(W),
}


@pytest.mark.parametrize(("name", "radius"), crossed(FUNCTIONS, [0.01, 0.1, 0.5]))
def test_no_point_nearby_is_steeper(name, radius):
    torch.manual_seed(seeded(7))
    f = FUNCTIONS[name]
    x, given = inputs((3, 5), radius)
    bound = bound_of(f, given)
    found = steepest(lambda v: f(v[None])[0], x, radius)
    assert found <= bound * (1 + 1e-9)


EXACT = (
    "layer_norm",
    "rms_norm",
    "written out",
    "group_norm",
    "instance_norm",
    "softmax, mixed",
    "log_softmax, mixed",
    "product",
    "matrix",
    "attention",
    "heads",
    "grouped",
    "exp",
    "pow",
    "gate",
    "taken",
    "put",
    "log_sum_exp",
    "variance",
    "deviation",
    "inner",
    "outer",
    "waves",
    "gelu",
    "mish",
)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n.startswith(EXACT)])
def test_at_radius_0_it_is_the_norm_of_the_jacobian(name):
    torch.manual_seed(seeded(7))
    f = FUNCTIONS[name]
    x, given = inputs((3, 5), 0.0)
    with norm_sensitivity("within"):
        y = f(given)
        z = y.flatten(1)
    jacobian = torch.func.jacrev(lambda v: f(v[None]).flatten())(x[0]).flatten(1)
    # between lengths, or from a length to the largest entry
    exact = torch.linalg.matrix_norm(jacobian, 2) if z.elem_dims else jacobian.norm(dim=1).max()
    length = math.sqrt(z.numel() if z.elem_dims else 1)
    assert sensitivities(z, given).item() * length / math.sqrt(given.numel()) == pytest.approx(exact.item(), rel=1e-6)


def row_by_row(jacobian):
    """Of a Jacobian [rows, n, rows, m]: the longest that a row of the result moves by all entries together, and by rows of at most unit length."""
    _, sizes, directions = torch.linalg.svd(jacobian.flatten(2), full_matrices=False)
    furthest = directions[:, 0].unflatten(-1, jacobian.shape[2:]).norm(dim=-1).amax(-1)
    return sizes[:, 0].max().item(), (sizes[:, 0] / furthest).max().item()


@pytest.mark.parametrize("radius", [0.0, 0.03])
@pytest.mark.parametrize(
    "name", ["attention", "attention, causal", "attention to itself", "layer_norm of all", "scores", "written out, beside itself"]
)
def test_of_rows_that_are_mixed_all_is_known_together(name, radius):
    """At the data a ball of all rows is what is looser than rows of unit length: by the root of their number at most."""
    torch.manual_seed(seeded(7))
    x = torch.randn(1, 3, 5, dtype=torch.float64)
    given = with_perturbation(RMSTensor._wrap(x.clone(), RMSTensor.of(x).norm_size + radius, None, (-1,)), radius)
    with norm_sensitivity("within"):
        y = FUNCTIONS[name](given)
    moved = torch.randn(60, 3, 5, dtype=torch.float64)
    moved = moved / moved.norm(dim=-1, keepdim=True) * radius * math.sqrt(5)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: FUNCTIONS[name](v[None])[0]))(x[0] + moved)
    if set(y.elem_dims) >= {-2, -1}:
        jacobians = jacobians.flatten(1, 2)[:, None]
    bound = sensitivities(y, given).item() * math.sqrt(math.prod(y.shape[d] for d in y.elem_dims) / 5)
    found = [row_by_row(j) for j in jacobians]
    assert max(by_rows for _, by_rows in found) <= bound * (1 + 1e-9)
    if not radius:
        assert bound <= max(length for length, _ in found) * math.sqrt(3) * (1 + 1e-6)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.head = nn.LayerNorm(6), nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = x.unflatten(-1, (4, 6))
        x = x + self.out(F.scaled_dot_product_attention(*self.qkv(self.norm(x)).chunk(3, -1)))
        return self.head(x.mean(-2))


def test_labels_of_a_transformer_are_certified():
    torch.manual_seed(seeded(8))
    model, x = Transformer().double(), torch.randn(3, 24, dtype=torch.float64)
    labels = model(x).argmax(-1)
    radii = certified_radii(model, x, labels)
    assert (radii > 0).all()
    for point, label, radius in zip(x, labels, radii, strict=True):
        near = point + _downhill(model, point, label, radius)
        assert (model(near).argmax(-1) == label).all()


def _downhill(model, x, label, radius):
    """Moves of that length which a search finds to lower the label's margin."""
    moved = torch.randn(20, len(x), dtype=torch.float64) * 0.1
    for _ in range(20):
        moved = (radius * moved / moved.norm(dim=1, keepdim=True)).requires_grad_()
        logits = model(x + moved)
        others = logits.masked_fill(F.one_hot(label, logits.shape[-1]).bool(), -math.inf)
        (slope,) = torch.autograd.grad((logits[:, label] - others.amax(-1)).sum(), moved)
        moved = moved.detach() - 0.3 * radius * slope / slope.norm(dim=1, keepdim=True)
    return (radius * moved / moved.norm(dim=1, keepdim=True)).detach()


def test_second_derivatives_of_attention_are_within_what_is_said_of_them():
    generator = torch.Generator().manual_seed(seeded(9))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    largest = 0.0
    for _ in range(30):
        q, k, v = (random(4, 3) * 10 ** random(1) for _ in range(3))
        e = [random(4, 3) for _ in range(3)]
        moved = Moved(*(t.norm(dim=-1).max().item() for t in e))
        scale = 0.7

        def of(q, k, v, scale=scale):
            return F.scaled_dot_product_attention(q, k, v, scale=scale)

        _, second = torch.func.jvp(lambda *t, e=e: torch.func.jvp(of, t, tuple(e))[1], (q, k, v), tuple(e))[:2]
        scores = scale * (e[0] @ k.mT + q @ e[1].mT)
        scores = scores - (Nearby.of(q, k, v, None, False, scale, Moved()).data * scores).sum(-1, keepdim=True)
        # at the data itself, along one direction: what weights and tokens grow by nearby is left out
        at_data = Nearby.of(q, k, v, None, False, scale, Moved())
        near = replace(at_data, moved=moved, scores=scores.abs())
        (by_scores,), by_query, by_key, by_value = near.bend([scores.abs()])
        bound = by_scores + by_query * moved.query + by_key * moved.key + by_value * moved.value
        assert second.norm() <= bound * (1 + 1e-9)
        largest = max(largest, (second.norm() / bound).item())
    assert largest > 0.05


PUT_TWICE = {
    "scatter": lambda x: torch.zeros_like(x).scatter(0, torch.tensor([1, 1]), torch.cat([x[:1], -x[:1]])),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, torch.tensor([1, 1]), torch.cat([x[:1], -x[:1]])),
    "index_put": lambda x: torch.zeros_like(x).index_put((torch.tensor([1, 1]),), torch.cat([x[:1], -x[:1]])),
}


@pytest.mark.parametrize("name", PUT_TWICE)
def test_of_two_entries_that_are_put_at_one_place_one_is_there(name):
    """Torch's gradient is the sum of both, which is 0 here."""
    point = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64)
    x = with_perturbation(RMSTensor.of(point), 0.1)
    with norm_sensitivity("within"):
        y = PUT_TWICE[name](x)
    moved = (PUT_TWICE[name](point + torch.tensor([0.1, 0.0, 0.0])) - PUT_TWICE[name](point)).norm().item()
    assert moved == pytest.approx(0.1)
    assert sensitivities(y, x).item() >= 1 - 1e-9


@pytest.mark.parametrize(("name", "slope"), [("scatter", 2.0), ("scatter_add", 3.0), ("gather", 1.0)])
def test_numbers_may_be_of_a_scalar(name, slope):
    x = with_perturbation(RMSTensor.of(torch.tensor(0.5, dtype=torch.float64)), 0.1)
    with norm_sensitivity("within"):
        y = getattr(x, name)(0, torch.tensor([0]), *([] if name == "gather" else [x * 2]))
    assert sensitivities(y, x).item() == pytest.approx(slope)


@pytest.mark.parametrize("name", ["scatter", "scatter_add"])
def test_of_a_source_that_is_larger_than_the_numbers_only_a_part_is_put(name):
    torch.manual_seed(seeded(0))
    _, given = inputs((3, 5), 0.1)

    def of(part):
        return lambda x: getattr(x.tanh(), name)(1, PLACES[None], x.sigmoid()[:, part])

    assert bound_of(of(slice(None)), given) == pytest.approx(bound_of(of(slice(2)), given), rel=1e-9)


def test_however_much_weights_change_keys_and_values_are_no_further_apart():
    """Of two keys the derivative is steepest where both count the same: `|v_1 - v_2| |k_1 - k_2| / 4` over the root of d, which a far query reaches."""
    k, v = torch.tensor([[2.0, 1.0], [-1.0, 3.0]]), torch.tensor([[1.0, 0.0, 2.0], [4.0, 4.0, 2.0]])
    q = torch.tensor([[9.0, -8.0]])
    q, k, v = (t.double().reshape(1, 1, *t.shape) for t in (q, k, v))
    scores = (q @ k.mT / math.sqrt(2)).squeeze()
    apart = (k[0, 0, 0] - k[0, 0, 1]) / math.sqrt(2)
    between = -(scores[0] - scores[1]) * apart / apart.square().sum()
    found = torch.linalg.matrix_norm(
        torch.func.jacrev(lambda t: F.scaled_dot_product_attention(t, k, v).flatten())(q + between).reshape(3, 2), 2
    ).item()
    assert found == pytest.approx(5 * math.sqrt(13) / 4 / math.sqrt(2), rel=1e-9)
    radius = between.norm().item() / math.sqrt(2) * 1.01
    given = with_perturbation(RMSTensor(RMSTensor.of(q).norm_size + radius, backing=q), radius)
    with norm_sensitivity("within"):
        y = F.scaled_dot_product_attention(given, *(with_perturbation(RMSTensor.of(t)) for t in (k, v)))
    bound = sensitivities(y, given).item() * math.sqrt(3 / 2)  # Euclidean at both ends
    assert found <= bound <= 1.001 * found


def test_a_single_key_is_all_that_is_seen():
    """The result is the value, whatever the query and the key are: its score does not move, for whichever of several reasons."""
    torch.manual_seed(seeded(0))
    tokens = [with_perturbation(RMSTensor.of(torch.randn(1, 1, 1, 4, dtype=torch.float64), (-3, -2, -1)), 0.1) for _ in range(3)]
    with norm_sensitivity("within"):
        y = F.scaled_dot_product_attention(*tokens)
        found = [sensitivities(y, t).item() for t in tokens]
    assert found == pytest.approx([0.0, 0.0, 1.0], abs=1e-9)


def test_normalizations_of_a_transformer_are_as_near_to_the_data_as_constants_from_there_say():
    torch.manual_seed(seeded(0))
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).double().eval()
    x, radius = torch.randn(1, 6, 16, dtype=torch.float64), 0.03
    with norm_sensitivity("within"):
        given = with_perturbation(RMSTensor(RMSTensor.of(x, (-2, -1)).norm_size + radius, backing=x, elem_dims=(-2, -1)), radius)
        bound = sensitivities(layer(given), given).item()
    steepest = torch.linalg.matrix_norm(torch.func.jacrev(layer)(x).reshape(96, 96), 2).item()
    for step in torch.randn(20, 1, 6, 16, dtype=torch.float64):
        step *= radius / step.square().mean().sqrt()
        assert (layer(x + step) - layer(x - step)).norm() <= bound * (2 * step).norm()
    assert steepest <= bound <= 10 * steepest  # hundreds of times as much where constants say how far results are from the data


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("least", [-80.0, -500.0, -1000.0])
def test_a_weight_that_is_next_to_nothing_may_become_all(dtype, least):
    p = torch.tensor([[0.0, least]], dtype=dtype).softmax(-1).clamp(min=max(1e-300, torch.finfo(dtype).tiny))
    for moved in (20.0, 300.0, 650.0, 2000.0):
        most, fewest = _ratios(p, torch.full_like(p, moved))
        after = (p.double().log() + torch.tensor([[-moved, moved]], dtype=torch.float64)).softmax(-1)
        assert ((p * most).clamp(max=1.0).double() >= after * (1 - 1e-6)).all()
        assert fewest[0, 0].double() * p[0, 0].double() <= after[0, 0] * (1 + 1e-6) + 1e-30
