"""Reports of programs in low precision: formats, what is predicted, and what programs do when they are run in it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.seeds import seeded
from thunder_norm import RMSTensor, build_norm_map, load_norm_report, norm_report
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.report.precision.formats import Format
from thunder_norm.transforms import NormTransform
import thunder

HALF = [torch.bfloat16, torch.float16]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


def is_near(precision):
    """Whether the predicted error is the measured one within a factor of 3."""
    assert precision.measured_typical is not None, precision.measured_by
    return precision.measured_typical / 3 < precision.typical < 3 * precision.measured_typical


def jitted(program):
    return thunder.jit(program, transforms=[NormTransform()])


class Attention(nn.Module):
    """As people write it: residual, RMS norm, heads, softmax written out, tied weights, a constant table."""

    positions: torch.Tensor

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embedding, self.heads = nn.Embedding(50, width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("positions", torch.randn(16, width))

    def forward(self, ids):
        x = self.embedding(ids) + self.positions[: ids.shape[-1]]
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.gain
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return F.linear(x, self.embedding.weight)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x):
        x = F.max_pool2d(F.silu(self.norm(self.first(x))), 2)
        return self.head((x + F.gelu(self.second(x))).mean((-2, -1)))


def mlp():
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def programs():
    g = torch.Generator().manual_seed(seeded(3))
    x = torch.randn(16, 24, generator=g)
    image = torch.randn(4, 3, 8, 8, generator=g)
    ids = torch.randint(50, (2, 12), generator=g)
    return {
        "mlp": (mlp(), (RMSTensor.of(x),)),
        "attention": (Attention(), (ids,)),
        "convolutions": (Convolutions().eval(), (RMSTensor.of(image),)),
        "convolutions, training": (Convolutions(), (RMSTensor.of(image),)),
        "functions": (lambda x: (x.sin() * x.detach().exp() + x.cumsum(-1)).logsumexp(-1, keepdim=True), (RMSTensor.of(x),)),
    }


# -- formats --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, *EIGHT])
def test_no_number_is_further_away_than_half_the_spacing_and_some_are_that_far(dtype):
    form = Format(dtype)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 3, math.log2(info.max)
    for start in torch.arange(low, high - 1, 1.0, dtype=torch.float64).tolist():
        binade = 2 ** torch.linspace(start, start + 1, 4097, dtype=torch.float64)
        t = torch.cat([binade, -binade, torch.tensor([info.max], dtype=torch.float64)])  # the scale of 8 bits is then 1
        error, most = (form.rounded(t) - t).abs()[:-1], form.half_spacing(t)[:-1]
        assert (error <= most).all()
        assert (error / most).max() > 0.97


@pytest.mark.parametrize("dtype", EIGHT)
def test_eight_bits_are_scaled_to_the_largest_entry(dtype):
    t = torch.randn(64, dtype=torch.float64) * 1e-6
    assert torch.allclose(Format(dtype).rounded(t * 2.0**30), Format(dtype).rounded(t) * 2.0**30)
    assert Format(dtype).rounded(t).abs().max() == t.abs().max()
    assert torch.equal(Format(dtype).rounded(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1e-14, 3e-12, 1.0, 1e30])
def test_eight_bits_are_those_of_torchao_however_small_the_numbers(size):
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    t = torch.randn(64, generator=torch.Generator().manual_seed(seeded())) * size
    scale = tensor_to_scale(t, torch.float8_e4m3fn)
    theirs = to_fp8_saturated(t * scale, torch.float8_e4m3fn).float() / scale
    form = Format(torch.float8_e4m3fn)
    for rounded in (theirs, form.rounded(t)):
        assert ((rounded - t).abs().double() <= form.half_spacing(t) * (1 + 1e-5)).all()


def test_beyond_the_largest_number_the_error_is_infinite():
    t = torch.tensor([1.0, 1e6, -math.inf, math.nan])
    found = Format(torch.float16).half_spacing(t)
    assert found[0] == 2.0**-11
    assert found[1] == math.inf
    assert found[2] != math.inf or not found[2].isfinite()


# -- what is predicted, and what is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(programs()))
@pytest.mark.parametrize("dtype", [*HALF, *EIGHT])
def test_the_predicted_error_is_the_error(name, dtype):
    program, args = programs()[name]
    found = norm_report(jitted(program), *args, precision=dtype).precision
    assert is_near(found)
    assert found.measured <= found.bound


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_measured_is_what_pytorch_does(dtype):
    model = mlp()
    x = torch.randn(16, 24)
    found = norm_report(jitted(model), RMSTensor.of(x), precision=dtype).precision
    with torch.no_grad():
        difference = copy.deepcopy(model).to(dtype)(x.to(dtype)).float() - model(x)
    assert found.measured_typical == pytest.approx(difference.double().square().mean().sqrt().item(), rel=1e-5)
    assert found.measured == pytest.approx(difference.double().square().mean(-1).sqrt().max().item(), rel=1e-5)


@pytest.mark.parametrize("op", ["linear", "gelu", "layer_norm"])
def test_what_one_operation_adds_is_what_noise_there_does(op):
    """Uniform noise of the size of the spacing is put on the results of one operation, and on the operands it has from outside."""
    model, x = mlp().double(), torch.randn(16, 24, dtype=torch.float64)
    report = norm_report(jitted(model), RMSTensor.of(x), precision={op: torch.bfloat16})
    form, generator = Format(torch.bfloat16), torch.Generator().manual_seed(seeded(5))

    def noisy(t):
        return t + form.half_spacing(t) * (2 * torch.rand(t.shape, generator=generator, dtype=t.dtype) - 1)

    def run(x):
        for module in model.children():
            if {"linear": nn.Linear, "gelu": nn.GELU, "layer_norm": nn.LayerNorm}[op] is not type(module):
                x = module(x)
                continue
            tensors = {n: noisy(p) if (p != form.rounded(p)).any() else p for n, p in module.named_parameters()}
            x = noisy(torch.func.functional_call(module, tensors, noisy(x)))
        return x

    with torch.no_grad():
        errors = torch.stack([run(x) - model(x) for _ in range(60)])
    assert report.precision.typical == pytest.approx(errors.square().mean().sqrt().item(), rel=0.3)
    assert {r.op for r in report if r.rounding is not None} == {op}


def test_the_bound_is_one_for_roundings_in_any_direction():
    """Of a linear program, where first order is all there is: entries are moved by half a spacing, in random directions and the worst."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    report = norm_report(jitted(model), RMSTensor.of(x), precision={"[01]": torch.bfloat16})
    form = Format(torch.bfloat16)
    w1, w2 = model.get_submodule("0").weight.detach(), model[1].weight.detach()
    worst = 0.0
    generator = torch.Generator().manual_seed(seeded(7))
    for _ in range(300):
        sign = lambda t: torch.randint(2, t.shape, generator=generator).to(t.dtype) * 2 - 1  # noqa: E731
        direction = sign(torch.empty(3, 4, dtype=torch.float64))
        dx = form.half_spacing(x) * (direction @ w2 @ w1).sign()
        dw1 = form.half_spacing(w1) * sign(w1)
        dh = form.half_spacing(x @ w1.T) * (direction @ w2).sign()
        moved = dx @ w1.T @ w2.T + x @ dw1.T @ w2.T + dh @ w2.T
        worst = max(worst, moved.square().mean(-1).sqrt().max().item())
    assert 0 < worst <= report.precision.bound
    shares = [r.rounding for r in (*report, *report.parameters.values()) if r.rounding is not None]
    total = sum(s.arriving for s in shares) + report.precision.inputs.arriving
    assert total == pytest.approx(report.precision.bound)


