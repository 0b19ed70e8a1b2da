"""What plain Thunder does, as text, for `tests/tracing/test_hooks.py`.

``python -m tests.tracing.untouched``, a process that has imported Thunder alone, writes three lines of JSON:
from a fork, the traces and errors of programs without a transform of ours, as they are without us;
what is in Thunder's modules, tables and classes before we are imported, after that, and after a use;
and those programs again.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import runpy
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests import ROOT
from tests.seeds import seeded

# As our import does it, which a torch that came after Thunder needs; the file is run without its package.
runpy.run_path(str(ROOT / "thunder_norm" / "_thunder.py"))["import_thunder"]()

import thunder  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402, F401 - its module is one of those looked at
from thunder.transforms import cudagraph  # noqa: E402, F401 - as is this one

warnings.simplefilter("ignore")
gc.freeze()
gc.set_threshold(100_000, 20, 50)  # both as in tests/surroundings.py
sys.setswitchinterval(1e-4)

torch.manual_seed(seeded())
_MODULE = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU(), torch.nn.Dropout(0.0))
_ONE_LAYER = torch.nn.Linear(3, 2)  # what swaps parameters is interpreted for each of a module's
_FLAGS = {"on": True, "scale": 2}


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.add_(x).mul_(2)
    return y


def _branches(x: torch.Tensor) -> torch.Tensor:
    if _FLAGS["on"] and x.ndim == 2 and x.dtype == torch.float32:
        return x * _FLAGS["scale"]
    return x


def _caught(x: torch.Tensor) -> torch.Tensor:
    try:
        raise ValueError("no")
    except ValueError:
        return x.sum()


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 2


# Programs that Thunder does right, does otherwise than torch, and fails on: all of them have to stay what they are.
PROGRAMS: dict[str, Callable] = {
    "elementwise": lambda x: torch.tanh(x) * 2 + x.exp(),
    "module": _MODULE,
    "matmul": lambda x: (x @ x.mT).softmax(-1),
    "in place": _in_place,
    "branches": _branches,
    "caught": _caught,
    "autograd function": lambda x: _Double.apply(x) + 1,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "random": lambda x: F.dropout(x, 0.5) + torch.rand_like(x),
    "list": lambda x: [x + i for i in range(3)],
    "dict": lambda x: {"a": x, "b": [x * 2, None, 3]},
    "shapes": lambda x: x.view(-1).unflatten(0, (3, -1)).permute(1, 0)[..., None].flatten(),
    "several results": lambda x: x.sort(),
    "a field": lambda x: x.sort().values,
    "type": lambda x: x if type(x) is torch.Tensor else x + 1,
    "dtype": lambda x: x if x.dtype is torch.float32 else x + 1,
    "device": lambda x: x if x.device == torch.device("cpu") else x + 1,
    "eye": lambda x: torch.eye(3) + x.sum(),
    "float": lambda x: float(x.sum()) * x,
    "int": lambda x: int(3.5) * x,
    "complex": lambda x: complex(1, 2) * x,
    "condition": lambda x: x if x.sum() > 0 else -x,
    "item": lambda x: x * x.sum().item(),
    "functional_call": lambda x: functional_call(_ONE_LAYER, dict(_ONE_LAYER.named_parameters()), (x,)),
    "checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "jit inside": lambda x: thunder.jit(torch.sin)(x),
    "lerp": lambda x: torch.lerp(x, x + 1, 0.3),
    "nll_loss": lambda x: F.nll_loss(x, torch.tensor([0, -100, 2])),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "where": lambda x: x.where(x > 0, 0),
    "promotion of bool": lambda x: (x > 0) * 2 + 1,
    "promotion of scalars": lambda x: x.double().sum() * x.to(torch.complex64).sum(),
    "promotion of uint8": lambda x: x.to(torch.uint8) * x.long(),
    "reshaped scalar": lambda x: x.double().sum().reshape(1) * x,
    "adjoint": lambda x: x.mH,
    "remainder": lambda x: x % 2,
    "sum of a list": lambda x: sum([x, x]),
    "partial": lambda x: __import__("functools").partial(torch.add, x)(x),
    "aminmax": lambda x: torch.aminmax(x),
    "lstsq": lambda x: torch.linalg.lstsq(x, x),
    "mask": lambda x: x[x > 0],
    "gradient": lambda x: torch.autograd.grad(x.sum(), x),
    "wrong argument": lambda x: torch.sum(x, dim="two"),
    "own class": lambda x: types.SimpleNamespace(a=x).a + 1,
    "std_mean": lambda x: torch.std_mean(x)[1],
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "embedding": lambda x: F.embedding(torch.tensor([0, -1]), x, padding_idx=-1),
    "a wrapper": lambda x: x * 2,
}


def programs() -> dict[str, Any]:
    """For each program the prologue, the computation and its backward, or the error; of a call with gradients, of every third without too."""
    found: dict[str, Any] = {}
    for number, (name, f) in enumerate(PROGRAMS.items()):
        for requires_grad in (True, False)[: 1 + (number % 3 == 0)]:
            torch.manual_seed(seeded())
            x = torch.linspace(-1, 2, 9).reshape(3, 3)
            x = (TwoTensor(x, x + 1) if name == "a wrapper" else x).requires_grad_(requires_grad)
            jitted = thunder.jit(f)
            try:
                out = jitted(x)
                traces = [
                    thunder.last_prologue_traces(jitted)[-1],
                    thunder.last_traces(jitted)[0],
                    thunder.last_traces(jitted)[-1],
                ]
                traces += thunder.last_backward_traces(jitted)[-1:] if requires_grad else []
                text = [_without_numbers(str(t)) for t in traces] + [_without_numbers(repr(out))]
            except BaseException as e:  # noqa: BLE001 - whatever it is has to stay it
                text = [type(e).__name__, _without_numbers(str(e))]
            found[f"{name}, {'with' if requires_grad else 'without'} gradients"] = text
    return found


def _without_numbers(text: str) -> str:
    """Without addresses, times and what the process counts."""
    return re.sub(r"0x[0-9a-f]+|backward_fn_\d+|(?<=_Double_)\d+_\d+|object at \S+|\(took .*?\)", "", text)


def state() -> dict[str, str]:
    """What stands in Thunder's modules, the dicts, lists and sets in those, and their classes: what it is, and which object."""
    found: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        if module is None or name.partition(".")[0] != "thunder":
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, types.ModuleType) or attribute == "__builtins__":
                continue
            place = f"{name} {attribute}"
            found[place] = f"{type(value).__name__} {id(value)}"
            if isinstance(value, dict):
                found |= {f"{place}[{_shown(k)}]": f"{_shown(v)} {id(v)}" for k, v in list(value.items())}
            elif isinstance(value, set | frozenset):
                found |= {f"{place} has {_shown(v)}": "" for v in list(value)}
            elif isinstance(value, list):
                found |= {f"{place}[{i}]": f"{_shown(v)} {id(v)}" for i, v in enumerate(value)}
            elif isinstance(value, type) and value.__module__ == name:
                found |= {f"{place}.{k}": f"{type(v).__name__} {id(v)}" for k, v in vars(value).items()}
    return found | {"modules": " ".join(n for n in sys.modules if n.partition(".")[0] == "thunder")}


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value if isinstance(value, str) else '')}"


