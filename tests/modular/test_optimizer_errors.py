"""Gradients and options that `ModularOptimizer` refuses, and steps that it skips."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.modular.optimized import Model, backward, made, values
from tests.seeds import seeded
from thunder_norm.errors import GradientError, NormMapKeyError, NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer


def _poisoned(model: Model, what: Any) -> None:
    model.two.weight.grad = what


BAD_GRADIENTS = [
    (lambda m: _poisoned(m, None), r"no gradient for 'two.weight'\n.*missing_grads='skip'"),
    (lambda m: m.zero_grad(), r"no parameter has a gradient\n.*call backward\(\)"),
    (lambda m: m.two.weight.grad[3, 3].fill_(math.nan), r"NaN or infinite: 'two.weight'\n.*nonfinite_grads='skip'"),
    (lambda m: m.head.bias.grad[0].fill_(math.inf), r"NaN or infinite: 'head.bias'"),
    (lambda m: _poisoned(m, m.two.weight.grad.to_sparse()), r"gradient of 'two.weight' is sparse .*sparse=False"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_GRADIENTS)
def test_a_bad_gradient_is_an_error_and_changes_nothing(spoil, message):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    backward(model, i)
    optimizer.step()
    backward(model, i, 1)
    spoil(model)
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(GradientError, match=message):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    for k, buffers in optimizer.state_dict()["state"].items():
        assert torch.equal(buffers["momentum_buffer"], state["state"][k]["momentum_buffer"])
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]


def test_a_step_with_gradients_that_are_not_finite_can_be_skipped():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, nonfinite_grads="skip")
    backward(model, i)
    model.one.weight.grad[0, 0] = math.nan
    before = values(model)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    backward(model, i)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert not torch.equal(model.one.weight, before["one.weight"])


def test_a_missing_gradient_can_be_skipped():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, missing_grads="skip")
    backward(model, i)
    model.two.weight.grad = None
    before = values(model)
    optimizer.step()
    assert torch.equal(model.two.weight, before["two.weight"])
    assert not torch.equal(model.one.weight, before["one.weight"])


def test_parameters_frozen_and_unfrozen_later():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    model.one.weight.requires_grad_(False)
    backward(model, i)
    model.one.weight.grad = None
    optimizer.step()  # frozen now: left alone
    model.fixed.requires_grad_(True)
    optimizer.add_param_group({"params": [model.fixed]})
    backward(model, i)
    with pytest.raises(NormMismatchError, match=r"'fixed' was frozen when the norm was derived"):
        optimizer.step()


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy], ids=["", "copied"])
def test_what_trains_later_is_not_silently_left_behind(copied):
    model, i = made()
    norm = ModularNorm(model, i, mode="typical")
    model.one.weight.requires_grad_(False)
    model, norm, of_all = copied((model, norm, ModularOptimizer(norm, lr=0.1)))
    of_some = ModularOptimizer(norm, lr=0.1, params=[p for p in model.parameters() if p.requires_grad])
    backward(model, i)
    of_all.step()
    model.one.weight.requires_grad_(True)
    backward(model, i)
    before = values(model)
    with pytest.raises(NormMismatchError, match=r"'one.weight' was frozen when the optimizer was made, which does not move it"):
        of_all.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    of_some.step()  # it was told what to move
    of_all.add_param_group({"params": [model.one.weight]})
    of_all.step()
    assert not torch.equal(model.one.weight, before["one.weight"])


@pytest.mark.parametrize("missing_grads", ["error", "skip"])
def test_parameters_that_are_replaced_are_not_silently_left_behind(missing_grads):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, missing_grads=missing_grads)
    backward(model, i)
    optimizer.step()
    before = values(model)
    model.load_state_dict(before, assign=True)  # other parameters, which the optimizer does not have
    model.zero_grad()
    optimizer.zero_grad()
    backward(model, i)
    with pytest.raises(GradientError, match=r"'table.weight' has been replaced since the optimizer was made(.|\n)*assign=True"):
        optimizer.step()
    for name, t in values(model).items():
        assert torch.equal(t, before[name])


def _refused(optimizer: ModularOptimizer, model: nn.Module, error: type[Exception], message: str) -> None:
    before, state = values(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=message):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())
    after = optimizer.state_dict()
    assert all(
        torch.equal(t, after["state"][i][k])
        for i, s in state["state"].items()
        for k, t in s.items()
        if isinstance(t, torch.Tensor)
    )


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy], ids=["", "copied"])
def test_what_is_added_later_is_not_silently_left_behind(copied):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, missing_grads="skip")
    model, optimizer = copied((model, optimizer))
    model.more = nn.Parameter(torch.ones(3, dtype=torch.float64))
    backward(model, i)
    optimizer.step()  # it has no gradient
    backward(model, i)
    model.more.grad = torch.ones_like(model.more)
    _refused(optimizer, model, NormMismatchError, r"'more' is new since the optimizer was made(.|\n)*params=\[...\]")
    model.more.requires_grad_(False)
    optimizer.step()
    of_some = ModularOptimizer(optimizer.norm, lr=0.1, params=[model.two.weight])
    model.more.requires_grad_(True)
    of_some.step()


class Tied(nn.Module):
    def __init__(self, is_tied: bool):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, i):
        return self.head(self.table(i).tanh())


@pytest.mark.parametrize("is_tied", [True, False])
def test_what_is_tied_or_untied_later_is_refused(is_tied):
    """The norm is that of the model as it was: what both did together, or each by itself."""
    torch.manual_seed(seeded(0))
    model, i = Tied(is_tied), torch.arange(7).view(1, 7)
    optimizer = ModularOptimizer(model, i, lr=0.1, missing_grads="skip")
    model(i).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model.head.weight = nn.Parameter(model.table.weight.detach().clone()) if is_tied else model.table.weight
    model(i).square().mean().backward()
    error, message = (
        (NormMismatchError, "'head.weight' is new") if is_tied else (GradientError, "'head.weight' has been replaced")
    )
    _refused(optimizer, model, error, message)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("resize", [lambda t: torch.cat([t, t]), lambda t: t[:-1], lambda t: t[:, :2].clone()])
def test_parameters_that_have_another_shape_by_now_are_refused(resize, momentum):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, momentum=momentum)
    backward(model, i)
    optimizer.step()
    backward(model, i)
    model.table.weight.grad = None
    model.table.weight.data = resize(model.table.weight.data)
    model.table.weight.grad = torch.ones_like(model.table.weight)
    _refused(optimizer, model, NormMismatchError, r"'table.weight' had the shape \[7, 8\] when the norm was derived, and has")


def test_parameters_that_are_not_the_models_are_refused():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, params=[model.one.weight])
    with pytest.raises(NormMapKeyError, match=r"does not know 'new': Tensor.*\n.*Model\n"):
        optimizer.add_param_group({"params": [("new", nn.Parameter(torch.ones(8, 8)))]})
    with pytest.raises(NormMapKeyError, match="does not know a parameter"):
        ModularOptimizer(model, i, lr=0.1, params=nn.Linear(8, 8).parameters())
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {model.two.weight}})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0, got -1.0"),
        ({"lr": math.nan}, "lr must be a number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"momentum": 1.0}, "momentum must be a number >= 0 and < 1"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"method": "qr"}, "method must be one of 'newton_schulz', 'newton_schulz_bf16', 'svd'"),
        ({"missing_grads": "no"}, "missing_grads must be one of 'error', 'skip'"),
        ({"nonfinite_grads": None}, "nonfinite_grads must be one of"),
        ({"mode": "best"}, "mode"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    model, i = made()
    with pytest.raises(NormMismatchError, match=message):
        ModularOptimizer(model, i, **({"lr": 0.1} | options))


def test_a_schedule_that_goes_wrong_is_refused_before_anything_moves():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    backward(model, i)
    before = values(model)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(NormMismatchError, match="lr must be"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())


def test_decay_that_would_flip_a_parameter_is_refused():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=1.0, weight_decay=1e4)
    backward(model, i)
    before = values(model)
    with pytest.raises(NormMismatchError, match=r"of 'table.weight' \* weight_decay 10000 exceeds 1"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in values(model).items())


@pytest.mark.parametrize("training", [True, False])
def test_spectral_normalization_in_training_and_in_evaluation(training):
    """In training it writes its vectors (`out=`) in each forward; what it computes is the same in both."""
    torch.manual_seed(seeded(0))
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16), n_power_iterations=5)
    model, x = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 3)), torch.randn(32, 6)
    labels = x[:, :3].argmax(-1)
    optimizer = ModularOptimizer(model.train(training), x, lr=0.3, noise_adaptation=0.95)
    model.train()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():  # power iterations are behind a weight that moves
        for _ in range(100):
            model(x)
    assert torch.linalg.matrix_norm(first.weight.detach(), 2).item() == pytest.approx(1, abs=0.05)


class TakesAll(nn.Module):
    """Names of arguments that it does not know change nothing, as in models of transformers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, eps=0.0, **kwargs):
        return self.layer(x) + eps


