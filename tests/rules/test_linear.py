"""Matrix products: every bound holds against adversarial inputs, and is attained where it says so."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.seeds import seeded
from thunder_norm import rules  # noqa: F401
from thunder_norm.audit import Ball, Case, check
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.errors import MissingNormRuleError, NormMismatchError
from thunder_norm.rules.linear_algebra.grouped import grouped_mm

R, INF, L1, OP = RMSTensor, LinfTensor, L1Tensor, RMSToRMSTensor


def x(*shape, n=1.0, dims=None, kind=R, name="x"):
    return Ball(name, kind, shape, n, dims)


def w(*shape, n=0.7, dims=None, kind=OP):
    return Ball("w", kind, shape, n, dims)


def b(*shape, n=0.3, dims=None, kind=R):
    return Ball("b", kind, shape, n, dims)


ROWS = (-1, -2)  # W in x @ W acts from dimension -2 to dimension -1


@normed_op
def grouped(input, mat2):
    """torch's kernel takes no doubles: the same by hand, with the same rule."""
    return torch.cat([input[:2] @ mat2[0], input[2:] @ mat2[1]])


@grouped.register_norm
def _grouped(input: RMSTensor, mat2: RMSToRMSTensor) -> RMSTensor:
    return grouped_mm(input, mat2)


