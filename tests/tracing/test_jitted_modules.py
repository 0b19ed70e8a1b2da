"""What ``thunder.jit`` gives for a module is used as the module is: each use of one, and the call after it, as in eager mode."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from tests.seeds import seeded
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform


class Model(nn.Module):
    """With a parameter, a buffer, modules and attributes of its own, and a ``train`` that keeps a part of it in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3))
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.randn(3))
        self.factor = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x)) * self.gain + self.shift * self.factor

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        self.norm.eval()
        return self

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.factor


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Around(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def _names(m: nn.Module) -> Any:
    kinds = (m.named_parameters(), m.named_buffers(), m.named_children(), m.named_modules())
    return [*m.state_dict()], [[name for name, _ in kind] for kind in kinds], next(m.modules()) is m


def _assigned(m: nn.Module) -> Any:
    m.gain = nn.Parameter(torch.full((3,), 3.0))
    m.inner = nn.Linear(3, 3, bias=False)
    nn.init.ones_(m.inner.weight)
    m.shift = torch.zeros(3)
    m.factor = 5
    return [m.gain, m.factor, *m.parameters()]


def _removed(m: nn.Module) -> Any:
    del m.gain
    m.gain = torch.ones(3)
    return [*m.state_dict()]


def _registered(m: nn.Module) -> Any:
    m.register_parameter("gain", nn.Parameter(torch.ones(3)))
    m.register_buffer("shift", torch.ones(3), persistent=False)
    m.add_module("more", nn.Linear(1, 1))
    return [*m.state_dict(), *dict(m.named_parameters())]


def _loaded(m: nn.Module, **options: Any) -> Any:
    seen: list[str] = []
    m.register_load_state_dict_post_hook(lambda module, keys: seen.append("loaded"))
    state = {k: v * 2 for k, v in m.state_dict().items() if k != "gain"}
    return [list(keys) for keys in m.load_state_dict(state, strict=False, **options)], seen


def _called_with_hooks(m: nn.Module, x: torch.Tensor) -> Any:
    before = m.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    after = m.register_forward_hook(lambda module, args, out: out + 1)
    found = m(x)
    before.remove()
    after.remove()
    return found


def _functional(m: nn.Module, x: torch.Tensor) -> Any:
    given = {"gain": torch.ones(3), "shift": torch.zeros(3), "inner.weight": torch.eye(3)}
    return torch.func.functional_call(m, given, (x,))


def _gradients(m: nn.Module, x: torch.Tensor) -> Any:
    given = {name: p.detach() for name, p in m.named_parameters()}
    return torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).sum())(given)


def _averaged(m: nn.Module, x: torch.Tensor) -> Any:
    average = AveragedModel(m)
    average.update_parameters(m)
    with torch.no_grad():
        m.gain.zero_()
    return average(x), m(x)


