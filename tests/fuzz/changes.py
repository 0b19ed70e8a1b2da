"""Random programs of which one thing changes between two calls, against the same program in eager mode.

What a trace was acquired for is what the program read: attributes, globals, closures, classes, hooks, sizes, strides, dtypes, modes. A call
after a change has eager's answer, whichever of the earlier traces it finds.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

from .changing_calls import CALLS
from .changing_code import CODE
from .changing_lookups import LOOKUPS
from .changing_modules import MODULES
from .changing_parts import Part
from .changing_values import CONTAINERS, NUMBERS
from .program import Outcome, outcome_of

PARTS = (*NUMBERS, *CONTAINERS, *LOOKUPS, *CODE, *MODULES, *CALLS)
TRANSFORMS = {
    "NormTransform()": lambda: NormTransform(),
    "SubclassTransform()": lambda: SubclassTransform(),
}
_numbers = itertools.count()

HEAD = """\
import collections, dataclasses, enum, fractions, functools, math, os, types
import numpy as np
import torch
from torch import nn

Point = collections.namedtuple("Point", "u v")

@dataclasses.dataclass
class Pair:
    u: object
    v: object

class Color(enum.Enum):
    RED = 2
    BLUE = 3

class Same:
    def __init__(self, v): self.v = v
    def __eq__(self, other): return isinstance(other, Same) and self.v == other.v
    def __hash__(self): return hash(self.v)
    def __len__(self): return self.v
    def __bool__(self): return self.v > 0
    def __getitem__(self, i): return self.v + i
    def __iter__(self): return iter([self.v, 1])
    def __enter__(self): return self.v
    def __exit__(self, *error): return False
    def __call__(self, x): return x * self.v
    def times(self, x): return x * self.v
    def named(self): return self.v
    def each(self):
        for i in range(2): yield self.v + i

def add(x, u=1, v=1): return x * u + v

class Doubled(Same):
    def named(self): return self.v * 2

class Slotted:
    __slots__ = ("k",)
    def __init__(self, k): self.k = k

class Answers:
    def __init__(self, v): self.v = v
    def __getattr__(self, name): return self.__dict__["v"] * len(name)

class Doubles:
    def __init__(self, k): self.k = k
    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found * 2 if name == "k" else found

class Twice:
    def __get__(self, object, owner=None): return object.v * 2

class Described:
    d = Twice()
    def __init__(self, v): self.v = v
    @functools.cached_property
    def c(self): return self.v

class Layer(nn.Module):
    def forward(self, x): return x * 2

class Halved(nn.Module):
    def forward(self, x): return x / 2

