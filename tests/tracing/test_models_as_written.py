"""Programs as people write them, unchanged: as in eager PyTorch on plain tensors, sound and alike in every way to norms, or refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.seeds import crossed, seeded
from tests.tracing.models_around_operations import AROUND
from tests.tracing.models_as_written import EMA, OPERATORS, RECURRENT, REPARAMETRIZED, WRITING, Program
from tests.within_norms import actual_norm
from thunder_norm import NormedTensor, RMSTensor, build_norm_map, norm_report, normed
from thunder_norm.errors import ThunderNormError, UnsupportedOpError
from thunder_norm.modular import ModularNorm
from thunder_norm.transforms import NormTransform
from thunder_norm.trees import leaves_of_results
import thunder

PROGRAMS = {**RECURRENT, **REPARAMETRIZED, **OPERATORS, **WRITING, **AROUND}
EAGER, TRACED, META, MODULAR, REPORT = "eager", "traced", "meta", "modular", "report"
NORMED = (EAGER, TRACED, META, MODULAR, REPORT)
# What cannot be, and the words that say why: in these ways to norms ("real": plain tensors too).
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "VAE": ("normal distribution is unbounded", (EAGER, TRACED, META, MODULAR)),
    "spectral_norm": ("division by a normed tensor", (META, MODULAR)),
    "EMA buffer": ("'ema', which is on the meta device", (META,)),
    "EMA buffer assigned": ("'ema', which is on the meta device", (META,)),
    "EMA buffer under no_grad": ("copy_", (EAGER,)),
}
# The first is replaced by an attribute of a trace that Thunder's prologue does not find; of the second eager mode measures the matrix that
# the trace bounds; of the third the rounding of bfloat16 is larger than what is compared.
LEFT_OUT = {"spectral_norm, old", "orthogonal", "bfloat16, normalized"}
CASES = [name for name in PROGRAMS if name not in LEFT_OUT]
COARSE = (torch.bfloat16, torch.float16)


def made(program: Program) -> nn.Module:
    torch.manual_seed(seeded(0))
    return program.build().eval()


def given(program: Program) -> torch.Tensor:
    return torch.randn(program.shape, generator=torch.Generator().manual_seed(seeded(1))).to(program.dtype)


def called(f: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The tensors a program returns, with the same random numbers in every run."""
    torch.manual_seed(seeded(2))
    return [t for t in leaves_of_results(f(*args, **kwargs)) if isinstance(t, torch.Tensor)]


def check_real(program: Program) -> None:
    x, m = given(program), made(program)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if program.dtype in COARSE else {"rtol": 1e-4, "atol": 1e-5}
    expected, got = called(m, x.clone()), called(thunder.jit(made(program), transforms=[NormTransform()]), x.clone())
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, **({"rtol": 3e-2, "atol": 3e-2} if a.dtype in COARSE else tolerance))


def check_eager(program: Program) -> None:
    x = given(program)
    expected, got = called(made(program), x.clone()), called(made(program), RMSTensor.of(x.clone()))
    for a, y in zip(expected, got, strict=True):
        assert isinstance(y, NormedTensor) and math.isfinite(y.norm_size)
        torch.testing.assert_close(y.backing, a, rtol=3e-2, atol=3e-2)
        assert actual_norm(y) <= y.norm_size * (1 + 1e-3)


def check_traced(program: Program, requires_grad: bool) -> None:
    x = given(program)
    jm = normed(thunder.jit(made(program), transforms=[NormTransform()]))
    with torch.set_grad_enabled(requires_grad):
        got = called(jm, RMSTensor.of(x.clone()))
    assert all(isinstance(z, NormedTensor) and actual_norm(z) <= z.norm_size * (1 + 1e-3) for z in got)
    try:
        expected = called(made(program), RMSTensor.of(x.clone()))
    except UnsupportedOpError:  # outside of a trace nobody knows how long the buffer it changes matters
        return
    for y, z in zip(expected, got, strict=True):
        assert type(y) is type(z) and y.elem_dims == z.elem_dims
        assert z.norm_size.item() == pytest.approx(y.norm_size.item(), rel=1e-5)  # sigma_max of float32 weights


def check_meta(program: Program) -> None:
    """On meta with norms of 1, against the modular norm of the weights there are."""
    found = build_norm_map(made(program).to("meta"), given(program).to("meta"), parameters="unit")(RMSTensor(1.0))
    normed = [y for y in leaves_of_results(found) if isinstance(y, NormedTensor)]
    assert normed and all(math.isfinite(y.norm_size) for y in normed)