CASES = [
    Case("linear", F.linear, (x(3, 5, n=1.7), w(4, 5), b(4))),
    Case("linear, also a mean over tokens", F.linear, (x(2, 3, 5, dims=(-2, -1)), w(4, 5), b(4))),
    Case("linear, mean over batches", F.linear, (x(2, 3, 5, dims=(-3, -1)), w(4, 5))),
    Case("linear, largest entries", F.linear, (x(3, 5, kind=INF), w(4, 5), b(4, kind=INF))),
    Case("linear, transposed operator", F.linear, (x(3, 5), w(4, 5, dims=ROWS))),
    Case("linear, to one number", F.linear, (x(3, 5), w(1, 5))),
    Case("linear, rows of the weight", F.linear, (x(3, 5, n=1.7), w(4, 5, kind=R))),
    Case("linear, rows of the weight and bias", F.linear, (x(3, 5), w(4, 5, kind=R), b(4))),
    Case("linear, columns of the weight", F.linear, (x(3, 5), w(4, 5, kind=R, dims=(-2,))), options={"restarts": 16}),
    Case("linear, l1 rows", F.linear, (x(3, 5, kind=INF), w(4, 5, kind=L1), b(4, kind=INF))),
    Case("linear, probabilities", F.linear, (x(3, 5, kind=L1), w(4, 5))),
    Case("linear, lengths of rows", F.linear, (x(3, 5, kind=L2Tensor, n=1.7), w(4, 5), b(4))),
    Case("x @ W, lengths of rows", torch.matmul, (x(2, 3, 5, kind=L2Tensor), w(5, 4, dims=ROWS))),
    Case("W @ x, lengths of columns", torch.matmul, (w(4, 5), x(2, 5, 3, dims=(-2,), kind=L2Tensor))),
    Case("addmm, lengths of rows", torch.addmm, (b(3, 4), x(3, 5, kind=L2Tensor), w(5, 4, dims=ROWS))),
    Case("x @ W", torch.matmul, (x(2, 3, 5), w(5, 4, dims=ROWS))),
    Case("x @ W read the other way round", torch.matmul, (x(2, 3, 5), w(5, 4))),
    Case("W @ x", torch.matmul, (w(4, 5), x(2, 5, 3, dims=(-2,)))),
    Case("W @ x, largest entries", torch.mm, (w(4, 5), x(5, 3, kind=INF))),
    Case("W2 @ W1", torch.matmul, (w(3, 5), w(5, 4))),
    Case("W1 @ W2, both transposed", torch.matmul, (w(3, 5, dims=ROWS), w(5, 4, dims=ROWS))),
    Case("W2 @ W1, one transposed", torch.matmul, (w(3, 5, dims=ROWS), w(5, 4))),
    Case("W @ v", torch.mv, (w(4, 5), x(5))),
    Case("v @ W", torch.matmul, (x(5), w(5, 4, dims=ROWS))),
    Case("rows times v", torch.mv, (x(4, 5), x(5, name="y"))),
    Case("dot", torch.dot, (x(5), x(5, name="y", n=2.0))),
    Case("inner", torch.inner, (x(3, 5), x(2, 5, name="y"))),
    Case("outer", torch.outer, (x(3), x(5, name="y"))),
    Case("scores", torch.matmul, (x(2, 3, 5), x(2, 5, 4, dims=(-2,), name="y"))),
    Case("rows times rows", torch.bmm, (x(2, 3, 5), x(2, 5, 4, name="y"))),
    Case("columns times columns", torch.bmm, (x(2, 3, 5, dims=(-2,)), x(2, 5, 4, dims=(-2,), name="y"))),
    Case("columns times rows", torch.bmm, (x(2, 3, 5, dims=(-2,)), x(2, 5, 4, name="y"))),
    Case("Frobenius", torch.bmm, (x(2, 3, 5, dims=(-2, -1)), x(2, 5, 4, dims=(-2, -1), name="y"))),
    Case("largest entries", torch.bmm, (x(2, 3, 5, kind=INF), x(2, 5, 4, kind=INF, name="y"))),
    Case("l2 rows and columns", torch.bmm, (x(2, 3, 5, kind=L2Tensor), x(2, 5, 4, kind=L2Tensor, dims=(-2,), name="y"))),
    Case("scores, means over heads", torch.bmm, (x(2, 3, 5, dims=(-3, -1)), x(2, 5, 4, dims=(-3, -2), name="y")), tight=0.9),
    Case("probabilities times rows", torch.bmm, (x(2, 3, 5, kind=L1), x(2, 5, 4, name="y"))),
    Case("probabilities times largest entries", torch.bmm, (x(2, 3, 5, kind=L1), x(2, 5, 4, kind=INF, name="y"))),
    Case("probabilities, values mean over tokens", torch.bmm, (x(2, 3, 5, kind=L1), x(2, 5, 4, dims=(-2, -1), name="y"))),
    Case("probabilities, values mean over heads", torch.bmm, (x(2, 3, 5, kind=L1), x(2, 5, 4, dims=(-3, -1), name="y"))),
    Case("more heads than tokens", torch.bmm, (x(3, 3, 2, kind=L1), x(3, 2, 2, dims=(-3, -1), name="y")), tight=0.95),
    Case("l1 columns", torch.bmm, (x(2, 3, 5, kind=INF), x(2, 5, 4, kind=L1, dims=(-2,), name="y"))),
    Case("stochastic matrices", torch.bmm, (x(2, 3, 5, kind=L1), x(2, 5, 4, kind=L1, name="y"))),
    Case("addmm as in GPT-2", lambda c, a, m: torch.addmm(c, a, m, beta=-0.5, alpha=2.0), (b(4), x(3, 5), w(5, 4, dims=ROWS))),
    Case("addmm, weight first", torch.addmm, (b(4, 3, dims=(-2,)), w(4, 5), x(5, 3, dims=(-2,)))),
    Case("addmm of activations", torch.addmm, (b(4, kind=INF), x(3, 5), x(5, 4, dims=(-2,), name="y"))),
    Case("addmv", torch.addmv, (b(4), w(4, 5), x(5)), tight=0.98),
    Case("baddbmm", torch.baddbmm, (b(2, 3, 4), x(2, 3, 5), x(2, 5, 4, name="y"))),
    Case("baddbmm, weights", torch.baddbmm, (b(2, 3, 4), x(2, 3, 5), w(2, 5, 4, dims=ROWS))),
    Case("einsum scores", lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k), (x(2, 3, 2, 4), x(2, 3, 2, 4, name="y"))),
    Case("einsum weight", lambda a, m: torch.einsum("bti,oi->bto", a, m), (x(2, 3, 5), w(4, 5))),
    Case("einsum weight first", lambda m, a: torch.einsum("oi,bti->bto", m, a), (w(4, 5), x(2, 3, 5))),
    Case("einsum heads", lambda a, m: torch.einsum("...i,hio->...ho", a, m), (x(2, 3, 5), w(2, 5, 4, dims=ROWS))),
    Case("einsum, a sum in one input", lambda a, b: torch.einsum("ai,ij->j", a, b), (x(3, 4), x(4, 2, name="y"))),
    Case("einsum, a sum over the norm's dims", lambda a, b: torch.einsum("ia,ij->j", a, b), (x(4, 3), x(4, 2, name="y")), 0.0),
    Case("einsum, a sum in each", lambda a, b: torch.einsum("ai,ijc->j", a, b), (x(2, 3), x(3, 2, 2, name="y")), 0.0),
    Case("einsum, a sum in a weight", lambda a, m: torch.einsum("bic,nijdc->bijd", a, m), (x(2, 2, 3), w(2, 2, 1, 3, 3))),
    Case("einsum, a sum of weights", lambda a, m: torch.einsum("bc,ndc->bd", a, m), (x(2, 3), w(2, 4, 3))),
    Case("grouped, rows", grouped, (x(5, 3), w(2, 3, 4, dims=ROWS))),
    Case("grouped, all tokens", grouped, (x(5, 3, dims=(-2, -1)), w(2, 3, 4, dims=ROWS)), 0.9),
    Case("einsum of one", lambda a: torch.einsum("abc->ca", a), (x(2, 3, 5),)),
    Case("bilinear", F.bilinear, (x(2, 3), x(2, 5, name="y"), w(4, 3, 5), b(4, kind=INF)), tight=0.98),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_bound_holds_and_is_attained(case):
    case.check(seeded())