@pytest.mark.parametrize("model", [TakesAll, lambda: nn.Linear(4, 3), lambda: torch.compile(TakesAll(), backend="eager")])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"maximize": True}, r"no option 'maximize', and \w+.forward no argument.*\n.*negate the loss"),
        ({"betas": (0.9, 0.95)}, r"no option 'betas'(.|\n)*momentum=beta_1"),
        ({"foreach": True}, r"no option 'foreach'(.|\n)*leave it out"),
        ({"fused": True}, "no option 'fused'"),
        ({"weight_decya": 0.1}, r"no option 'weight_decya'(.|\n)*did you mean  'weight_decay'"),
        ({"nestrov": True}, "no option 'nestrov'"),
    ],
)
def test_options_of_other_optimizers_do_not_go_to_the_model(model, option, message):
    torch.manual_seed(seeded(0))
    with pytest.raises(NormMismatchError, match=message):
        ModularOptimizer(model(), torch.randn(2, 4), lr=0.1, **option)


def test_an_argument_of_the_model_may_have_the_name_of_an_option():
    torch.manual_seed(seeded(0))
    model = TakesAll()
    optimizer = ModularOptimizer(model, torch.randn(2, 4), lr=0.1, eps=0.5, attention_mask=None)
    assert set(optimizer.norm.targets) == {"layer.weight", "layer.bias"}
    ModularOptimizer(ModularNorm(model, torch.randn(2, 4), maximize=True), lr=0.1)  # the model's own, of which it says nothing