def test_what_moves_entries_adds_nothing():
    def program(x):
        y = F.relu(x).transpose(0, 1).flip(0)[:, 1:].reshape(-1, 3)
        return torch.cat([y, y.neg(), y * 2.0, F.dropout(y, training=False)]).amax(0, keepdim=True)

    report = norm_report(jitted(program), RMSTensor.of(torch.randn(4, 6)), precision=torch.float16)
    assert [r.op for r in report if r.rounding is not None] == []
    assert report.precision.inputs.added > 0


def test_formats_by_operation_and_module():
    model = mlp()
    x = RMSTensor.of(torch.randn(16, 24))
    all_half = norm_report(jitted(model), x, precision=torch.bfloat16)
    mixed = norm_report(jitted(model), x, precision={"*": torch.bfloat16, "linear": torch.float8_e4m3fn, "5": torch.float32})
    assert mixed.precision.formats == {"*": "bfloat16", "linear": "float8_e4m3fn", "5": "float32"}
    dtypes = [r.rounding.dtypes if r.rounding else () for r in mixed]
    assert dtypes[0] == ("bfloat16",)  # the input is its operand: that is among the inputs
    assert mixed.precision.inputs.dtypes == ("float8_e4m3fn",)
    assert dtypes[2] == ("float8_e4m3fn", "bfloat16")
    assert dtypes[5] == ()
    assert mixed.precision.typical > 3 * all_half.precision.typical
    assert is_near(mixed.precision)
    single = norm_report(jitted(model), x, precision=torch.float32).precision
    assert single.bound == single.typical == single.measured == 0


