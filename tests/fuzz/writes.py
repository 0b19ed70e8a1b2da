"""Random programs that write into parameters, buffers and constants, by their views too, against the same program in eager mode.

A write is seen by whatever reads the same memory afterwards, stays in the module after the call, and ends the norm that was measured
before it.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

from .program import Outcome, outcome_of

_numbers = itertools.count()

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

class Module(nn.Module):
    def __init__(self, trains, is_tied):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.register_buffer("r", torch.randn(4, 4))
        self.layer = nn.Linear(4, 4)
        self.q = self.w if is_tied else nn.Parameter(self.w.data.view(4, 4))
        self.requires_grad_(trains)
    def forward(self, x):
        c = torch.eye(4)
        v = c + 1
"""

USES = (
    "x = x @ self.w", "x = x @ self.q", "x = x @ self.w.t()", "x = F.linear(x, self.w)", "x = F.linear(x, self.w, self.b)", "x = self.layer(x)",
    "x = x + self.b", "x = x * self.b", "x = x + self.w[0]", "x = x * self.r[0]", "x = x @ self.r", "x = x + self.r.sum(0)",
    "x = x @ (self.w * 2)", "x = x @ (self.w + self.r)", "x = x @ c", "x = x + c[1]", "x = x @ v", "x = F.linear(x, v)", "x = x @ (v + 1)",
)  # fmt: skip
NAMES = (
    "v = self.w.t()", "v = self.w.view(4, 4)", "v = self.w[:]", "v = self.w * 1.5", "v = self.w.detach()", "v = self.w.data", "v = self.w.clone()",
    "v = self.r.t()", "v = self.r * self.w", "v = self.layer.weight", "v = c.t()", "v = self.q",
)  # fmt: skip
TARGETS = (
    "self.w", "self.w", "self.q", "self.r", "self.r", "self.b", "self.layer.weight", "self.w.data", "self.w.detach()", "self.w.t()",
    "self.w.view(-1)", "self.w[1:]", "self.r.t()", "self.r[0]", "self.r.diagonal()", "self.w.diagonal()",
    "torch.moveaxis(self.r, 0, 1)", "self.r.split([1, 3])[1]", "c", "v", "v.t()",
)  # fmt: skip
WRITES = (
    "{t}.mul_({k})", "{t}.add_({k})", "{t} *= {k}", "{t}.fill_({k})", "{t}.zero_()", "{t}.copy_({t} * {k})", "{t}.copy_(self.r.sum() * {k})",
    "{t}[...] = {k}", "{t}[0] = {k}", "{t}[1:] *= {k}", "{t}.clamp_(min={k})", "{t}.lerp_(torch.ones_like({t}), {k})", "{t}.data.mul_({k})",
    "{t}.data = {t}.data * {k}", "torch.mul({t}, {k}, out={t})", "nn.init.constant_({t}, {k})", "{t}.sub_(self.r.mean())", "{t}.requires_grad = True",
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """How a program is called: on plain tensors or on normed ones, under which grad mode, and whether its result has values."""

    call: Callable[[torch.nn.Module, torch.Tensor], Any]
    grad: bool = False
    has_values: bool = True


MODES = {
    "eager": Mode(lambda m, x: m(RMSTensor.of(x))),
    "real": Mode(lambda m, x: thunder.jit(m, transforms=[NormTransform()])(x)),
    "real, with gradients": Mode(lambda m, x: thunder.jit(m, transforms=[NormTransform()])(x), grad=True),
    "wrappers, with gradients": Mode(lambda m, x: thunder.jit(m, transforms=[SubclassTransform()])(x), grad=True),
    "executor, with gradients": Mode(lambda m, x: _one_by_one(thunder.jit(m, executors=[inductor]), x), grad=True),
    "normed": Mode(lambda m, x: thunder.jit(m, transforms=[NormTransform()])(RMSTensor.of(x))),
    "norm map": Mode(lambda m, x: build_norm_map(m, RMSTensor.of(x))(RMSTensor.of(x)), has_values=False),
}


@dataclass(frozen=True)
class Writing:
    """The statements of a module's forward."""

    statements: tuple[str, ...]
    trains: bool
    is_tied: bool
    mode: str
    seed: int

    def text(self) -> str:
        """The module."""
        return HEAD + "".join(f"        {s}\n" for s in self.statements) + "        return x\n"

    def module(self) -> torch.nn.Module:
        """A new one, with the same entries each time."""
        name, text = f"<writing_{next(_numbers)}>", self.text()
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        scope: dict[str, Any] = {}
        exec(compile(text, name, "exec"), scope)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return scope["Module"](self.trains, self.is_tied)

    def run(self) -> Outcome:
        """The result, its gradient, the state afterwards and the bound, to those of eager mode."""
        mode = MODES[self.mode]
        try:
            eager, ours = self.module(), self.module()
        except SyntaxError as e:
            return Outcome("no oracle", str(e))
        x = torch.linspace(-1, 2, 12).view(3, 4)
        xs = [x.clone().requires_grad_(mode.grad) for _ in range(2)]
        with contextlib.nullcontext() if mode.grad else torch.no_grad():
            try:
                expected = eager(xs[0])
                wanted = _gradients(expected, eager, xs[0])
            except Exception as e:  # noqa: BLE001 - what eager mode does not do, nobody has to
                return Outcome("no oracle", f"{type(e).__name__}: {e}")
            if expected.shape != (3, 4) or not expected.isfinite().all():
                return Outcome("no oracle", "nothing to compare")
            try:
                result = mode.call(ours, xs[1])
                found = _gradients(result, ours, xs[1])
            except Exception as e:  # noqa: BLE001 - an outcome
                return outcome_of(e)
        return self._compared(mode, (eager, expected, wanted), (ours, result, found))

    def _compared(self, mode: Mode, eager: tuple, ours: tuple) -> Outcome:
        values = getattr(ours[1], "backing", ours[1])
        if mode.has_values and not _close(values, eager[1]):
            return Outcome("wrong", f"the result is {values.tolist()}, not {eager[1].tolist()}")
        for name, wanted in eager[2].items() if mode.has_values else ():
            if not _close(ours[2].get(name), wanted):
                return Outcome("wrong", f"the gradient of {name} is {ours[2].get(name)}, not {wanted}")
        for (name, a), (_, b) in zip(ours[0].state_dict().items(), eager[0].state_dict().items(), strict=True):
            if mode.has_values and not _close(a, b):
                return Outcome("wrong", f"{name} is {a.tolist()} afterwards, not {b.tolist()}")
        bound, actual = getattr(ours[1], "norm_size", None), float(eager[1].detach().double().square().mean(-1).sqrt().max())
        if bound is not None and actual > float(bound) * (1 + 1e-4) + 1e-6:
            return Outcome("wrong", f"the norm is at most {float(bound)}, says the bound; it is {actual}")
        return Outcome("right")

    def smaller(self) -> Iterable[Writing]:
        """With fewer statements."""
        for i in range(len(self.statements)):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])

    def source(self) -> str:
        """A program that can be pasted."""
        guard = "contextlib.nullcontext()" if MODES[self.mode].grad else "torch.no_grad()"
        call = {
            "eager": "m(RMSTensor.of(x))",
            "normed": "thunder.jit(m, transforms=[NormTransform()])(RMSTensor.of(x))",
            "norm map": "build_norm_map(m, RMSTensor.of(x))(RMSTensor.of(x))",
            "wrappers, with gradients": "thunder.jit(m, transforms=[SubclassTransform()])(x)",
            "executor, with gradients": "thunder.jit(m, executors=[inductor])(x)",
        }.get(self.mode, "thunder.jit(m, transforms=[NormTransform()])(x)")
        return f"""\
import contextlib
{self.text()}
from thunder_norm import RMSTensor, build_norm_map
from thunder_norm.executors import inductor
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

def module():
    torch.manual_seed({self.seed})
    return Module(trains={self.trains}, is_tied={self.is_tied})
x = torch.linspace(-1, 2, 12).view(3, 4).requires_grad_({MODES[self.mode].grad})
with {guard}:
    m = module()
    print({call}, m.state_dict())
    m = module()
    print(m(x), m.state_dict())
"""

    def labels(self) -> Sequence[str]:
        """How it is called, and the statements, without their numbers."""
        return [self.mode, *(re.sub(r"-?\d+\.\d", "k", s) for s in self.statements)]


