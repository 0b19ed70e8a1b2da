"""Modules that keep things: attributes, buffers, counters, lists and dicts of their own and of what they hold, set, changed and deleted by the program.

What each of three calls returns or raises, and what is in all objects and random generators afterwards, is eager mode's.
"""

from __future__ import annotations

import copy
import functools
import itertools
import linecache
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

from .program import Outcome, outcome_of

TRANSFORMS: dict[str, Callable] = {"NormTransform()": NormTransform, "SubclassTransform()": SubclassTransform}
_numbers = itertools.count()


class Held:
    """An object of no special class that a module holds."""

    def __init__(self):
        self.t = torch.ones(2)
        self.n = 1
        self.items = [torch.ones(2), 2]


class Cell(nn.Module):
    """A module that keeps a state, as recurrent and spiking ones do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mem", torch.ones(2), persistent=False)
        self.w = nn.Parameter(torch.ones(2) * 2)
        self.count = 0
        self.past = [torch.ones(2)]
        self.bound = self.step

    @property
    def twice(self):
        return self.mem * 2

    @twice.setter
    def twice(self, value):
        self.mem = value / 2

    def step(self, x):
        self.count += 1
        self.mem = self.mem * 0.5 + x
        self.last = x
        return self.mem + self.count

    def reset(self):
        self.mem = torch.zeros_like(self.mem)
        self.count = 0


_OWNERS = ("self", "self.sub", "self.list[1]", "self.named['a']")
# of o, a module, and v, a value that is a tensor
_VALUES = (
    *(
        "x",
        "x * 2",
        "{o}.mem",
        "{o}.mem * 2",
        "{o}.mem + x",
        "{o}.twice",
        "{o}.w * x",
        "x + {o}.count",
        "self.held.t",
        "y",
        "y + 1",
    ),
    *("self.table['t']", "self.held.items[0] + x", "{o}.bound(x)", "{o}.step(x)", "sum({o}.past)", "{o}.past[-1] * 2"),
)
_STATEMENTS = (
    "{o}.mem = {v}",
    "{o}.mem = {v}",
    "{o}.extra = {v}",
    "{o}.count += 1",
    "{o}.count = 3",
    "y = {v}",
    "{o}.mem.add_(1)",
    "{o}.mem += 1",
    "setattr({o}, 'mem', {v})",
    "{o}.twice = {v}",
    "self.held.t = {v}",
    "self.held.n += 1",
    "self.table['t'] = {v}",
    "self.table['k'] = self.table.get('k', 0) + 1",
    "self.held.items.append({v})",
    "self.held.items[0] = {v}",
    "{o}.reset()",
    "y = y + getattr({o}, 'mem')",
    "{o}.register_buffer('mem', ({v}) * 1)",
    "y = y + (0 if getattr({o}, 'extra', None) is None else {o}.extra)",
    "if hasattr({o}, 'extra'): del {o}.extra",
    "{o}._buffers['mem'] = {v}",
    "y = y + sum({o}.buffers())",
    "y = y * {o}.count + self.held.n",
    "{o}.__dict__['extra'] = {v}",
    "vars({o})['count'] += 2",
    "{o}.__dict__.update(extra={v}, count=7)",
    "{o}.__dict__.pop('extra', None)",
    "del {o}.count; {o}.count = 1",
    "{o}.past = {o}.past + [{v}]",
    "{o}.past = ({o}.past + [{v}])[-2:]",
    "{o}.pair = ({v}, {o}.count)",
    "{o}.note = 'n' + str({o}.count)",
    "object.__setattr__({o}, 'extra', {v})",
    "del {o}.mem; {o}.register_buffer('mem', {v})",
    "self.held.__dict__['t'] = {v}",
    "for m in self.children(): m.tag = self.held.n",
)
# what draws, writes at once, or raises
_RAISING = (
    "y = y + torch.rand(2)",
    "self.held.items.append(torch.rand(2))",
    "y = y * torch.rand(2, generator=self.generator)",
    "torch.add({v}, 1, out={o}.mem)",
    "{o}.mem.data = ({v}) * 1",
    "x.add_(1)",
    "assert ({v}).sum() < {n}, 'too large'",
    "if ({v}).sum() > {n}: raise ValueError('too large')",
    "if ({v}).sum() > {n}: {o}.count += 1; raise KeyError({o}.count)",
    "{o}.mem[int({o}.count * 0) + 2] = 1",
    "raise OverflowError({o}.count)",
    "y = y + self.table['none']",
    "y = y + torch.ones(3)",
    "y = y + torch.ones(2)[(y.detach() * 0 + {n}).long()]",
)
_RESULTS = ", ".join(
    [
        *(f"{o}.mem * 1, {o}.count, {o}.twice, {o}.past[-1] * 1" for o in _OWNERS),
        *("y", "self.held.t * 1", "self.held.n", "self.table['t'] * 1", "self.held.items[0] * 1"),
    ]
)


@dataclass(frozen=True)
class State:
    """The statements of a module's forward, each on a line, and how it is called."""

    statements: tuple[str, ...]
    transform: str
    has_gradients: bool

    def run(self) -> Outcome:
        """Three calls against eager mode."""
        with torch.set_grad_enabled(self.has_gradients):
            try:
                wanted = self._calls(lambda m: m)
            except Exception as e:  # noqa: BLE001 - a program that torch does not run
                return Outcome("no oracle", f"{type(e).__name__}: {e}")
            try:
                found = self._calls(lambda m: thunder.jit(m, transforms=[TRANSFORMS[self.transform]()]))
            except Exception as e:  # noqa: BLE001 - every end is a result
                return outcome_of(e)
        for number, (ours, eagers) in enumerate(zip(found, wanted, strict=True)):
            for what, a, b in zip(("result", "state"), ours, eagers, strict=True):
                if (place := _difference(a, b)) is not None:
                    return Outcome("wrong", f"{what} of call {number}: {place}")
        return Outcome("right")

    def _calls(self, prepared: Callable) -> list[tuple[Any, Any]]:
        torch.manual_seed(0)
        model = self._module()
        called, found = prepared(model), []
        for number in range(3):
            x = torch.tensor([1.0, -2.0]) + number
            try:
                result = _copied(called(x))
            except ThunderNormError:
                raise
            except Exception as e:  # noqa: BLE001 - the program's own
                result = type(e).__name__
            drawn = torch.random.get_rng_state().tolist(), model.generator.get_state().tolist()
            found.append((result, {**_copied(_state_of(model)), "x": x.clone(), "drawn": drawn}))
        return found

    def _module(self) -> nn.Module:
        text = (
            "def forward(self, x):\n    y = x * 1\n" + "".join(f"    {s}\n" for s in self.statements) + f"    return {_RESULTS}\n"
        )
        name = f"<state {next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        made: dict[str, Any] = {}
        exec(compile(text, name, "exec"), {"torch": torch}, made)  # noqa: S102 - of this file's statements

        class Model(Cell):
            forward = made["forward"]

            def __init__(self):
                super().__init__()
                self.sub, self.list, self.named = Cell(), nn.ModuleList([Cell(), Cell()]), nn.ModuleDict({"a": Cell()})
                self.held, self.table = Held(), {"t": torch.ones(2)}
                self.generator = torch.Generator().manual_seed(1)

        return Model()

    def smaller(self) -> Iterable[State]:
        """With fewer statements."""
        for n in range(len(self.statements)):
            yield replace(self, statements=self.statements[:n] + self.statements[n + 1 :])

    def source(self) -> str:
        """A program that can be pasted."""
        return f"from tests.fuzz.state import State\nprint({self!r}.run())\n"

    def labels(self) -> Sequence[str]:
        """What is written, and how."""
        return [functools.reduce(lambda s, o: s.replace(o, "o"), _OWNERS[::-1], s).partition(" = ")[0] for s in self.statements]


