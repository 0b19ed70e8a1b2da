"""Sizes are remembered for as long as the data is the same: whatever is done to a tensor, its size is that of a fresh copy."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import thunder_norm
from tests.seeds import seeded
from thunder_norm import RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core import measuring, remembered, spectral
from thunder_norm.core.measuring import operator_norm
from thunder_norm.core.remembered import Remembered, fingerprint_of
from thunder_norm.transforms import NormTransform
import thunder

DIMS = (-2, -1)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seeded(seed)))


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured since the test began; nothing is remembered from before."""
    shapes = []
    own = spectral.largest_singular_value

    def counting(matrices, start=None):
        shapes.append(tuple(matrices.shape))
        return own(matrices, start)

    monkeypatch.setattr(spectral, "largest_singular_value", counting)
    monkeypatch.setattr(measuring, "_measured", Remembered())
    return shapes


def test_what_is_the_same_is_measured_once(measured):
    w = torch.nn.Parameter(drawn(80, 100))
    first = operator_norm(w, DIMS)
    for same in (w, w.detach(), w.data, w.view(80, 100), w[:], w.detach().requires_grad_()):
        torch.testing.assert_close(operator_norm(same, DIMS), first, rtol=0, atol=0)
    torch.autograd.grad(first, w)
    assert len(measured) == 1


def test_what_is_asked_tells_entries_apart(measured):
    w = drawn(80, 100)
    assert operator_norm(w, (-2, -1)).item() == pytest.approx(operator_norm(w, (-1, -2)).item())
    assert operator_norm(w, (-2, -1), 2) < operator_norm(w, (-2, -1))
    assert operator_norm(w.view(100, 80), DIMS) != operator_norm(w, DIMS)
    assert operator_norm(w[:70], DIMS) < operator_norm(w, DIMS)
    assert len(measured) == 5


def _set_entry(w):
    w[3, 5] += 0.5


def _data_entry(w):
    w.data[3, 5] += 0.5


def _swap_two(w):
    w.data[[0, 1], [0, 1]] = w.data[[0, 1], [1, 0]]  # no sum of all entries changes


def _permute(w):
    w.data.copy_(w.data.flatten()[torch.randperm(w.numel())].view_as(w))


def _other_data(w):
    w.data = drawn(80, 100, seed=1).to(w.dtype)


def _through_view(w):
    w.detach()[10:20].mul_(2)


def _through_data_of_view(w):
    w.data.view(-1)[::7].clamp_(max=0.1)


def _through_numpy(w):
    (w.detach().view(torch.int16) if w.dtype is torch.bfloat16 else w.detach()).numpy()[4] = 1


def _optimizer(w):
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()


def _load(w):
    layer = torch.nn.Linear(100, 80, bias=False)
    layer.weight = w
    layer.load_state_dict({"weight": drawn(80, 100, seed=2)})


CHANGES = {
    "no_grad": lambda w: w.mul_(1.5),
    "an entry": _set_entry,
    "zero_": lambda w: w.zero_(),
    "data.mul_": lambda w: w.data.mul_(1.01),
    "data.clamp_": lambda w: w.data.clamp_(-1, 1),
    "data entry": _data_entry,
    "data one bit": lambda w: w.data[7].mul_(1 + torch.finfo(w.dtype).eps),
    "data swapped": _swap_two,
    "data permuted": _permute,
    "data constant": lambda w: w.data.add_(0.01),
    "data negated row": lambda w: w.data[0].neg_(),
    "data =": _other_data,
    "set_": lambda w: w.set_(drawn(80, 100, seed=3).to(w.dtype)),
    "view": _through_view,
    "view of data": _through_data_of_view,
    "numpy": _through_numpy,
    "optimizer": _optimizer,
    "load_state_dict": _load,
    "transposed in place": lambda w: w.data.t_(),
    "not finite": lambda w: w.data[3].fill_(float("nan")),
}


_KEEPING_THE_NORM = ("data negated row", "data one bit", "transposed in place")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_noticed(change, dtype, measured):
    w = torch.nn.Parameter(drawn(80, 100).to(dtype))
    before = operator_norm(w, DIMS).item()
    with torch.no_grad():
        CHANGES[change](w)
    fresh = operator_norm(w.detach().clone(), DIMS)
    # a change of one bit may be below what the fingerprint sees: then it is below what the norm's own dtype sees
    tolerance = 1e-7 if change == "data one bit" else 1e-10
    torch.testing.assert_close(operator_norm(w, DIMS).detach(), fresh, rtol=tolerance, atol=0, equal_nan=True)
    (gradient,) = torch.autograd.grad(operator_norm(w, DIMS), w)
    (expected,) = torch.autograd.grad(operator_norm(at := w.detach().clone().requires_grad_(), DIMS), at)
    torch.testing.assert_close(gradient, expected, equal_nan=True)
    assert change in _KEEPING_THE_NORM or fresh.item() != before


