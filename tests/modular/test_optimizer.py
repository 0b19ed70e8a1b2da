"""ModularOptimizer against the same steps written out with numpy's SVD, and as a citizen of torch.optim."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.forks import FORKS
from tests.modular.optimized import backward, lmo, made, values
from thunder_norm.errors import NormMapKeyError, NormMismatchError
from thunder_norm.modular import ModularNorm, ModularOptimizer, duality


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_steps_are_those_of_the_formula(momentum, nesterov, weight_decay):
    model, i = made()
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    optimizer = ModularOptimizer(model, i, lr=0.2, method="svd", **options)
    targets = optimizer.norm.targets
    assert targets["fixed"] == 0
    assert all(t > 0 for name, t in targets.items() if name != "fixed")
    expected = {name: p.numpy() for name, p in values(model).items()}
    past = {name: np.zeros_like(p) for name, p in expected.items()}
    for step in range(4):
        backward(model, i, step)
        grads = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, g in grads.items():
            past[name] = momentum * past[name] + (1 - momentum) * g
            d = momentum * past[name] + (1 - momentum) * g if nesterov else past[name]
            size = 0.2 * targets[name]
            expected[name] = (1 - size * weight_decay) * expected[name] - size * lmo(name, d)
        for name, p in values(model).items():
            np.testing.assert_allclose(p.numpy(), expected[name], rtol=0, atol=1e-10, err_msg=name)


def test_a_step_has_modular_norm_lr_and_lowers_the_loss():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.03, momentum=0.0, method="svd")
    backward(model, i)
    before, grads = values(model), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    step = {name: p - before[name] for name, p in values(model).items()}
    assert optimizer.norm(step).item() == pytest.approx(0.03, rel=1e-9)
    assert sum((grads[name] * step[name]).sum().item() for name in grads) < 0


def test_matrices_of_one_shape_are_orthogonalized_in_one_batch(monkeypatch):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    shapes = []
    real = duality.OperatorBall.lmo
    monkeypatch.setattr(
        duality.OperatorBall, "lmo", lambda self, g, *rest: (shapes.append(tuple(g.shape)), real(self, g, *rest))[1]
    )
    backward(model, i)
    optimizer.step()
    assert sorted(shapes) == [(2, 8, 8), (3, 8), (8, 8, 3)]  # one and two; head; the kernel


def test_large_tables_move_piece_by_piece_by_the_same_formula():
    table = torch.nn.Embedding(1400, 200)  # more than two pieces
    optimizer = ModularOptimizer(table, torch.tensor([1, 2]), lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.5)
    assert len(optimizer.norm.balls["weight"].pieces(table.weight)) > 1 and optimizer.norm.targets == {"weight": 1.0}
    expected, past = table.weight.detach().to(torch.float64), torch.zeros(1400, 200, dtype=torch.float64)
    for _ in range(3):
        g = torch.randn(1400, 200)
        g[::3] = 0
        table.weight.grad = g
        optimizer.step()
        past = 0.9 * past + 0.1 * g.to(torch.float64)
        d = 0.9 * past + 0.1 * g.to(torch.float64)
        lengths = d.square().mean(1, keepdim=True).sqrt()
        expected = (1 - 0.3 * 0.5) * expected - 0.3 * d / torch.where(lengths > 0, lengths, 1)
        torch.testing.assert_close(table.weight.detach().to(torch.float64), expected, atol=1e-5, rtol=1e-5)


def test_groups_have_options_of_their_own():
    model, i = made()
    norm = ModularNorm(model, i, mode="typical")
    groups = [
        {"params": [model.one.weight], "lr": 0.5},
        {"params": model.two.parameters(), "weight_decay": 1.0, "momentum": 0.0},
        {"params": [("whatever", model.head.weight)], "project": True},
    ]
    optimizer = ModularOptimizer(norm, lr=0.1, params=groups)
    optimizer.add_param_group({"params": model.table.weight, "lr": 0.0})
    assert [g["param_names"] for g in optimizer.param_groups] == [
        ["one.weight"],
        ["two.weight"],
        ["head.weight"],
        ["table.weight"],
    ]
    backward(model, i)
    before = values(model)
    optimizer.step()
    moved = {
        name: norm.balls[name].norm(p - before[name]).item() / norm.targets[name]
        for name, p in values(model).items()
        if name != "fixed"
    }
    assert moved["one.weight"] == pytest.approx(0.5, rel=0.01)
    assert moved["table.weight"] == moved["conv.weight"] == moved["head.bias"] == 0
    decayed = before["two.weight"] * (1 - 0.1 * norm.targets["two.weight"])
    size = norm.balls["two.weight"].norm(model.two.weight.detach() - decayed).item()
    assert size == pytest.approx(0.1 * norm.targets["two.weight"], rel=0.01)
    assert norm.balls["head.weight"].norm(model.head.weight.detach()) <= 1 + 1e-9


def test_a_group_may_be_empty():
    model, i = made()
    other, _ = made()
    groups = [{"params": [], "lr": 0.5}, {"params": [p for p in model.parameters() if p.requires_grad]}]
    optimizer, plain = ModularOptimizer(model, i, lr=0.1, params=groups), ModularOptimizer(other, i, lr=0.1)
    optimizer.add_param_group({"params": ()})
    assert [len(g["param_names"]) for g in optimizer.param_groups] == [0, len(groups[1]["params"]), 0]
    for _ in range(2):
        for trained, its in ((model, optimizer), (other, plain)):
            backward(trained, i)
            its.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(p, values(other)[name]) for name, p in values(model).items())


def test_decay_keeps_norms_below_its_inverse_and_projection_below_1():
    for options, limit in (({"weight_decay": 2.0}, 0.5), ({"project": True}, 1.0)):
        model, i = made()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.01)
        norm = ModularNorm(model, i, mode="typical")
        optimizer = ModularOptimizer(norm, lr=0.4 / max(norm.targets.values()), method="svd", **options)
        largest = 0.0
        for step in range(40):
            backward(model, i, 0 if step % 2 else step)
            optimizer.step()
            sizes = {n: norm.balls[n].norm(p.detach()).item() for n, p in model.named_parameters() if p.requires_grad}
            largest = max(largest, *sizes.values())
            assert all(size <= limit * (1 + 1e-6) for size in sizes.values()), sizes
        assert largest > 0.9 * limit  # they do grow that far


def test_state_is_saved_and_restored_bit_for_bit():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            backward(model, i, step)
            optimizer.step()
            scheduler.step()

    train(model, optimizer, scheduler, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    train(model, optimizer, scheduler, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, _ = made(seed=1)
    resumed = ModularOptimizer(other, i, lr=7.0)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    following = torch.optim.lr_scheduler.CosineAnnealingLR(resumed, 8)
    following.load_state_dict(saved["scheduler"])
    assert resumed.param_groups[0]["lr"] == saved["optimizer"]["param_groups"][0]["lr"]
    train(other, resumed, following, range(3, 6))
    for name, p in values(model).items():
        assert torch.equal(p, values(other)[name]), name


@pytest.mark.parametrize(
    "copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["itself", "deepcopy", "pickle"]
)
def test_a_state_is_loaded_again_and_again(copied: Callable):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    backward(model, i)
    optimizer.step()
    saved, again = copy.deepcopy(optimizer.state_dict()), copied(optimizer)
    for _ in range(2):
        again.load_state_dict(saved)
        assert again.state_dict()["param_groups"] == saved["param_groups"]
    with pytest.raises(NormMismatchError, match="no option 'differentiable'"):
        again.add_param_group({"params": [], "differentiable": True})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_step_like_the_original(copied: Callable):
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    backward(model, i)
    optimizer.step()
    other_model, other = copied((model, optimizer))
    for m, o in ((model, optimizer), (other_model, other)):
        backward(m, i, 1)
        o.step()
    assert all(torch.equal(p, values(other_model)[name]) for name, p in values(model).items())
    assert other.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]


def _send_groups(pickled: bytes, pipe: Connection) -> None:
    """From a process that has made no norm."""
    pipe.send(pickle.loads(pickled).norms["weight"].kind.groups)


def test_the_kind_of_a_grouped_kernel_is_pickled_by_a_name_that_any_process_knows():
    pickled = pickle.dumps(ModularNorm(nn.Conv1d(6, 6, 3, groups=3), torch.randn(2, 6, 5)))
    mine, its = FORKS.Pipe()
    process = FORKS.Process(target=_send_groups, args=(pickled, its))
    process.start()
    its.close()
    assert mine.recv() == 3
    process.join()


def test_loading_the_state_of_other_parameters_is_refused():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    wrapped = copy.deepcopy(state)
    wrapped["param_groups"][0]["param_names"] = [f"module.{n}" for n in names]  # as DistributedDataParallel names them
    optimizer.load_state_dict(wrapped)
    assert optimizer.param_groups[0]["param_names"] == names
    state["param_groups"][0] = state["param_groups"][0] | {"param_names": names[::-1], "lr": 9.0}
    with pytest.raises(NormMapKeyError, match=r"'head.bias' where this optimizer has 'table.weight'"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_a_model_with_wrapped_parts_is_loaded_without_them_and_back():
    model, i = made()
    (plain, _), (wrapped, _) = made(), made()
    wrapped.two = checkpoint_wrapper(torch.compile(wrapped.two, backend="eager"))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = wrapped

        def forward(self, i):
            return self.inside(i)

    outer = Outer()
    of_plain, of_wrapped = ModularOptimizer(plain, i, lr=0.1), ModularOptimizer(outer, i, lr=0.1)
    names = of_wrapped.param_groups[0]["param_names"]
    assert "inside.two._checkpoint_wrapped_module._orig_mod.weight" in names
    backward(plain, i)
    of_plain.step()
    of_wrapped.load_state_dict(copy.deepcopy(of_plain.state_dict()))
    wrapped.load_state_dict({name.replace("two.", "two._orig_mod."): t for name, t in plain.state_dict().items()})
    back = ModularOptimizer(model, i, lr=0.1)
    back.load_state_dict(copy.deepcopy(of_wrapped.state_dict()))
    assert of_wrapped.param_groups[0]["param_names"] == names
    model.load_state_dict(plain.state_dict())
    for of, optimizer in ((plain, of_plain), (outer, of_wrapped), (model, back)):
        of.zero_grad()
        backward(of, i)
        optimizer.step()
    for p, q, r in zip(plain.parameters(), outer.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, r)
        torch.testing.assert_close(p, q)


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(i).square().mean()
        loss.backward()
        return loss

    before = values(model)
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert not torch.equal(model.one.weight, before["one.weight"])


def test_a_learning_rate_schedule_sets_the_size_of_steps():
    model, i = made()
    optimizer = ModularOptimizer(model, i, lr=0.4, momentum=0.0, method="svd")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        backward(model, i)
        before = values(model)
        optimizer.step()
        scheduler.step()
        moved = {name: p - before[name] for name, p in values(model).items()}
        assert optimizer.norm(moved).item() == pytest.approx(0.4 * 0.5**step, rel=1e-9)


def test_low_precision_parameters_move_in_their_own_dtype():
    model, i = made(dtype=torch.bfloat16)
    optimizer = ModularOptimizer(model, i, lr=1.0)
    backward(model, i)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2**-10)  # much shorter than the step, which 8 bits then have to 1 %
    before = values(model)
    optimizer.step()
    moved = {name: (p - before[name]).float() for name, p in values(model).items()}
    assert model.one.weight.dtype == optimizer.state[model.one.weight]["momentum_buffer"].dtype == torch.bfloat16
    assert optimizer.norm(moved).item() == pytest.approx(1.0, rel=0.05)


def test_tied_parameters_move_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 8)
            self.head = nn.Linear(8, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i):
            return self.head(self.table(i))

    model, i = Tied(), torch.arange(7)
    optimizer = ModularOptimizer(model, i, lr=0.1, params=[model.head.weight])
    assert optimizer.param_groups[0]["param_names"] == ["table.weight"]
    backward(model, i)
    before = values(model)
    optimizer.step()
    step = {name: p - before[name] for name, p in values(model).items()}
    assert optimizer.norm(step).item() == pytest.approx(0.1, rel=0.01)


def test_a_norm_that_was_derived_is_taken_as_it_is():
    model, i = made()
    norm = ModularNorm(model, i, masses={"table": 0.0}, mode="typical")
    assert ModularOptimizer(norm, lr=0.1).norm is norm
    for wrong in ({"mode": "bound"}, {"masses": {}}):
        with pytest.raises(NormMismatchError, match="a ModularNorm is complete"):
            ModularOptimizer(norm, lr=0.1, **wrong)
    with pytest.raises(NormMismatchError, match="a ModularNorm is complete"):
        ModularOptimizer(norm, i, lr=0.1)


def test_the_optimizer_of_a_compiled_model_moves_the_model_inside():
    model, i = made(dtype=torch.float32)
    optimizer = ModularOptimizer(torch.compile(model, backend="eager"), i, lr=0.1)
    backward(model, i)
    before = values(model)
    optimizer.step()
    assert not torch.equal(model.one.weight, before["one.weight"])


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch whose gradients have the dtype of their parameters")
def test_momentum_is_in_the_dtype_of_the_gradients_and_saved_so():
    model, i = made()
    gradients = []
    for step in range(3):
        backward(model, i, step)
        gradients.append({name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})
    model.bfloat16()
    optimizer = ModularOptimizer(ModularNorm(model, i), lr=0.2, momentum=0.9, method="svd")
    expected, past = values(model), {name: torch.zeros_like(g) for name, g in gradients[0].items()}

    def stepped(model, optimizer, grads):
        for name, p in model.named_parameters():
            p.grad = None
            p.grad_dtype, p.grad = torch.float32, grads.get(name)
        optimizer.step()

    for grads in gradients[:2]:
        stepped(model, optimizer, grads)
        for name, g in grads.items():
            past[name] = 0.9 * past[name] + 0.1 * g
            p, size = model.get_parameter(name), 0.2 * optimizer.norm.targets[name]
            torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], past[name], rtol=1e-5, atol=1e-8)
            if name in ("head.weight", "norm.weight", "table.weight"):  # others have singular values that float32 does not know
                step = size * torch.as_tensor(lmo(name, past[name].double().numpy()))
                torch.testing.assert_close(p, (expected[name] - step).bfloat16(), rtol=2**-7, atol=size * 0.01)
        expected = values(model)
    other = copy.deepcopy(model)
    again = ModularOptimizer(ModularNorm(other, i), lr=0.2, momentum=0.9, method="svd")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, again)):
        stepped(m, o, gradients[2])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_model_goes_on_in_another_dtype_with_the_momentum_it_has():
    model, i = made()
    model.float()
    optimizer = ModularOptimizer(ModularNorm(model, i), lr=0.2, momentum=0.9, method="svd")
    backward(model, i)
    before = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    model.double()
    backward(model, i, 1)
    optimizer.step()
    for name, g in before.items():
        p = model.get_parameter(name)
        assert p.grad is not None
        expected = 0.9 * 0.1 * g + 0.1 * p.grad
        moved = optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_a_parameter_that_is_taken_out_of_its_group_stays_where_it_is():
    (model, i), (same, _) = made(), made()
    optimizers = [ModularOptimizer(m, i, lr=0.2, method="svd") for m in (model, same)]
    taken = optimizers[0].param_groups[0]["params"].pop(1)
    name = next(n for n, p in model.named_parameters() if p is taken)
    start = taken.detach().clone()
    for m, optimizer in zip((model, same), optimizers, strict=True):
        backward(m, i)
        optimizer.step()
    for n, p in model.named_parameters():
        assert torch.equal(p, start if n == name else same.get_parameter(n)), n