def check_modular(program: Program) -> None:
    """No parameter that moves the output is left out: those are found by torch's own gradients."""
    m = made(program)
    norm = ModularNorm(m, given(program))
    outputs = [t for t in called(m, given(program)) if t.requires_grad]
    if outputs:
        sum(t.float().square().sum() for t in outputs).backward()
    moving = {name for name, p in m.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moving.isdisjoint(norm.unreached)


def check_report(program: Program) -> None:
    x = given(program)
    report = norm_report(thunder.jit(made(program), transforms=[NormTransform()]), RMSTensor.of(x))
    assert len(report.rows) > 0


CHECKS = {
    "real": check_real, EAGER: check_eager, META: check_meta, MODULAR: check_modular, REPORT: check_report,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "requires_grad"), crossed(CASES, [True, False]))
def test_a_program_as_it_is_written(name, requires_grad):
    """In a trace with norms it is differentiated or not; in real mode always."""
    words, ways = REFUSED.get(name, ("", ()))
    for way, check in {**CHECKS, TRACED: functools.partial(check_traced, requires_grad=requires_grad)}.items():
        if way in ways:
            with pytest.raises(ThunderNormError, match=words):
                check(PROGRAMS[name])
        else:
            check(PROGRAMS[name])


# -- a buffer that a program changes in place -------------------------------------------------------------------------------


class Mean(nn.Module):
    """A buffer changed in place by the input, and perhaps used."""

    def __init__(self, change, use):
        super().__init__()
        self.linear, self.change, self.use = nn.Linear(6, 6), change, use
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.change(self.mean, x.mean(0))
        return self.use(self.linear(x), self.mean)


CHANGES = {
    "add_": lambda mean, x: mean.mul_(0.9).add_(x.detach(), alpha=0.1),
    "copy_": lambda mean, x: mean.copy_(x),
    "lerp_": lambda mean, x: mean.lerp_(x, 0.1),
    "a slice": lambda mean, x: mean.__setitem__(slice(0, 3), x[:3]),
}
USES = {
    "as it is": lambda y, mean: y - mean,
    "through a plain operation": lambda y, mean: y - 0.5 * mean,
    "detached": lambda y, mean: y - mean.detach(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_is_changed_as_in_torch(change):
    m = Mean(CHANGES[change], lambda y, mean: y)
    expected, x = copy.deepcopy(m), torch.randn(4, 6)
    expected(x)
    ModularNorm(m, x)
    assert not m.mean.any()
    assert isinstance(thunder.jit(m, transforms=[NormTransform()])(RMSTensor.of(x)), RMSTensor)
    assert type(m.mean) is torch.Tensor
    torch.testing.assert_close(m.mean, expected.mean)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", USES)
def test_a_changed_buffer_moves_with_the_input(change, use):
    """Its norm is that of what was written, not of the values at hand; outside of a run nobody knows how long it matters."""
    m, x = Mean(CHANGES[change], USES[use]), torch.randn(4, 6)
    jm = thunder.jit(copy.deepcopy(m), transforms=[NormTransform()])
    found, larger = jm(RMSTensor.of(x)), jm(RMSTensor(10 * RMSTensor.of(x).norm_size, backing=x))
    assert larger.norm_size > 5 * found.norm_size
    for run in (
        lambda m: build_norm_map(m, x, parameters="unit")(RMSTensor(1.0)),
        lambda m: ModularNorm(m, x),
    ):
        run(m)
        assert not m.mean.any()
    with pytest.raises(UnsupportedOpError):
        m(RMSTensor.of(x))
    assert not m.mean.any()


def test_running_mean_in_training():
    m, x = EMA().train(), torch.randn(4, 6)
    jm = thunder.jit(m, transforms=[NormTransform()])
    for _ in range(2):
        jm(RMSTensor.of(x))
    torch.testing.assert_close(m.ema, 0.19 * x.mean(0))
    assert m.steps.item() == 2


# -- containers ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outputs:
    first: Any
    second: Any = None


class GivesOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return Outputs(self.first(x), {"second": self.second(x)})


def test_modular_norm_of_a_dataclass():
    norm = ModularNorm(GivesOutputs(), torch.randn(4, 6))
    assert not norm.unreached and all(t > 0 for t in norm.targets.values())
    assert norm.outputs.first.norm_size.item() == norm.outputs.second["second"].norm_size.item() == 2
    assert norm.outputs.first.backing is None


def test_arguments_from_a_generator():
    def add(a, b):
        return a + b

    x = torch.randn(3)
    assert torch.equal(thunder.jit(lambda x: add(*(t for t in (x, 2 * x))), transforms=[NormTransform()])(x), 3 * x)


@pytest.mark.parametrize("mode", ["typical", "modula"])
@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_of_a_grouped_convolution_in_modes_without_a_guarantee(mode, dim):
    torch.manual_seed(seeded())
    m = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1, groups=2), dim=dim)
    norm = ModularNorm(m, torch.randn(2, 8, 5), mode=mode)
    assert not norm.unreached and all(0 < norm.targets[name] < math.inf for name, mass in norm.masses.items() if mass > 0)
    assert norm.masses["parametrizations.weight.original1"] > 0