def test_a_group_has_no_options_of_other_optimizers():
    torch.manual_seed(seeded(0))
    model = TakesAll()
    with pytest.raises(NormMismatchError, match="no option 'maximize'"):
        ModularOptimizer(model, torch.randn(2, 4), lr=0.1, params=[{"params": model.parameters(), "maximize": True}])
    ModularOptimizer(model, torch.randn(2, 4), lr=0.1, params=[{"params": model.parameters(), "algorithm": "muon"}])


@pytest.mark.parametrize(
    "other", [torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["AdamW", "SGD"]
)
def test_the_state_of_another_optimizer_is_refused_and_nothing_changes(other):
    (model, i), (same, _) = made(), made()
    loaded, fresh = (ModularOptimizer(m, i, lr=0.2) for m in (model, same))
    with pytest.raises(NormMismatchError, match="the loaded state is of another optimizer: its groups have no .*'project'"):
        loaded.load_state_dict(other(model.parameters()).state_dict())
    for m, optimizer in ((model, loaded), (same, fresh)):
        backward(m, i)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("momentum, what", [(0.9, "momentum_buffer"), (0.0, "square_average")])
def test_the_state_of_parameters_of_other_shapes_is_refused_and_nothing_changes(momentum, what):
    def of_width(n: int) -> tuple[nn.Module, ModularOptimizer]:
        model = nn.Sequential(nn.Linear(4, n), nn.LayerNorm(n), nn.Linear(n, 3))
        optimizer = ModularOptimizer(model, torch.ones(2, 4), lr=0.1, momentum=momentum, noise_adaptation=0.9)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (_, narrow), (_, wide) = of_width(5), of_width(6)
    before = copy.deepcopy(wide.state_dict())
    saved = narrow.state_dict()
    saved["param_groups"][0]["lr"] = 7.0
    with pytest.raises(NormMismatchError, match=f"is of another shape(.|\\n)*{what}"):
        wide.load_state_dict(saved)
    assert wide.param_groups[0]["lr"] == 0.1
    for i, state in wide.state_dict()["state"].items():
        torch.testing.assert_close(state, before["state"][i], rtol=0, atol=0)