@pytest.mark.parametrize("size", [0.0, 2.0])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_claims_are_differentiable(case, size):
    case.check_at(size, seeded())


DIMS = [(-1,), (-2,), (-2, -1), (-3, -1), (-3, -2)]


@pytest.mark.parametrize("right", DIMS, ids=str)
@pytest.mark.parametrize("left", DIMS, ids=str)
def test_product_of_activations_is_sound_over_any_dims(left, right):
    balls = (x(2, 3, 4, dims=left), x(2, 4, 2, dims=right, name="y"))
    check(torch.bmm, balls, restarts=2, steps=10, tight=0.4, seed=seeded())


def plain_weight_calls():
    weight = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(1)))
    norm = torch.linalg.matrix_norm(weight, 2).item() * math.sqrt(5 / 4)
    rows = x(3, 5)
    yield "linear", lambda a: F.linear(a, weight), rows, norm
    yield "nn.Linear's decomposition", lambda a: torch.ops.aten.addmm(weight.new_zeros(4), a, weight.t()), rows, norm
    yield "x @ W", lambda a: a @ weight.t(), rows, norm
    yield "addmm", lambda a: torch.addmm(weight.new_zeros(4), a, weight.t()), rows, norm
    yield "W @ x", lambda a: weight @ a, x(5, 3, dims=(-2,)), norm
    yield "einsum", lambda a: torch.einsum("ti,oi->to", a, weight), rows, norm
    yield "einsum from the left", lambda a: torch.einsum("oi,ti->to", weight, a), rows, norm
    yield "mv", lambda a: torch.mv(weight, a), x(5), norm


PLAIN = list(plain_weight_calls())