def test_tensors_made_from_parameters_and_several_results():
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            y = x @ self.w.t()
            return {"y": y, "z": (y @ self.w).tanh(), "ids": torch.arange(3)}

    report = norm_report(jitted(Program()), RMSTensor.of(torch.randn(5, 8)), precision=torch.bfloat16)
    found = report.precision
    assert is_near(found)
    assert found.measured <= found.bound < math.inf


def test_roundings_pass_where_derivatives_stop():
    def program(x):
        with torch.no_grad():
            y = x.exp()
        with torch.inference_mode():
            z = x.sin()
        return y * 3.0 + z.detach()

    found = norm_report(jitted(program), RMSTensor.of(torch.randn(16, 16)), precision=torch.bfloat16).precision
    assert is_near(found)


def test_random_masks_are_the_same_in_both_runs():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    found = norm_report(jitted(model), RMSTensor.of(torch.randn(64, 8)), precision=torch.bfloat16).precision
    assert is_near(found)


@pytest.mark.parametrize(
    "made", [torch.rand, lambda *shape: torch.full(shape, 0.1).mul_(0.3), lambda *shape: torch.rand(shape).topk(8)[0]]
)
@pytest.mark.parametrize("of", [RMSTensor.of, lambda x: x])
def test_roundings_of_what_is_drawn_or_filled(made, of):
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(x) + 30 * made(64, 8)

    # run by PyTorch, what is drawn would be in the default dtype
    formats = {"*": torch.bfloat16, "layer": torch.float32}
    found = norm_report(jitted(Program()), of(torch.randn(64, 8)), precision=formats).precision
    assert is_near(found)
    assert found.measured <= found.bound


def test_an_overflow_is_infinite():
    report = norm_report(jitted(lambda x: x * 1e4 * 1e-4), RMSTensor.of(torch.full((2, 3), 30.0)), precision=torch.float16)
    assert report.rows[0].rounding.added == math.inf
    assert report.precision.bound == math.inf


# -- around it --------------------------------------------------------------------------------------------------------------