"""


@dataclass(frozen=True)
class Changing:
    """A module of some parts, and statements that are run one after the other, with a call after each."""

    parts: tuple[Part, ...]
    changes: tuple[str, ...]
    transform: str

    def text(self) -> str:
        """The module and what it needs."""
        lines = [p.before.replace("{n}", str(i)) for i, p in enumerate(self.parts)]
        init = [p.init.replace("{n}", str(i)) for i, p in enumerate(self.parts)]
        body = [p.body.replace("{n}", str(i)) for i, p in enumerate(self.parts)]
        module = [
            "class Module(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in init if line),
            "    def forward(self, x, y=None, k=1.5, o=None):",
            "        x0 = x",
            *(f"        {line}" for line in body if line),
            "        return x",
        ]
        return (
            "\n".join([*module, *(line for line in lines if line), "m = Module()", "x = torch.linspace(-1, 2, 12).view(3, 4)"])
            + "\n"
        )

    def run(self) -> Outcome:
        """Each call, ours and eager's."""
        with _restored():
            scope = _executed(HEAD + self.text())
            scope.update(modes=[], y=None, k=1.5, o=None)
            jitted = thunder.jit(scope["m"], transforms=[TRANSFORMS[self.transform]()])
            refused = None
            for change in ("pass", *self.changes):
                try:
                    exec(change, scope)
                except Exception:  # noqa: BLE001, S112 - a change that another took the object of
                    continue
                expected, ours = _called(scope, scope["m"]), _called(scope, jitted)
                if isinstance(ours, Exception):
                    if isinstance(expected, Exception):
                        continue
                    found = outcome_of(ours)
                    if found.kind == "error":
                        return Outcome("error", f"{found.detail}\nafter {change}")
                    refused = refused or Outcome("refused", f"{found.headline}\nafter {change}")
                elif isinstance(expected, Exception):
                    return Outcome("wrong", f"no error after {change}, where eager has {type(expected).__name__}: {expected}")
                elif difference := _difference(ours, expected):
                    return Outcome("wrong", f"{difference} after {change}")
        return refused or Outcome("right")

    def smaller(self) -> Iterable[Changing]:
        """With fewer changes; without the parts that are not needed."""
        for i in range(len(self.changes)):
            yield replace(self, changes=self.changes[:i] + self.changes[i + 1 :])
        for i, part in enumerate(self.parts):
            if part.body or part.init or part.before:  # in its place, so that the others keep their numbers
                yield replace(self, parts=(*self.parts[:i], Part("nothing", "", ()), *self.parts[i + 1 :]))

    def source(self) -> str:
        """A program that can be pasted."""
        calls = "\n".join(f"{change}\nshow()" for change in ("pass", *self.changes))
        return f"""\
{HEAD}import contextlib
import thunder
from thunder_norm.transforms import NormTransform, SubclassTransform

{self.text()}
modes, y, k, o = [], None, 1.5, None
jitted = thunder.jit(m, transforms=[{self.transform}])
def show():
    for f in (jitted, m):
        with contextlib.ExitStack() as stack:
            for mode in modes: stack.enter_context(mode())
            print(f(x, y, k, o=o))
{calls}
"""

    def labels(self) -> Sequence[str]:
        """The names of the parts."""
        return [p.name for p in self.parts]


def draw(random: random.Random) -> Changing:
    """One to three parts, and one to six of their changes in any order."""
    parts = tuple(random.sample(PARTS, random.randint(1, 3)))
    changes = [c.replace("{n}", str(i)) for i, p in enumerate(parts) for c in p.changes]
    chosen = [random.choice(changes) for _ in range(random.randint(1, 6))]
    return Changing(parts, tuple(chosen), random.choice(sorted(TRANSFORMS)))


def _executed(text: str) -> dict[str, Any]:
    name = f"changing_{next(_numbers)}"
    linecache.cache[f"<{name}>"] = (len(text), None, text.splitlines(True), f"<{name}>")
    module = sys.modules[name] = types.ModuleType(name)  # as dataclasses and pickle look for it
    exec(compile(text, f"<{name}>", "exec"), vars(module))
    return vars(module)


def _called(scope: dict[str, Any], f: Any) -> Any:
    """The result and its gradients, or the error."""
    x, m = scope["x"], scope["m"]
    try:
        with contextlib.ExitStack() as stack:
            for mode in scope["modes"]:
                stack.enter_context(mode())
            result = f(x, scope["y"], scope["k"], o=scope["o"])
        wanted = [t for t in (x, *m.parameters(), *m.buffers()) if t.requires_grad and not t.is_inference()]
        if not wanted or not result.requires_grad:
            return [result]
        return [result, *torch.autograd.grad(result.float().sum(), wanted, allow_unused=True)]
    except Exception as e:  # noqa: BLE001 - an outcome
        return e


def _difference(ours: list[Any], expected: list[Any]) -> str:
    if len(ours) != len(expected):
        return f"requires_grad is {ours[0].requires_grad}"
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        what = f"gradient {i - 1}" if i else "the result"
        if (a is None) != (b is None):
            if (a if b is None else b).count_nonzero() == 0:
                continue  # a gradient of zeros
            return f"{what} is {a}, not {b}"
        if a is None:
            continue
        if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
            return f"{what} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        tolerance = 1e-2 if a.dtype in (torch.float16, torch.bfloat16) else 1e-4
        if not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{what} is {a.tolist()}, not {b.tolist()}"
    return ""


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """What changes of the surroundings is as before afterwards."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    names, environment = set(vars(math)), dict(os.environ)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        for name in set(vars(math)) - names:
            delattr(math, name)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
