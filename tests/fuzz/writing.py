"""Writes a spelling of an operation for the value at hand: what stands in its braces, drawn to fit."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any

import torch

_HOLE = re.compile(r"\{(\w+)\}")
_MOST_ARGS = 3
OWN = """own = custom_vjp(lambda x: x * x.sin())
own.defvjp(lambda x: (x * x.sin(), x), lambda x, ct: (ct * (x.sin() + x * x.cos()),))"""
HELPER = """def helper(x, scale=0.5, *, shift=1):
    return x.tanh() * scale + shift"""
MODULE = """class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7, dtype=DTYPE))
        self.register_buffer("shift", torch.tensor(0.2, dtype=DTYPE))

    def forward(self, x):
        return torch.tanh(x * self.scale) + self.shift

module = Module()"""


def tensor_text(shape: tuple[int, ...], pick: random.Random, dtype: str) -> str:
    """A tensor of different numbers, as text."""
    numel = functools.reduce(lambda a, b: a * b, shape, 1)
    numbers = iter(pick.sample([n for n in range(-1600, 1600) if abs(n) > 90], numel))

    def nested(dims: tuple[int, ...]) -> Any:
        return [nested(dims[1:]) for _ in range(dims[0])] if dims else next(numbers) / 1000

    if "complex" in dtype:
        imaginary = tensor_text(shape, pick, dtype.replace("complex128", "float64"))
        return f"torch.complex({tensor_text(shape, pick, dtype.replace('complex128', 'float64'))}, {imaginary})"
    return f"torch.tensor({nested(shape)}, dtype={dtype})" if numel else f"torch.zeros({shape}, dtype={dtype})"


class Writer:
    """The spelling of one operation of the value `x`, and what it needs beside it: new arguments and constants.

    A hole that stands twice in a spelling is filled alike.
    """

    def __init__(self, x: str, values: dict[str, Any], num_args: int, names: set[str], pick: random.Random, dtype: str):
        self.x, self.values, self.pick, self.dtype = x, values, pick, dtype
        self.value: torch.Tensor = values[x]
        self.shape = tuple(self.value.shape)
        self.num_args, self.names = num_args, set(names)
        self.new_args: dict[str, str] = {}
        self.new_constants: dict[str, str] = {}
        self._filled: dict[str, str] = {}

    def write(self, spelling: str, target: str) -> list[str]:
        """Statements that assign the operation's result to `target`."""
        self._filled["t"] = target
        text = _HOLE.sub(lambda m: self._hole(m[1]), spelling)
        if "own(" in text:
            self.new_constants["own"] = OWN
        if "helper(" in text:
            self.new_constants["helper"] = HELPER
        lines = [part.strip().replace("....", "    ") for part in text.split(" // ")]
        return lines if lines[0].startswith(target) else [f"{target} = {text}"]

    def _hole(self, name: str) -> str:
        if name not in self._filled:
            number = re.fullmatch(r"([a-z]+)0", name)
            self._filled[name] = getattr(self, f"_{name}" if hasattr(self, f"_{name}") else f"_{number[1] if number else name}")()
        return self._filled[name]

    # -- tensors --------------------------------------------------------------------------------------------------------------

    def _new(self, shape: tuple[int, ...], constant: bool = False, dtype: str | None = None) -> str:
        """A new argument, or a constant around the function."""
        text = tensor_text(shape, self.pick, dtype or self.dtype.replace("complex128", "float64"))
        if constant or self.num_args + len(self.new_args) >= _MOST_ARGS or self.pick.random() < 0.3:
            return self._constant(text)
        return self._named("x", text, self.new_args)

    def _constant(self, text: str) -> str:
        return self._named("c", text, self.new_constants)

    def _named(self, prefix: str, text: str, where: dict[str, str]) -> str:
        name = next(f"{prefix}{i}" for i in range(99) if f"{prefix}{i}" not in self.names)
        self.names.add(name)
        where[name] = text
        return name

    def _x(self) -> str:
        return self.x

    def _y(self) -> str:
        """A value of the same shape."""
        same = [
            n
            for n, v in self.values.items()
            if isinstance(v, torch.Tensor) and v.shape == self.value.shape and v.dtype == self.value.dtype and n != self.x
        ]
        choice = self.pick.random()
        if same and choice < 0.6:
            return self.pick.choice(same)
        return f"{self.x}.cos()" if choice > 0.85 else self._new(self.shape)

    def _w(self) -> str:
        return self._new(self.shape, constant=True)

    def _b(self) -> str:
        """A value that broadcasts."""
        shapes = [self.shape[-1:], (), (1,) * len(self.shape), (*self.shape[:-1], 1), self.shape[1:]]
        return self._new(self.pick.choice(shapes))

    def _scalar(self) -> str:
        return self._new(())

    def _three(self) -> str:
        return self._new((3,))

    def _v(self) -> str:
        return self._new((self._size(-1),))

    def _m(self) -> str:
        return self._new((self._size(-1), 3))

    def _bias(self) -> str:
        return self._new((3,))

    def _pos(self) -> str:
        return self.pick.choice([f"({self.x} * {self.x} + 0.3)", f"({self.x}.exp() + 0.1)", f"(0.5 + {self.x}.square())"])

    def _unit(self) -> str:
        return f"(torch.tanh({self.x}) * 0.9)"

    def _prob(self) -> str:
        return f"torch.sigmoid(torch.tanh({self.x}))"

    def _vector(self) -> str:
        return self.x if len(self.shape) == 1 else f"{self.x}.flatten()[:3]"

    def _matrix(self) -> str:
        if len(self.shape) == 2:
            return self.x
        return f"torch.outer({self.x}, {self.x}.cos())" if len(self.shape) == 1 else f"{self.x}.reshape(-1, {self._size(-1)})"

    def _rows(self) -> str:
        if len(self.shape) == 2:
            return self.x
        return f"torch.stack([{self.x}, {self.x}.sin()])" if len(self.shape) == 1 else f"{self.x}.reshape(-1, {self._size(-1)})"

    def _signal(self) -> str:
        """[batch, channels, length]."""
        if len(self.shape) == 3:
            return self.x
        rows = f"torch.stack([{self.x}, {self.x}.sin()])" if len(self.shape) == 1 else self._rows()
        return f"{rows}[None]"

    def _image(self) -> str:
        """[batch, 1, height, width]."""
        return f"{self._matrix()}[None, None]"

    def _square(self) -> str:
        if len(self.shape) == 2 and self.shape[0] == self.shape[1]:
            return self.x
        return f"torch.outer({self.x}, {self.x}.cos())" if len(self.shape) == 1 else f"({self._matrix()}.T @ {self._matrix()})"

    def _sn(self) -> str:
        return str(self._size(-1))

    def _eye(self) -> str:
        return f"torch.eye({self._size(-1)}, dtype={self.x}.dtype)"

    def _regular(self) -> str:
        return f"({self._square()} * 0.3 + {self._spread()})"

    def _spread(self) -> str:
        return f"torch.diag(torch.arange(1.0, {self._size(-1)} + 1, dtype={self.x}.dtype))"

    def _spd(self) -> str:
        if len(self.shape) == 1:
            return f"(torch.outer({self.x}, {self.x}) + {self._spread()})"
        return f"({self._square()} @ {self._square()}.T + {self._spread()})"

    def _symmetric(self) -> str:
        return f"({self._square()} + {self._square()}.T + 3 * {self._spread()})"

    def _right(self) -> str:
        return self._new((self._size(-1),))

    def _tall(self) -> str:
        return f"torch.cat([{self._regular()}, {self._square()}.cos()])"

    # -- numbers, shapes, dimensions ----------------------------------------------------------------------------------------------

    def _size(self, dim: int) -> int:
        return self.shape[dim] if self.shape else 1

    def _c(self) -> str:
        return self.pick.choice(["0.5", "2", "-1.3", "3.0", "True", "-1"])

    def _lo(self) -> str:
        return "-0.4"

    def _hi(self) -> str:
        return "0.9"

    def _last(self) -> str:
        return str(self._size(-1))

    def _s(self) -> str:
        return str(self._size(0))

    def _n(self) -> str:
        return str(self.value.numel())

    def _shape_text(self) -> str:
        return str(self.shape)

    def _shape2(self) -> str:
        n = self.value.numel()
        return str(self.pick.choice([(n,), (-1, self._size(-1)), (1, n), (n, 1), (self._size(-1), -1), (1, -1, 1)]))

    def _perm(self) -> str:
        dims = list(range(len(self.shape)))
        self.pick.shuffle(dims)
        return str(tuple(dims))

    def _d(self) -> str:
        n = len(self.shape)
        return str(self.pick.randrange(-n, n) if n else 0)

    def _e(self) -> str:
        others = [i for i in range(len(self.shape)) if i != int(self._hole("d")) % len(self.shape)]
        return str(self.pick.choice(others) if others else 0)

    def _dims(self) -> str:
        dims = list(range(len(self.shape)))
        return str(tuple(self.pick.sample(dims, self.pick.randint(1, len(dims))) if dims else ()))

    def _size_d(self) -> str:
        return str(self._size(int(self._hole("d"))))

    def _k(self) -> str:
        return str(self.pick.randint(1, self._size(int(self._hole("d")))))

    def _i(self) -> str:
        size = self._size(int(self._hole("d")))
        return str(self.pick.randrange(-size, size))

    # -- integers and masks -----------------------------------------------------------------------------------------------------

    def _integers(self, shape: tuple[int, ...], size: int) -> str:
        def nested(dims: tuple[int, ...]) -> Any:
            return [nested(dims[1:]) for _ in range(dims[0])] if dims else self.pick.randrange(max(size, 1))

        return self._given(f"torch.tensor({nested(shape)}, dtype=torch.long)")

    def _given(self, text: str) -> str:
        """A constant tensor where it is used, or around the function."""
        return text if self.pick.random() < 0.3 else self._constant(text)

    def _ints(self) -> str:
        return self._integers((self.pick.randint(1, 3),), self._size(int(self._hole("d"))))

    def _ints0(self) -> str:
        return self._integers((self.pick.randint(1, 3),), self._size(0))

    def _ints_last(self) -> str:
        return self._integers((self.pick.randint(1, 3),), self._size(-1))

    def _i0(self) -> str:
        return str(self.pick.randrange(-self._size(0), self._size(0)))

    def _gather_index(self) -> str:
        return self._integers(self.shape, self._size(int(self._hole("d"))))

    def _arange_index(self) -> str:
        """An index that hits each entry once."""
        d, n = int(self._hole("d")) % len(self.shape), len(self.shape)
        view = [-1 if i == d else 1 for i in range(n)]
        return self._given(f"torch.arange({self.shape[d]}).flip(0).reshape({view}).expand({list(self.shape)})")

    def _classes(self) -> str:
        rows = 2 if len(self.shape) == 1 else self.value.numel() // max(self._size(-1), 1)
        return self._constant(f"torch.tensor({[self.pick.randrange(self._size(-1)) for _ in range(rows)]})")

    def _mask(self) -> str:
        def nested(dims: tuple[int, ...]) -> Any:
            return [nested(dims[1:]) for _ in range(dims[0])] if dims else self.pick.random() < 0.6

        return self._given(f"torch.tensor({nested(self.shape)}, dtype=torch.bool)")

    # -- modules ----------------------------------------------------------------------------------------------------------------

    def _module_of(self, name: str, text: str) -> str:
        name = f"{name}_{self._size(-1)}"
        self.new_constants[name] = f"torch.manual_seed(1)\n{name} = {text}"
        return name

    def _linear(self) -> str:
        return self._module_of("linear", f"torch.nn.Linear({self._size(-1)}, 3, dtype={self.dtype})")

    def _mlp(self) -> str:
        n, d = self._size(-1), self.dtype
        inside = f"torch.nn.Linear({n}, 3, dtype={d}), torch.nn.GELU(), torch.nn.Linear(3, 2, bias=False, dtype={d})"
        return self._module_of("mlp", f"torch.nn.Sequential({inside})")

    def _layer_norm(self) -> str:
        return self._module_of("layer_norm", f"torch.nn.LayerNorm({self._size(-1)}, dtype={self.dtype})")

    def _conv(self) -> str:
        return self._module_of("conv", f"torch.nn.Conv2d(1, 1, 2, dtype={self.dtype})")

    def _batch_norm(self) -> str:
        return self._module_of("batch_norm", f"torch.nn.BatchNorm1d({self._size(-1)}, dtype={self.dtype}).eval()")

    def _attention(self) -> str:
        return self._module_of("attention", f"torch.nn.MultiheadAttention({self._size(-1)}, 1, dtype={self.dtype})")

    def _module(self) -> str:
        self.new_constants["module"] = MODULE.replace("DTYPE", self.dtype)
        return "module"


Redraw: type[Exception] = type("Redraw", (Exception,), {"__doc__": "What was drawn does not fit; something else has to be."})
Pick = Callable[[Any], Any]