def test_tensors_without_a_version_counter(measured):
    with torch.inference_mode():
        w = drawn(80, 100)
        assert operator_norm(w, DIMS) == operator_norm(w, DIMS)
        assert len(measured) == 1
        w.mul_(2)
        torch.testing.assert_close(operator_norm(w, DIMS), operator_norm(w.clone(), DIMS))


def test_shared_storage_is_looked_at_where_each_view_is(measured):
    packed = drawn(160, 100)
    upper, lower = packed[:80], packed[80:]
    sizes = operator_norm(upper, DIMS), operator_norm(lower, DIMS)
    lower.data.mul_(2)
    assert operator_norm(upper, DIMS) == sizes[0]
    torch.testing.assert_close(operator_norm(lower, DIMS), 2 * sizes[1])


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "permuted"])
def test_any_layout_is_remembered_and_watched(layout, measured):
    base = drawn(6, 90, 200)
    t = {
        "transposed": base[0].mT,
        "strided": base[0][:, ::2],
        "expanded": base[0, :, :1].expand(90, 60),
        "permuted": base.permute(1, 2, 0)[..., 2:],
    }[layout]
    dims = (0, 1)
    first = operator_norm(t, dims)
    assert first.item() == pytest.approx(torch.linalg.matrix_norm(t.double(), 2, dims).amax().item(), rel=1e-9)
    assert operator_norm(t, dims) == first and len(measured) == 1
    base.data[2:, 5, 0] += 1
    base.data[0, 5, 0] += 1
    torch.testing.assert_close(operator_norm(t, dims), operator_norm(t.contiguous(), dims))


def test_every_single_entry_counts():
    w = drawn(33, 70)
    known = fingerprint_of(w)
    for i in range(w.numel()):
        changed = w.clone()
        changed.view(-1)[i] += 1e-4
        assert not torch.equal(fingerprint_of(changed), known)
    assert torch.equal(fingerprint_of(w.clone()), known)


def test_changes_that_plain_sums_do_not_see():
    w = torch.ones(64, 64)
    known = fingerprint_of(w)
    for change in (torch.roll(drawn(64, 64), 1, 0), torch.eye(64) - torch.roll(torch.eye(64), 1, 0)):
        balanced = change - change.mean(0)
        assert not torch.equal(fingerprint_of(w + balanced), known)
        assert not torch.equal(fingerprint_of(w + balanced.roll(7, 0)), fingerprint_of(w + balanced))


def test_the_vector_from_before_is_where_the_next_search_starts(measured, monkeypatch):
    starts = []
    own = spectral._lanczos

    def noting(gram, start):
        starts.append(start)
        return own(gram, start)

    monkeypatch.setattr(spectral, "_lanczos", noting)
    w = drawn(80, 100)
    operator_norm(w, DIMS)
    w += 1e-4
    operator_norm(w, DIMS)
    assert starts[0] is None and starts[1] is not None


def test_entries_go_with_their_tensors(measured):
    table = measuring._measured
    kept = drawn(80, 100)
    operator_norm(kept, DIMS)
    w = drawn(80, 100, seed=1)
    operator_norm(w, DIMS)
    assert len(table) == 2
    del w
    assert len(table) == 1
    for i in range(300):  # without anybody asking for its length
        operator_norm(drawn(64, 64, seed=i).mul_(1.0), DIMS)
    assert len(table._entries) <= 70


def test_views_of_ever_other_shapes_do_not_pile_up(measured, monkeypatch):
    monkeypatch.setattr(remembered, "_MOST", 70)
    w = drawn(64, 400)
    for i in range(64, 300):
        operator_norm(w[:, :i], DIMS)
    assert len(measuring._measured._entries) <= 2 * 70


def test_no_tensor_is_kept_alive(measured):
    gc.collect()
    gc.disable()
    try:
        w = torch.nn.Parameter(drawn(80, 100))
        storage = remembered.StorageWeakRef(w.untyped_storage())
        operator_norm(w, DIMS).backward()
        del w
        assert storage.expired()
    finally:
        gc.enable()