def draw(random: random.Random) -> Writing:
    """Four to eight statements, the last of them a use."""
    statements = []
    for _ in range(random.randint(3, 7)):
        kind = random.choices(("use", "name", "write"), (4, 2, 3))[0]
        if kind == "write":
            statement = random.choice(WRITES).format(t=random.choice(TARGETS), k=random.choice((3.0, 0.5, -2.0, 10.0)))
        else:
            statement = random.choice(USES if kind == "use" else NAMES)
        statements.append(statement)
    mode = random.choice(sorted(MODES))
    trains = random.random() < 0.5
    if MODES[mode].grad and trains:  # torch refuses to write into leaves with autograd
        statements = [s if s.startswith(("x = ", "v = ")) else f"with torch.no_grad(): {s}" for s in statements]
    return Writing((*statements, random.choice(USES)), trains, random.random() < 0.5, mode, random.randint(0, 999))


def _gradients(result: Any, module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    leaves = {name: t for name, t in (("x", x), *module.named_parameters()) if t.requires_grad}
    if not x.requires_grad or not result.requires_grad:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(result.square().sum(), list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _one_by_one(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """A call in which regions run operation by operation, as they do under a mode that sees them."""
    with BaseTorchDispatchMode():
        return call(x)


def _close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b or (b if a is None else a).count_nonzero() == 0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3 * (1 + float(b.abs().max())), equal_nan=True)
