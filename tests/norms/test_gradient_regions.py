"""A region without gradients, or computed again in the backward, moves as far as any other: all paths say so alike.

The oracle is the same model without the region: sensitivities are constants of the function, which the region does not change.
"""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from tests.seeds import seeded
from thunder_norm import (
    LinfTensor,
    NormedTensor,
    RMSTensor,
    build_norm_map,
    norm_report,
    normed,
    sensitivities,
    with_perturbation,
)
from thunder_norm.errors import NormMismatchError, ThunderNormError
from thunder_norm.modular import ModularNorm, ModularOptimizer
from thunder_norm.transforms import NormTransform
import thunder

# singular values of float32 weights differ in their last bits with and without gradients
CLOSE = 1e-5


class Double(torch.autograd.Function):
    """Its derivative is wrong, which is no affair of the norms of what it computes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) * 1.0

    @staticmethod
    def backward(ctx, g):
        return g, g


class DoubleAfterwards(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return F.linear(x, weight) * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g, g


@torch.no_grad()
def decorated(f, x):
    return f(x)


def under(context, f, x):
    with context:
        return f(x)


def switched(f, x):
    torch.set_grad_enabled(False)
    y = f(x)
    torch.set_grad_enabled(True)
    return y


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def nested(f, x):
    return checkpoint(lambda x: checkpoint(f, x, use_reentrant=False), x, use_reentrant=False)


# regions in which a linear layer runs
NO_GRAD = {
    "no_grad": lambda f, x: under(torch.no_grad(), f, x),
    "inference_mode": lambda f, x: under(torch.inference_mode(), f, x),
    "set_grad_enabled": lambda f, x: under(torch.set_grad_enabled(False), f, x),
    "switched": switched,
    "decorated": decorated,
    "enabled inside": lambda f, x: under(torch.no_grad(), lambda x: under(torch.enable_grad(), f, x), x),
    "detach": lambda f, x: f(x).detach(),
}
CHECKPOINTS = {
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "non-reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "nested": nested,
    "without random state": lambda f, x: checkpoint(f, x, use_reentrant=False, preserve_rng_state=False),
    "reentrant without random state": lambda f, x: checkpoint(f, x, use_reentrant=True, preserve_rng_state=False),
    "keyword": lambda f, x: checkpoint(lambda x, scale: f(x) * scale, x, scale=1.0, use_reentrant=False),
}
EAGER_ONLY = {
    "sequential": lambda f, x: checkpoint_sequential(nn.Sequential(f, nn.Identity()), 2, x, use_reentrant=False),
    "reentrant sequential": lambda f, x: checkpoint_sequential(nn.Sequential(f, nn.Identity()), 2, x, use_reentrant=True),
    "contexts": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(),) * 2),
    "selective": lambda f, x: checkpoint(f, x, use_reentrant=False, context_fn=selective),
    "Function": lambda f, x: Double.apply(x, f.weight),
    "Function with setup_context": lambda f, x: DoubleAfterwards.apply(x, f.weight),
    "saved on the CPU": lambda f, x: under(torch.autograd.graph.save_on_cpu(), f, x),
}
REGIONS = NO_GRAD | CHECKPOINTS
ALL = REGIONS | EAGER_ONLY


class Net(nn.Module):
    def __init__(self, region=None):
        super().__init__()
        torch.manual_seed(seeded(3))
        self.a, self.b, self.region = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), region

    def forward(self, x):
        h = self.a(x) if self.region is None else self.region(self.a, x)
        return self.b(torch.tanh(5 * h) + F.linear(x, self.a.weight))


def x() -> torch.Tensor:
    return torch.arange(24.0).reshape(3, 8) / 10


def moved(run) -> tuple[float, float, float]:
    """Norm size, sensitivity, and the sensitivity by the backward of a perturbation size."""
    p = with_perturbation(RMSTensor.of(x()))
    y = run(p)
    (by_backward,) = torch.autograd.grad(y.perturbation_size, p.perturbation_size, retain_graph=True)
    return y.norm_size.item(), sensitivities(y, p).item(), by_backward.item()


def jit(model: nn.Module, **options):
    return thunder.jit(model, transforms=[NormTransform(**options)])


@pytest.mark.parametrize("name", ALL)
def test_eager_sensitivity_is_that_of_the_model_without_the_region(name):
    assert moved(Net(ALL[name])) == pytest.approx(moved(Net()), rel=CLOSE)


@pytest.mark.parametrize("name", REGIONS)
def test_jitted_sensitivity_is_that_of_the_model_without_the_region(name):
    assert moved(jit(Net(REGIONS[name]))) == pytest.approx(moved(Net()), rel=CLOSE)


@pytest.mark.parametrize("name", ALL)
def test_report_and_modular_norm_are_those_of_the_model_without_the_region(name):
    """Rows of operations may differ (a detach is one), those of parameters may not."""

    def found(model):
        report, norm = norm_report(jit(model), RMSTensor.of(x())), ModularNorm(model, x())
        rows = {r.op: r.sensitivity for r in report}
        return {k: r.sensitivity for k, r in report.parameters.items()}, rows["tanh"], norm.targets, norm.sensitivities

    got, want = found(Net(ALL[name])), found(Net())
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=CLOSE)
    assert ModularNorm(Net(ALL[name]), x()).unreached == ()


@pytest.mark.parametrize("name", REGIONS)
def test_norm_map_is_that_of_the_model_without_the_region(name):
    def found(model):
        leaves = {k: with_perturbation(RMSTensor(1.5) if p.ndim == 1 else _operator()) for k, p in model.named_parameters()}
        p = with_perturbation(RMSTensor(2.0))
        y = build_norm_map(model, x())(p, normed_state_dict=leaves)
        return [y.norm_size.item(), *(s.item() for s in sensitivities(y, [p, *leaves.values()]))]

    assert found(Net(REGIONS[name])) == pytest.approx(found(Net()), rel=CLOSE)


def _operator() -> NormedTensor:
    from thunder_norm import RMSToRMSTensor

    return RMSToRMSTensor(1.5)


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_a_whole_call_without_gradients_has_sensitivities_and_nothing_else_that_requires_grad(region):
    model = Net()
    want = moved(model)[1]
    runs = {"eager": model, "jit": jit(model), "norm map": build_norm_map(model, x())}
    for name, run in runs.items():
        with region():
            p = with_perturbation(RMSTensor(4.0, backing=x()))
            if region is torch.inference_mode and name == "jit":
                with pytest.raises(NormMismatchError, match="inference_mode"):
                    run(p)
                continue
            y = run(p)
            assert not y.norm_size.requires_grad and not y.backing.requires_grad, name
            found = sensitivities(y, p).item()
        assert found > 0, name
    q = with_perturbation(RMSTensor.of(x()))
    with torch.no_grad():
        assert sensitivities(model(q), q).item() == pytest.approx(want, rel=CLOSE)


def test_reports_and_modular_norms_under_no_grad_are_those_with_gradients():
    model = Net()
    want = norm_report(jit(model), RMSTensor.of(x())), ModularNorm(model, x())
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            report, norm = norm_report(jit(model), RMSTensor.of(x())), ModularNorm(model, x())
        assert [r.sensitivity for r in report] == [r.sensitivity for r in want[0]]
        assert norm.targets == want[1].targets


@pytest.mark.parametrize("run", [lambda m: m, jit], ids=["eager", "jit"])
def test_derivatives_with_respect_to_real_parameters_stop_where_torchs_do(run):
    """Perturbations pass a region under no_grad; derivatives of norms with respect to the weights in it do not."""

    class Only(Net):
        def forward(self, x):
            with torch.no_grad():
                h = self.a(x)
            return self.b(h)

    model = Only()
    p = with_perturbation(RMSTensor.of(x()))
    y = run(model)(p)
    for create_graph in (False, True):
        got = torch.autograd.grad(
            y.norm_size, [model.a.weight, model.b.weight], retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        assert got[0] is None or not got[0].any()
        assert got[1].any()


def test_a_parameter_used_inside_and_outside_of_a_region_keeps_its_derivative_outside():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            with torch.no_grad():
                h = self.a(x)
            return self.a(h)

    model = Both()
    y = jit(model)(RMSTensor.of(x()))
    (got,) = torch.autograd.grad(y.norm_size, model.a.weight)
    inner = model.a(x()).detach()
    with torch.no_grad():
        bound = model(RMSTensor.of(x())).norm_size / RMSTensor.of(x()).norm_size  # |W|^2
    w = model.a.weight.detach().double().requires_grad_()
    (torch.linalg.matrix_norm(w, 2) * bound.sqrt() * RMSTensor.of(x()).norm_size).backward()
    torch.testing.assert_close(got.double(), w.grad, rtol=1e-4, atol=1e-6)
    assert inner.shape == (3, 8)


@functools.cache
def gpt2():
    """The model, its input, and what is known of it without checkpoints."""
    torch.manual_seed(seeded(0))
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=16, use_cache=False, **dropout)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 31, (2, 6))
    return model, ids, ModularNorm(model, ids), norm_report(jit(model), ids, sensitivity="global")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gpt2_with_checkpoints_is_gpt2_without(reentrant):
    model, ids, want, rows = gpt2()
    checkpointed = copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = ModularNorm(checkpointed, ids)
    assert found.targets == pytest.approx(want.targets, rel=CLOSE, abs=0) and found.unreached == ()
    report = norm_report(jit(checkpointed), ids, sensitivity="global")
    assert {k: r.sensitivity for k, r in report.parameters.items()} == pytest.approx(
        {k: r.sensitivity for k, r in rows.parameters.items()}, rel=CLOSE
    )
    y = normed(jit(checkpointed))(ids).logits
    assert report.rows[-1].norm_size == pytest.approx(y.norm_size.item(), rel=CLOSE)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_in_a_jitted_model_on_plain_tensors_changes_no_value_and_no_gradient(name):
    model = Net(CHECKPOINTS[name])
    want, got = Net(), jit(model)
    want(x()).square().sum().backward()
    got(x()).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in want.parameters()])


def test_a_checkpointed_training_step_moves_every_parameter():
    model = Net(CHECKPOINTS["reentrant"])
    optimizer = ModularOptimizer(model, x(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(x().requires_grad_()).square().mean().backward()
    optimizer.step()
    assert all((p - b).norm() > 0.1 for p, b in zip(model.parameters(), before, strict=True))


ANOTHER_NAME = {
    "data": lambda m, x: F.linear(x, m.a.weight.data),
    "detach": lambda m, x: F.linear(x, m.a.weight.detach()),
    "Parameter": lambda m, x: F.linear(x, nn.Parameter(m.a.weight)),
    "Parameter of data": lambda m, x: F.linear(x, nn.Parameter(m.a.weight.data.clone())),
    "deep copy": lambda m, x: copy.deepcopy(m.a)(x),
    "transposed": lambda m, x: x @ m.a.weight.data.T,
    "kept": lambda m, x: F.linear(x, m.alias),
}


@pytest.mark.parametrize("name", ANOTHER_NAME)
def test_a_parameter_by_another_name_is_the_parameter(name):
    """It has no gradient in torch, and the function moves with it."""

    class Named(nn.Module):
        def __init__(self, how):
            super().__init__()
            torch.manual_seed(seeded(3))
            self.a, self.b, self.how = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), how
            self.alias = self.a.weight.data

        def forward(self, x):
            return self.b(torch.tanh(self.how(self, x)))

    model, want = Named(ANOTHER_NAME[name]), Named(lambda m, x: m.a(x))
    assert ModularNorm(model, x()).targets == pytest.approx(ModularNorm(want, x()).targets, rel=CLOSE)
    got, expected = (norm_report(jit(m), RMSTensor.of(x())).parameters for m in (model, want))
    assert {k: r.sensitivity for k, r in got.items()} == pytest.approx({k: r.sensitivity for k, r in expected.items()}, rel=CLOSE)


@pytest.mark.parametrize("run", [lambda m: m, jit], ids=["eager", "jit"])
def test_a_derivative_that_the_program_takes_is_refused(run):
    """The penalty of WGAN-GP, say: nothing is known of the norms of a derivative."""

    class Penalty(Net):
        def forward(self, x):
            y = self.a(x)
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + g

    with pytest.raises(ThunderNormError):
        run(Penalty())(RMSTensor.of(x()))


@pytest.mark.parametrize("how", ["norm map", "jitted"])
def test_a_norm_that_stays_what_it_is_has_no_derivative_under_no_grad(how):
    """Nothing is computed from it there that could be recorded or not; how far things move is followed all the same."""

    def program(x):
        with torch.no_grad():
            y = x.relu()
        return y, x.tanh(), 2 * y + x

    def slopes(called) -> list[float]:
        size, step = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (2.0, 0.5))
        results = called(LinfTensor(size, perturbation_size=step, backing=torch.ones(2, 3)))
        pairs = [(t, leaf) for y in results for t, leaf in ((y.norm_size, size), (y.perturbation_size, step))]
        return [
            torch.autograd.grad(t, leaf, retain_graph=True, materialize_grads=True)[0].item() if t.requires_grad else 0.0
            for t, leaf in pairs
        ]

    made = build_norm_map(program, torch.ones(2, 3)) if how == "norm map" else thunder.jit(program, transforms=[NormTransform()])
    assert slopes(made) == pytest.approx(slopes(program))
    assert slopes(program)[0] == 0 and slopes(program)[4:] == [1, 3]