def test_nothing_is_disturbed():
    model = Convolutions()
    x = torch.randn(4, 3, 8, 8)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    norm_report(jitted(model), RMSTensor.of(x), precision=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_rows_are_those_of_a_report_without_precision():
    program, args = programs()["attention"]
    plain, low = (norm_report(jitted(program), *args, precision=p) for p in (None, torch.bfloat16))
    assert [(r.op, r.module, r.norm_size, r.sensitivity) for r in plain] == [
        (r.op, r.module, r.norm_size, r.sensitivity) for r in low
    ]
    assert plain.precision is None
    assert all(r.rounding is None for r in plain)


def test_a_program_that_cannot_run_in_it_is_predicted():
    weight = torch.randn(4, 8)  # float32, whatever the input is
    found = norm_report(
        jitted(lambda x: F.linear(x, weight)), RMSTensor.of(torch.randn(5, 8)), precision=torch.bfloat16
    ).precision
    assert found.measured is None
    assert "in bfloat16 the program raises RuntimeError" in found.measured_by
    assert found.typical > 0


def test_it_is_printed_saved_and_a_data_frame(tmp_path):
    pytest.importorskip("pandas")
    report = norm_report(jitted(mlp()), RMSTensor.of(torch.randn(16, 24)), precision=torch.bfloat16)
    text = report.table(width=200)
    assert all(column in text for column in ("adds", "arrives", "at most"))
    assert "in bfloat16: results move by" in text
    assert "run by PyTorch in bfloat16: by" in text
    frame = report.to_dataframe()
    assert frame["arriving_typical"].tolist() == [r.rounding.arriving_typical if r.rounding else 0.0 for r in report]
    report.save(tmp_path / "report")
    loaded = load_norm_report(tmp_path / "report")
    assert loaded.precision == report.precision
    assert [r.rounding for r in loaded] == [r.rounding for r in report]
    assert report.select("2").precision == report.precision


@pytest.mark.parametrize(
    ("precision", "error", "words"),
    [
        (torch.int8, NormMismatchError, "int8"),
        ("bfloat16", NormMismatchError, "bfloat16"),
        ({"*": torch.bfloat16, "lm_haed": torch.float32}, NormMapKeyError, "lm_haed"),
        ({}, NormMismatchError, "empty"),
    ],
)
def test_mistakes_are_refused(precision, error, words):
    with pytest.raises(error, match=words):
        norm_report(jitted(mlp()), RMSTensor.of(torch.randn(16, 24)), precision=precision)


def test_where_there_are_no_roundings_it_is_refused():
    x = torch.randn(16, 24)
    typical = thunder.jit(mlp(), transforms=[NormTransform(mode="typical")])
    with pytest.raises(NormMismatchError, match="precision"):
        norm_report(typical, RMSTensor.of(x), precision=torch.bfloat16)
    with pytest.raises(NormMismatchError, match="norm map"):
        norm_report(build_norm_map(mlp(), x), precision=torch.bfloat16)
    with pytest.raises(NormMismatchError, match="precision"):
        norm_report(jitted(mlp().to("meta")), RMSTensor(1.0, backing=x.to("meta")), precision=torch.bfloat16)
    with pytest.raises(NormMismatchError, match="precision"):
        norm_report(jitted(mlp()), RMSTensor.of(x), precision=torch.bfloat16, sensitivity="composed")
    with pytest.raises(NormMapKeyError, match="nothing is normed"):
        norm_report(jitted(torch.exp), x, precision=torch.bfloat16)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            lambda x: ((x * 3.0 - x * 2.0 - x) * 1e3).square(),
            "more than predicted",
        ),  # of 0 squared the second order is all there is
        (lambda x: x.exp() - x.exp(), "less"),
        (F.softsign, None),
    ],
)
def test_an_error_that_is_not_the_predicted_one_is_remarked_upon(program, words):
    x = 0.03 * torch.randn(4, 8, generator=torch.Generator().manual_seed(seeded(6)), dtype=torch.float64)
    report = norm_report(jitted(program), RMSTensor.of(x), precision=torch.float16)
    found = report.precision.remark
    assert found is None if words is None else found is not None and found.startswith(words)
    assert (found or "in their norms") in report.table(width=120)


def test_what_no_rule_follows_is_not_said_to_do_nothing():
    x = torch.randn(16, 64) + 50

    def written_out(x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)

    found = norm_report(jitted(written_out), RMSTensor.of(x), precision=torch.bfloat16).precision
    assert found.measured <= found.bound
    assert is_near(found)


def test_what_is_too_small_for_the_format_becomes_0():
    x = torch.rand(8, 16) + 0.5
    found = norm_report(jitted(lambda x: (x * 1e-9) * 1e9), RMSTensor.of(x), precision=torch.float16).precision
    assert is_near(found)


def test_models_of_low_precision_are_refused():
    with pytest.raises(NormMismatchError, match=r"float32 \(model.float"):
        norm_report(jitted(mlp().bfloat16()), RMSTensor.of(torch.randn(4, 24).bfloat16()), precision=torch.float16)


def test_a_program_under_autocast_is_refused():
    """What autocast rounds would count as exact: 0 was measured."""
    torch.manual_seed(seeded(0))
    model, x = mlp(), torch.randn(4, 24)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x)

    def outside():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return norm_report(jitted(model), RMSTensor.of(x), precision=torch.bfloat16)

    for report in (outside, lambda: norm_report(jitted(Inside()), RMSTensor.of(x), precision=torch.bfloat16)):
        with pytest.raises(NormMismatchError, match="under autocast"):
            report()
    assert is_near(norm_report(jitted(model), RMSTensor.of(x), precision={"linear": torch.bfloat16}).precision)
