"""The numbers of a training monitor, against torch's decompositions in float64 and definitions written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.modular import monitored
from tests.seeds import seeded
from thunder_norm import RMSTensor
from thunder_norm.core.spectral import smallest_singular_value
from thunder_norm.errors import MissingBoundsWarning, NormMismatchError
from thunder_norm.modular import TrainingMonitor


def _matrices(p: torch.Tensor, groups: int) -> torch.Tensor:
    """[number, out, in] of a weight of a linear layer or a convolution."""
    p = p.detach().double()
    if p.ndim == 2:
        return p[None]
    taps = p.flatten(2).permute(2, 0, 1)
    return taps.unflatten(1, (groups, p.shape[0] // groups)).flatten(0, 1)


def _operator_norm(p: torch.Tensor, groups: int = 1) -> float:
    matrices = _matrices(p, groups)
    taps = math.prod(p.shape[2:])
    return taps * torch.linalg.svdvals(matrices).max().item() * math.sqrt(matrices.shape[2] / matrices.shape[1])


def _dual(g: torch.Tensor, groups: int = 1) -> float:
    """The dual of the operator norm: a largest tap is a maximum, so its dual is a sum over taps."""
    matrices = _matrices(g, groups)
    taps = math.prod(g.shape[2:])
    return torch.linalg.svdvals(matrices).sum().item() * math.sqrt(matrices.shape[1] / matrices.shape[2]) / taps


def _largest_row(t: torch.Tensor) -> float:
    return t.detach().double().square().mean(-1).sqrt().amax().item()


def _rows_dual(g: torch.Tensor) -> float:
    """Of the largest RMS of a row: the sum of their lengths times sqrt(row)."""
    return (torch.linalg.vector_norm(g.double(), dim=-1) * math.sqrt(g.shape[-1])).sum().item()


def _step(model: nn.Module, batch: torch.Tensor, loss, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    optimizer.zero_grad()
    loss(model, batch).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_wide_layers_have_their_dual_norms_exactly(dtype):
    """Of half as many samples as rows: half of the singular values are 0, or rounding."""
    torch.manual_seed(seeded(0))
    model = nn.Sequential(nn.Linear(100, 130), nn.ReLU(), nn.Unflatten(1, (1, 130)), nn.Conv1d(1, 80, 70, stride=10)).to(dtype)
    model.append(nn.Conv1d(80, 90, 3)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(33, 100, dtype=dtype)
    monitor = TrainingMonitor(model, every=1, optimizer=optimizer, activations=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = _step(model, batch, monitored.square_loss, optimizer)
    for name in ("0.weight", "4.weight"):
        found = monitor.latest["parameters"][name]
        assert found["gradient"] == pytest.approx(_dual(gradients[name]), rel=1e-5)
        values = torch.linalg.svdvals(_matrices(before[name], 1))
        assert (found["sigma_max"], found["sigma_min"]) == pytest.approx((values.max().item(), values.min().item()), rel=1e-5)
        assert found["norm"] == pytest.approx(_operator_norm(before[name]), rel=1e-6)
        assert found["update"] == pytest.approx(
            _operator_norm(dict(model.named_parameters())[name].float() - before[name].float()), rel=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [monitored.language_model, monitored.convolutional, monitored.perceptron])
def test_norms_updates_and_gradients_of_operators_and_rows(make, dtype: torch.dtype):
    torch.manual_seed(seeded(0))
    model, batch, loss = make()
    model = model.to(dtype)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer, activations=False)
    before = copy.deepcopy(model)
    gradients = _step(model, batch, loss, optimizer)
    found = monitor.latest["parameters"]
    assert set(found) == set(gradients)
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        groups = 2 if make is monitored.convolutional and name == "2.weight" else 1
        is_operator = old.ndim > 1 and not name.startswith(("emb", "pos"))
        is_gain = name.endswith(("ln1.weight", "ln2.weight", "ln.weight")) or (
            make is monitored.perceptron and name == "1.weight"
        )
        norm, dual = (_operator_norm, _dual) if is_operator else (_largest_row, _rows_dual)
        if is_gain:
            norm, dual = (lambda t: t.abs().amax().item()), (lambda g: g.double().abs().sum().item())
        options = {"groups": groups} if is_operator else {}
        moved = new.detach().double() - old.detach().double()
        assert found[name]["norm"] == pytest.approx(norm(old, **options), rel=1e-5), name
        assert found[name]["update"] == pytest.approx(norm(moved, **options), rel=1e-4), name
        if found[name]["norm"]:
            assert found[name]["ratio"] * found[name]["norm"] == pytest.approx(found[name]["update"]), name
        else:
            assert "ratio" not in found[name], name
        exact = dual(gradients[name], **options)
        assert 0.99 * exact <= found[name]["gradient"] <= exact * (1 + 1e-5), name
        if is_operator:
            values = torch.linalg.svdvals(_matrices(old, groups))
            assert found[name]["sigma_max"] == pytest.approx(values.max().item(), rel=1e-6)
            assert found[name]["sigma_min"] == pytest.approx(values.min().item(), rel=1e-5, abs=1e-7 * values.max().item())
            rank = old.detach().double().square().sum().item() / values.max().item() ** 2 / len(values)
            assert found[name]["stable_rank"] == pytest.approx(rank, rel=1e-5)
        else:
            assert "stable_rank" not in found[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 100, 100), (2, 80, 300), (1, 300, 80), (1, 200, 200), (3, 5, 7)])
@pytest.mark.parametrize("spectrum", ["gaussian", "graded", "low rank", "zero", "clustered"])
def test_smallest_singular_values(shape: tuple[int, int, int], spectrum: str, dtype: torch.dtype):
    torch.manual_seed(seeded(1))
    t = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(t, full_matrices=False)
    count = s.shape[-1]
    spectra = {
        "gaussian": s,
        "graded": torch.logspace(0, -6, count, dtype=torch.float64).expand_as(s),
        "low rank": torch.where(torch.arange(count) < count // 2, 1.0, 0.0).double().expand_as(s),
        "zero": torch.zeros_like(s),
        "clustered": torch.full_like(s, 0.3).index_fill(-1, torch.tensor([0]), 2.0),
    }
    t = (u * spectra[spectrum].unsqueeze(-2) @ vh).to(dtype)
    exact = torch.linalg.svdvals(t.double())
    assert smallest_singular_value(t) == pytest.approx(exact.min().item(), rel=1e-4, abs=3e-8 * exact.max().item() + 1e-30)


def _keeping(returned: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    return lambda module, args, y: returned.__setitem__(name, y.detach())


def test_activations_are_the_largest_of_the_batch_and_below_their_bounds():
    torch.manual_seed(seeded(2))
    model, batch, loss = monitored.language_model(depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    for _ in range(3):
        returned: dict[str, torch.Tensor] = {}
        handles = [m.register_forward_hook(_keeping(returned, name or "(model)")) for name, m in model.named_modules()]
        _step(model, batch, loss, optimizer)
        for handle in handles:
            handle.remove()
        found = monitor.latest["activations"]
        assert set(found) == set(returned) and not monitor.latest["notes"]
        for name, y in returned.items():
            assert found[name]["norm"] == pytest.approx(_largest_row(y), rel=1e-6)
            assert found[name]["norm"] <= found[name]["bound"] * (1 + 1e-5)
            assert found[name]["tightness"] == pytest.approx(found[name]["norm"] / found[name]["bound"])
    assert monitor.latest["activations"]["emb"]["tightness"] > 0.5


def test_bounds_follow_parameters_and_inputs():
    torch.manual_seed(seeded(3))
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, torch.randn(4, 6), every=1, optimizer=optimizer)
    for scale in (1.0, 5.0):
        with torch.no_grad():
            model[0].weight.mul_(scale)
        batch = scale * torch.randn(4, 6)
        bound = _largest_row(batch) * _operator_norm(model[0].weight)
        total = bound * _operator_norm(model[1].weight)
        _step(model, batch, monitored.square_loss, optimizer)
        assert monitor.latest["activations"]["0"]["bound"] == pytest.approx(bound, rel=1e-5)
        assert monitor.latest["activations"]["(model)"]["bound"] == pytest.approx(total, rel=1e-5)


def test_batches_of_other_shapes_have_no_bounds_and_a_note():
    model, batch, loss = monitored.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    _step(model, torch.randn(5, 6), loss, optimizer)
    assert "bound" not in monitor.latest["activations"]["0"]
    assert "shape [8, 6]" in monitor.latest["notes"][0]
    _step(model, batch, loss, optimizer)
    assert "bound" in monitor.latest["activations"]["0"]


def test_training_mode_is_that_of_the_forward():
    torch.manual_seed(seeded(4))
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = TrainingMonitor(model, torch.randn(4, 6), every=1, optimizer=optimizer)
    bounds = []
    for is_training in (True, False):
        _step(model.train(is_training), torch.ones(4, 6), monitored.square_loss, optimizer)
        bounds.append(monitor.latest["activations"]["1"]["bound"])
    assert bounds[0] == pytest.approx(2 * bounds[1])  # entries that dropout leaves are doubled


def test_a_record_takes_the_largest_of_accumulated_forwards():
    model, batch, loss = monitored.perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer, bounds=False)
    batches = [batch, 3 * batch, 2 * batch]
    largest = max(_largest_row(model[0](b)) for b in batches)
    for b in batches:
        loss(model, b).backward()
    with torch.no_grad():
        model(100 * batch)  # evaluation is not training
    gradient = model[4].weight.grad.clone()
    optimizer.step()
    assert monitor.latest["activations"]["0"]["norm"] == pytest.approx(largest, rel=1e-6)
    assert monitor.latest["parameters"]["4.weight"]["gradient"] == pytest.approx(_dual(gradient), rel=0.01)


def test_what_has_no_rule_is_monitored_without_bounds():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return torch.nuclear_norm(self.inner(self.table(i)))

    model, batch = Odd(), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(MissingBoundsWarning, match="nuclear_norm"):
        monitor = TrainingMonitor(model, batch, every=1, optimizer=optimizer)
    before = copy.deepcopy(model)
    _step(model, batch, monitored.square_loss, optimizer)
    found = monitor.latest
    assert found["parameters"]["table.weight"]["norm"] == pytest.approx(_largest_row(before.table.weight), rel=1e-6)
    assert found["parameters"]["inner.weight"]["norm"] == pytest.approx(_operator_norm(before.inner.weight), rel=1e-5)
    assert "bound" not in found["activations"]["inner"] and found["activations"]["inner"]["norm"] > 0


def test_several_arguments_by_name_and_normed():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, *, y: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {"sum": scale * (self.a(x) + self.b(y)), "first": x}

    torch.manual_seed(seeded(5))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for example in (
        {"x": x, "y": y, "scale": 2.0},
        {"y": RMSTensor(1.0, backing=y), "x": RMSTensor(1.0, backing=x), "scale": 2.0},
    ):
        model = Sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = TrainingMonitor(model, example, every=1, optimizer=optimizer)
        bound = 2 * (_largest_row(x) * _operator_norm(model.a.weight) + _largest_row(y) * _operator_norm(model.b.weight))
        model(scale=2.0, y=y, x=x)["sum"].sum().backward()
        optimizer.step()
        assert monitor.latest["activations"]["(model)[0]"]["bound"] == pytest.approx(bound, rel=1e-5)
        model(scale=3.0, y=y, x=x)["sum"].sum().backward()
        optimizer.step()
        assert "bound" not in monitor.latest["activations"]["(model)[0]"] and "3.0" in monitor.latest["notes"][0]


def test_complex_and_scalar_parameters_and_empty_ones():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.phase = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * (x.to(torch.complex64) @ self.phase.mH).abs() + self.empty.sum()

    torch.manual_seed(seeded(6))
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(model, every=1, optimizer=optimizer)
    before = copy.deepcopy(model)
    gradients = _step(model, torch.randn(2, 4), monitored.square_loss, optimizer)
    found = monitor.latest["parameters"]
    values = torch.linalg.svdvals(before.phase.detach().to(torch.complex128))
    assert found["scale"]["norm"] == pytest.approx(2.0)
    assert found["phase"]["norm"] == pytest.approx(values.max().item() * math.sqrt(4 / 3), rel=1e-5)
    assert found["phase"]["sigma_min"] == pytest.approx(values.min().item(), rel=1e-4)
    dual = torch.linalg.svdvals(gradients["phase"].to(torch.complex128)).sum().item() * math.sqrt(3 / 4)
    assert found["phase"]["gradient"] == pytest.approx(dual, rel=0.01)
    assert found["empty"]["norm"] == 0.0 and "ratio" not in found["empty"]


@pytest.mark.parametrize(
    "wrong, match",
    [
        (lambda m, x, o: TrainingMonitor(m, x, every=0), "every"),
        (lambda m, x, o: TrainingMonitor(m, x, every=2.5), "every"),
        (lambda m, x, o: TrainingMonitor(lambda x: x, x), "Module"),
        (lambda m, x, o: TrainingMonitor(m, x, optimizer="adam"), "optimizer"),
        (lambda m, x, o: TrainingMonitor(m, x, optimizer=[]), "empty"),
        (lambda m, x, o: TrainingMonitor(m, x).latest, "attach"),
        (lambda m, x, o: TrainingMonitor(m, x, optimizer=o).latest, "steps"),
        (lambda m, x, o: TrainingMonitor(m, x).log_to(3), "log_to"),
        (lambda m, x, o: TrainingMonitor(copy.deepcopy(m).to("meta"), None), "meta"),
    ],
)
def test_errors(wrong, match: str):
    model, x, _ = monitored.perceptron()
    with pytest.raises(NormMismatchError, match=match):
        wrong(model, x, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("path", ["0", ""])
def test_hooks_that_change_what_a_module_returns_count(path, is_early):
    """Also in bounds, whether they were there when the monitor was made or not."""
    torch.manual_seed(seeded(0))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = None if is_early else TrainingMonitor(model, x, every=1, optimizer=optimizer)
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, y: 1000 * y)
    monitor = monitor or TrainingMonitor(model, x, every=1, optimizer=optimizer)
    for is_hooked in (True, True, False):
        if not is_hooked:
            handle.remove()
        model(x).square().mean().backward()
        optimizer.step()
        found = monitor.latest["activations"]
        for name, layer in (("0", model[0]), ("(model)", model)):
            with torch.no_grad():
                assert found[name]["norm"] == pytest.approx(layer(x).square().mean(-1).sqrt().amax().item())
        assert len(found) == 3 and all(0 < numbers["tightness"] <= 1 for numbers in found.values())
        assert (found["(model)"]["bound"] > 100) == is_hooked


class InPlace(nn.Module):
    """Changes in place what its modules return."""

    def __init__(self, is_in_place: bool):
        super().__init__()
        self.first, self.relu = nn.Linear(6, 8), nn.ReLU(inplace=is_in_place)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_in_place = is_in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.middle(self.relu(self.first(x)))
        if not self.is_in_place:
            return self.last((y / 4).view(-1, 4, 2).mul(0.5).flatten(1))
        y /= 4
        y.view(-1, 4, 2).mul_(0.5)
        return self.last(y)


def test_what_is_changed_in_place_afterwards_is_seen_as_it_was_returned():
    """Numbers and bounds of a program that changes nothing in place; that of a module in place came out eight times too small."""
    torch.manual_seed(seeded(5))
    x, plain = torch.randn(5, 6), InPlace(is_in_place=False)
    found = []
    for is_in_place in (False, True):
        model = InPlace(is_in_place)
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = TrainingMonitor(model, x, every=1, optimizer=optimizer)
        _step(model, x, monitored.square_loss, optimizer)
        found.append(monitor.latest["activations"])
        assert all(0 < numbers["tightness"] <= 1 for numbers in found[-1].values())
    assert found[0].keys() == found[1].keys()
    for name, numbers in found[0].items():
        assert found[1][name] == pytest.approx(numbers, rel=1e-5)


class _Half(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w / 2


def test_without_a_program_parameters_are_what_their_modules_take_them_for():
    torch.manual_seed(seeded(5))
    kernel, table = nn.Conv1d(4, 6, 3), nn.Embedding(7, 4)
    for module in (kernel, table):
        nn.utils.parametrize.register_parametrization(module, "weight", _Half())
    normalized = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 4, 3))
    model = nn.ModuleDict({"k": kernel, "t": table, "n": normalized, "l": nn.LayerNorm([3, 4])})
    model["a"] = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = TrainingMonitor(model, optimizer=optimizer, activations=False)
    optimizer.step()
    w = {name: p.detach().double() for name, p in model.named_parameters()}

    def of_kernel(t: torch.Tensor) -> torch.Tensor:
        out, n, taps = t.shape
        return taps * torch.linalg.matrix_norm(t.movedim(-1, 0), 2).amax() * math.sqrt(n / out)

    def of_rows(t: torch.Tensor) -> torch.Tensor:
        return t.square().mean(-1).sqrt().amax()

    wanted = {
        "k.parametrizations.weight.original": of_kernel,
        "n.parametrizations.weight.original1": of_kernel,
        "n.parametrizations.weight.original0": lambda t: t.abs().amax(),
        **dict.fromkeys(("t.parametrizations.weight.original", "l.weight", "l.bias", "a.bias_k", "a.bias_v"), of_rows),
    }
    for name, norm in wanted.items():
        assert monitor.latest["parameters"][name]["norm"] == pytest.approx(norm(w[name]).item(), rel=1e-5), name