def _use() -> None:
    """Use of every kind: transforms of programs, of functions, of both, with norms, with wrappers and regions."""
    from thunder_norm import RMSTensor
    from thunder_norm.transforms import (
        CheckpointTransform,
        NormTransform,
        ProfileTransform,
        SplitBiasTransform,
        grad,
        hessian,
        vmap,
    )

    x, module = torch.linspace(-1, 2, 9).reshape(3, 3), copy.deepcopy(_MODULE)
    for transform in (NormTransform(), CheckpointTransform(), ProfileTransform(), SplitBiasTransform()):
        thunder.jit(module, transforms=[transform])(x.clone().requires_grad_()).sum().backward()
    thunder.jit(module, transforms=[NormTransform()])(RMSTensor(1.0, backing=x))
    thunder.jit(lambda x: checkpoint(lambda y: F.dropout(y), x, use_reentrant=False), transforms=[CheckpointTransform()])(
        x.clone().requires_grad_()
    )
    hessian(lambda x: (x % 2).sum())(x)
    thunder.jit(lambda x: vmap(grad(lambda y: torch.lerp(y, y * y, 0.5).sum()))(x))(x)


def main() -> None:
    import thunder.transforms.autocast
    import thunder.transforms.autodiff  # noqa: F401 - both are imported by us, and are no changes

    states = [state()]
    import thunder_norm
    import thunder_norm.transforms  # noqa: F401

    states.append(state())
    _use()
    states.append(state())
    _print(states)
    _print(programs())


def _print(answer: Any) -> None:
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    if not (child := os.fork()):
        _print(programs())
        sys.exit()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    main()