def _state_of(model: nn.Module) -> dict[str, Any]:
    of_torch = set(vars(nn.Module())) - {"_buffers"} | {"bound", "generator"}
    found = {name: {k: v for k, v in vars(m).items() if k not in of_torch} for name, m in model.named_modules()}
    return {**found, "held": vars(model.held), "table": model.table}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return copy.copy(value) if isinstance(value, int | float | str | None) else type(value)


def _difference(found: Any, wanted: Any, place: str = "") -> str | None:
    if type(found) is not type(wanted):
        return f"{place}: {found!r}, not {wanted!r}"
    if isinstance(found, torch.Tensor):
        is_same = found.shape == wanted.shape and torch.allclose(found, wanted)
        return None if is_same else f"{place}: {found.tolist()}, not {wanted.tolist()}"
    if isinstance(found, dict):
        if found.keys() != wanted.keys():
            return f"{place}: {sorted(found)}, not {sorted(wanted)}"
        pairs = [(k, found[k], wanted[k]) for k in found]
    elif isinstance(found, list | tuple):
        if len(found) != len(wanted):
            return f"{place}: {len(found)} elements, not {len(wanted)}"
        pairs = [(n, a, b) for n, (a, b) in enumerate(zip(found, wanted, strict=True))]
    else:
        return None if found == wanted else f"{place}: {found!r}, not {wanted!r}"
    return next((d for k, a, b in pairs if (d := _difference(a, b, f"{place}.{k}")) is not None), None)


def draw(random: random.Random) -> State:
    """Three to nine statements."""
    statements = []
    for _ in range(random.randint(3, 9)):
        value = random.choice(_VALUES).format(o=random.choice(_OWNERS))
        statements.append(random.choice(_STATEMENTS).format(o=random.choice(_OWNERS), v=value))
    if random.random() < 0.3:
        for _ in range(random.randint(1, 3)):
            value, raising = random.choice(_VALUES).format(o=random.choice(_OWNERS)), random.choice(_RAISING)
            new = raising.format(o=random.choice(_OWNERS), v=value, n=random.randint(-2, 9))
            statements.insert(random.randint(0, len(statements)), new)
    return State(tuple(statements), random.choice(sorted(TRANSFORMS)), random.random() < 0.5)