@pytest.mark.parametrize("name, call, ball, norm", PLAIN, ids=[p[0] for p in PLAIN])
def test_plain_weight_is_an_operator(name, call, ball, norm):
    out = call(ball.normed(torch.randn(ball.shape, dtype=torch.float64)))
    assert out.norm_size.item() == pytest.approx(norm)
    check(call, [ball], tight=0.95, seed=seeded())


VECTOR = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(2)))
HEADS = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seeded(3)))
NO_OPERATORS = [
    ("matmul with a vector", lambda a: a @ VECTOR, x(3, 5)),
    ("vector first", lambda a: torch.matmul(VECTOR, a), x(5, 3, dims=(-2,))),
    ("mv", lambda a: torch.mv(a, VECTOR), x(3, 5)),
    ("dot", lambda a: torch.dot(VECTOR, a), x(5)),
    ("einsum with a vector", lambda a: torch.einsum("ti,i->t", a, VECTOR), x(3, 5)),
    ("einsum over two dimensions", lambda a: torch.einsum("thi,hio->to", a, HEADS), x(3, 2, 3, dims=(-2, -1))),
]


@pytest.mark.parametrize("name, call, ball", NO_OPERATORS, ids=[n[0] for n in NO_OPERATORS])
def test_plain_tensor_that_is_no_operator_is_measured_by_its_entries(name, call, ball):
    check(call, [ball], tight=0.3, seed=seeded())


def test_einsum_takes_the_largest_of_several_heads():
    weight = torch.randn(2, 5, 4, dtype=torch.float64)
    out = torch.einsum("ti,hio->tho", RMSTensor(1.0, backing=torch.randn(3, 5, dtype=torch.float64)), weight)
    expected = torch.linalg.matrix_norm(weight, 2).amax() * math.sqrt(5 / 4)
    assert out.norm_size.item() == pytest.approx(expected.item())
    assert out.elem_dims == (-1,)


def test_shared_embedding_as_head_keeps_largest_logit():
    table = RMSTensor(1.0, backing=torch.randn(7, 4))
    logits = F.linear(RMSTensor(1.0, backing=torch.randn(2, 4)), table)
    assert type(logits) is LinfTensor
    assert logits.norm_size.item() == 4.0


REFUSED = [
    ("diagonal", lambda: torch.einsum("ii,ij->j", OP(1.0, backing=torch.ones(3, 3)), R(1.0, backing=torch.ones(3, 2)))),
    (
        "operator over batches",
        lambda: torch.bmm(R(1.0, backing=torch.ones(2, 3, 3)), OP(1.0, backing=torch.ones(2, 3, 3), elem_dims=(0, 1))),
    ),
    ("one input", lambda: torch.einsum("ii->i", R(1.0, backing=torch.ones(3, 3)))),
]


@pytest.mark.parametrize("name, call", REFUSED, ids=[r[0] for r in REFUSED])
def test_what_has_no_bound_is_refused(name, call):
    with pytest.raises((NormMismatchError, MissingNormRuleError)):
        call()


def test_rules_are_found_by_name():
    for op in (F.linear, torch.addmm, torch.bmm, torch.einsum, F.bilinear):
        assert normed_op(op).rules


def test_grouped_product_of_torch_and_of_transformers():
    """Both find the rule, and a model's experts are operators."""
    pytest.importorskip("transformers.integrations.moe")
    a, m = torch.randn(6, 4), torch.randn(2, 4, 4)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    given = R(0.7, backing=a), OP(0.5, backing=m, elem_dims=ROWS)
    for op in (torch._grouped_mm, torch.ops.transformers.grouped_mm_fallback):
        y = op(*given, offsets)
        torch.testing.assert_close(y.backing, torch.cat([a[:2] @ m[0], a[2:] @ m[1]]))
        assert (type(y), y.elem_dims, y.norm_size.item()) == (R, (-1,), pytest.approx(0.35))
    with pytest.raises(NormMismatchError, match="grouped product"):
        grouped(R(1.0, backing=torch.randn(1, 4, 4)), given[1])