def test_threads(measured):
    tensors = [drawn(70, 80, seed=i) for i in range(8)]
    expected = [operator_norm(t.clone(), DIMS).item() for t in tensors]
    found: dict[tuple[int, int], float] = {}

    def run(k: int) -> None:
        for i, t in enumerate(tensors):
            found[k, i] = operator_norm(t, DIMS).item()

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(size == pytest.approx(expected[i], rel=1e-12) for (_, i), size in found.items()) and len(found) == 32


# -- programs ---------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 80, 3, padding=1, groups=2)
        self.first = torch.nn.Linear(80, 100)
        self.second = torch.nn.Linear(100, 80, bias=False)
        self.third = torch.nn.Linear(100, 80, bias=False)
        self.third.weight = self.second.weight

    def forward(self, x):
        h = self.first(self.conv(x).movedim(1, -1)).relu()
        return self.second(h) + self.third(h)


LARGE = 2  # the parameters that are large enough: the convolution's kernel is small


def _net(dtype: torch.dtype = torch.float32) -> tuple[Net, torch.Tensor]:
    return Net().to(dtype), drawn(2, 8, 4, 4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_call_of_a_program_measures_what_changed(dtype, measured):
    net, x = _net(dtype)
    jm = thunder.jit(net, transforms=[NormTransform()])
    normed = RMSTensor.of(x, elem_dims=(1,))
    first = jm(normed).norm_size.item()
    assert len(measured) == LARGE
    assert jm(normed).norm_size.item() == first
    assert len(measured) == LARGE
    net.first.weight.data.clamp_(-0.01, 0.01)
    second = jm(normed).norm_size.item()
    assert len(measured) == LARGE + 1
    with torch.no_grad():
        net.second.weight.mul_(2)
    third = jm(normed).norm_size.item()
    assert len(measured) == LARGE + 2
    measuring._measured = Remembered()
    assert jm(normed).norm_size.item() == pytest.approx(third, rel=1e-9)
    assert len({first, second, third}) == 3 and thunder.cache_misses(jm) == 1


def test_the_gradient_of_a_program_measures_nothing_again(measured):
    net, x = _net()
    jm = thunder.jit(net, transforms=[NormTransform()])
    normed = RMSTensor.of(x, elem_dims=(1,))
    for _ in range(2):
        size = jm(normed).norm_size
        got = torch.autograd.grad(size, list(net.parameters()))
        assert len(measured) == LARGE
    want = torch.autograd.grad(net(normed).norm_size, list(net.parameters()))
    assert len(measured) == LARGE
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert any(b.sym.name.endswith("operator_norm") for b in thunder.last_traces(jm)[-1].bound_symbols)


def test_training_measures_in_every_step_what_the_optimizer_changed(measured):
    net, x = _net()
    jm = thunder.jit(net, transforms=[NormTransform()])
    normed = RMSTensor.of(x, elem_dims=(1,))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(3):
        size = jm(normed).norm_size
        assert len(measured) == LARGE * (step + 1)
        with torch.no_grad():
            weight = RMSToRMSTensor.of(net.first.weight.clone()).norm_size
            assert RMSToRMSTensor.of(net.first.weight).norm_size.item() == pytest.approx(weight.item(), rel=1e-12)
        del measured[LARGE * (step + 1) :]
        optimizer.zero_grad()
        size.backward()
        optimizer.step()


def test_a_report_measures_each_parameter_once_and_the_next_one_none(measured):
    net, x = _net()
    jm = thunder.jit(net, transforms=[NormTransform()])
    normed = RMSTensor.of(x, elem_dims=(1,))
    reports = [thunder_norm.norm_report(jm, normed) for _ in range(2)]
    assert len(measured) == LARGE
    for report in reports:
        row = report.parameters["first.weight"]
        assert row.norm_size == row.actual == RMSToRMSTensor.of(net.first.weight).norm_size.item()
    jm(normed)
    assert len(measured) == LARGE  # nor the compiled program


def test_kinds_measure_what_they_say(measured):
    w = drawn(80, 60, 3, 3)
    grouped = RMSToRMSConvTensor.grouped(2)
    blocks = w.double().view(2, 40, 60, 9).movedim(-1, 1)
    want = 9 * torch.linalg.matrix_norm(blocks, 2).amax() * (60 / 40) ** 0.5
    for _ in range(2):
        assert grouped.of(w).norm_size.item() == pytest.approx(want.item(), rel=1e-9)
    assert len(measured) == 1