def _twice(module: nn.Module, args: tuple, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def _minus(module: nn.Module, args: tuple) -> tuple:
    return (-args[0],)


def _pickled(m: nn.Module, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return pickle.loads(pickle.dumps(m))(x), torch.load(file, weights_only=False)(x)


def _inside(m: nn.Module, x: torch.Tensor) -> Any:
    around = Around(m).eval()
    state = {k: v * 2 for k, v in around.state_dict().items()}
    around.load_state_dict(state)
    return [*state], [name for name, _ in around.named_parameters()], around(x), around.double()(x.double()), around.float()(x)


USES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "names": lambda m, x: _names(m),
    "attributes": lambda m, x: [m.factor, m.head(x), hasattr(m, "nothing"), "factor" in dir(m)],
    "assigned": lambda m, x: _assigned(m),
    "removed": lambda m, x: _removed(m),
    "registered": lambda m, x: _registered(m),
    "loaded": lambda m, x: _loaded(m),
    "loaded by assignment": lambda m, x: _loaded(m, assign=True),
    "converted": lambda m, x: [m.to(torch.float64) is m, m(x.double()), m.float() is m],
    "trained": lambda m, x: [m.train() is m, m.training, m.norm.training, m.eval() is m],
    "frozen": lambda m, x: m.requires_grad_(False) is m,
    "applied": lambda m, x: m.apply(lambda part: nn.init.ones_(part.weight) if isinstance(part, nn.Linear) else None) is m,
    "emptied": lambda m, x: [m.to_empty(device="cpu") is m, [t.data.fill_(1) for t in (*m.parameters(), *m.buffers())]],
    "as a vector": lambda m, x: vector_to_parameters(2 * parameters_to_vector(m.parameters()), m.parameters()),
    "pruned": lambda m, x: [prune.l1_unstructured(m, "gain", amount=1) is m, [*m.state_dict()]],
    "with parametrizations": lambda m, x: [
        parametrize.register_parametrization(m, "gain", Double()) is m,
        parametrize.register_parametrization(m.inner, "weight", Double()) is m.inner,
        [*m.state_dict()],
    ],
    "with hooks": _called_with_hooks,
    "functional": _functional,
    "differentiated": _gradients,
    "copied": lambda m, x: [copy.deepcopy(m)(x), copy.copy(m)(x)],
    "copied with hooks": lambda m, x: [
        m.register_forward_hook(_twice),
        m.register_forward_pre_hook(_minus),
        copy.deepcopy(m)(x),
        copy.copy(m)(x),
        *_pickled(m, x),
    ][2:],
    "averaged": _averaged,
    "pickled": _pickled,
    "inside": _inside,
}


def _same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want)
        assert got.requires_grad == want.requires_grad
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            _same(a, b)
    elif isinstance(want, dict):
        assert [*got] == [*want]
        _same([*got.values()], [*want.values()])
    elif not isinstance(want, nn.Module):
        assert got == want


def _jit(m: nn.Module, *more: Transform) -> ThunderModule:
    return thunder.jit(m, transforms=[NormTransform(), *more])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_called", [False, True], ids=["new", "called"])
def test_a_jitted_module_is_used_as_the_model(use, is_called):
    torch.manual_seed(seeded())
    model, x = Model().eval(), torch.randn(4, 3)
    jitted = _jit(copy.deepcopy(model))
    for _ in range(3 * is_called):  # Thunder's search, then ours
        jitted(x)
    _same(USES[use](jitted, x), USES[use](model, x))
    _same(jitted(x), model(x))
    assert "(_model): " in repr(jitted)


@pytest.mark.parametrize("make", [SubclassTransform, CheckpointTransform])
def test_under_other_transforms_of_ours(make):
    torch.manual_seed(seeded())
    model, x = Model().eval(), torch.randn(4, 3)
    jitted = thunder.jit(copy.deepcopy(model), transforms=[make()])
    _same(_assigned(jitted), _assigned(model))
    _same(jitted(x), model(x))
    _same(copy.deepcopy(jitted)(x), model(x))


def test_containers():
    torch.manual_seed(seeded())
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 3)
    jitted = _jit(copy.deepcopy(model))
    for m in (model, jitted):
        assert len(m) == 3
        assert [type(part) for part in m] == [nn.Linear, nn.ReLU, nn.Linear]
        m[1] = nn.Tanh()
    _same(jitted(x), model(x))


def test_it_is_an_instance_of_both_classes():
    jitted = _jit(Model())
    assert isinstance(jitted, Model)
    assert isinstance(jitted, ThunderModule)


def test_tensors_that_another_transform_puts_in_place_stay():
    class Doubled(Transform):
        def transform_module(self, model: ThunderModule) -> None:
            for name, p in model._overrides_parameters.items():
                model._overrides_parameters[name] = nn.Parameter(2 * p.detach())

    torch.manual_seed(seeded())
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    jitted = _jit(model, Doubled())
    _same(jitted(x), 2 * model(x))
    _same(jitted.state_dict()["weight"], 2 * model.weight.detach())


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, x: torch.vmap(f)(x),
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.functionalize(f)(x),
    ],
    ids=["vmap", "grad", "jvp", "hessian", "functionalize"],
)
def test_torchs_transforms_of_a_jitted_function(transformed):
    torch.manual_seed(seeded())
    x = torch.randn(3, 4)
    f = lambda x: (x * 1).mul_(x).sin().reshape(-1) * x.ndim  # noqa: E731
    jitted = thunder.jit(f, transforms=[NormTransform()])
    _same(transformed(jitted, x), transformed(f, x))
    jitted(x)
    _same(transformed(jitted, x), transformed(f, x))
