"""Norms per token and per head in a report, to those that the results of eager PyTorch have."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.seeds import seeded
from thunder_norm import L2Tensor, LinfTensor, RMSTensor, RMSToRMSTensor, build_norm_map, load_norm_report, norm_report
from thunder_norm.errors import NormMismatchError
from thunder_norm.transforms import NormTransform
import thunder


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.heads(q, k, v).transpose(1, 2).flatten(2))

    def heads(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def rms(t):
    return t.double().square().mean(-1).sqrt()


@pytest.fixture(scope="module")
def attention():
    torch.manual_seed(seeded(0))
    model, found = Attention(), {}
    heads = model.heads
    model.heads = lambda *args: found.setdefault("heads", heads(*args))
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        found["out"] = model(x)
    model.heads = heads
    return model, x, found


@pytest.mark.parametrize("per", [-3, -2, 2, 0, -1])
def test_heads_and_tokens(attention, per):
    model, x, found = attention
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), x, per=per)
    row = next(r for r in report if r.op == "scaled_dot_product_attention")
    dims = {d % 4 for d in row.elem_dims}
    squares = found["heads"].double().square().mean(tuple(dims - {per % 4}), keepdim=True).sqrt()
    expected = squares.amax([d for d in range(4) if d != per % 4])
    assert row.parts == pytest.approx(expected.tolist(), rel=1e-5)
    if per % 4 not in dims:
        assert max(row.parts) == pytest.approx(row.actual, rel=1e-6)


def test_what_has_no_such_dimension_has_no_parts(attention):
    model, x, found = attention
    jitted = thunder.jit(model, transforms=[NormTransform()])
    by_feature = norm_report(jitted, x, per=-1)
    assert all(row.parts is None for row in by_feature if row.elem_dims == (-1,))
    by_head = norm_report(jitted, x, per=3)
    assert next(r for r in by_head if r.op == "linear").parts is None
    last = norm_report(jitted, x, per=1).rows[-1]
    assert last.parts == pytest.approx(rms(found["out"]).amax(0).tolist(), rel=1e-5)
    assert all(row.parts is None for row in norm_report(jitted, x))


@pytest.mark.parametrize("per", [-5, 4, 1.5, "token", True])
def test_a_dimension_that_no_result_has_is_refused(attention, per):
    model, x, _ = attention
    with pytest.raises(NormMismatchError, match="per"):
        norm_report(thunder.jit(model, transforms=[NormTransform()]), x, per=per)


def twice(x):
    return x * 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (L2Tensor, lambda t: t.square().sum(-1).sqrt().amax((0, 2))),
        (LinfTensor, lambda t: t.abs().amax((0, 2, 3))),
        (RMSToRMSTensor, lambda t: torch.linalg.matrix_norm(t, 2).amax(0) * (5 / 4) ** 0.5),
        (lambda t: RMSTensor.of(t, (0, 3)), lambda t: t.square().mean((0, 3)).sqrt().amax(1)),
    ],
    ids=["L2", "Linf", "operators", "over two dimensions"],
)
def test_every_kind_has_its_own(given, expected):
    t = torch.linspace(-1, 2, 2 * 3 * 4 * 5).sin().reshape(2, 3, 4, 5)
    normed = given(t) if not isinstance(given, type) else given.of(t)
    (row,) = norm_report(thunder.jit(twice, transforms=[NormTransform()]), normed, per=1)
    assert row.parts == pytest.approx((2 * expected(t)).tolist(), rel=1e-5)


def test_they_are_in_tables_and_files(attention, tmp_path):
    pandas = pytest.importorskip("pandas")
    model, x, _ = attention
    report = norm_report(thunder.jit(model, transforms=[NormTransform()]), x, per=-2)
    frame = report.to_dataframe()
    assert [None if v is None or v is pandas.NA else tuple(v) for v in frame["parts"]] == [row.parts for row in report]
    report.save(tmp_path / "report")
    assert [row.parts for row in load_norm_report(tmp_path / "report")] == [row.parts for row in report]


def test_without_data_there_are_none(attention):
    model, x, _ = attention
    jitted = thunder.jit(model, transforms=[NormTransform()])
    with pytest.raises(NormMismatchError, match="per is about data"):
        norm_report(jitted, x.to("meta"), per=-2)
    with pytest.raises(NormMismatchError, match="per is about data"):
        norm_report(build_norm_map(model, x), RMSTensor.of(x), per=-2)
