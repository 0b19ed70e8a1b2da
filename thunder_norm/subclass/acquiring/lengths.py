"""Total lengths of nested tensors that a trace does not hang on.

The batches of a loop differ in how many rows all their sequences have together.  The first trace of a program is for the length of its
call, as every trace is for its shapes.  Where a call comes with another, the program is acquired once more, and the length is a symbol
of torch's then: classes, kernels and torch's autograd run on fakes of that size, what they decide by it is a guard, as
for torch's own compiler, and a size that hangs on it is an expression.

- A recorded operation that such a tensor takes part in is written as torch's own, which no pass takes apart; a `Late` one works out its
  sizes when it runs.
- The trace serves the lengths for which all guards say the same, which are computed in each call.
- What takes a length for a number (`int`) is such a guard as well, that it is this one.  Then, and where the acquisition fails, the
  program is acquired for the length at hand alone, now and in later calls.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.op_names import identifier
from thunder_norm.subclass.classes import jagged
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.guarding.conditions import GuardError
from thunder_norm.tracing.tags import OF_ANY_LENGTH
from thunder_norm.trees import map_leaves
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(v: Any) -> bool:
    """Whether a number hangs on a length, or a size of a tensor does; ragged lengths of nested tensors are something else."""
    if isinstance(v, torch.Tensor):
        return type(v) is FakeTensor and v._has_symbolic_sizes_strides
    return isinstance(v, _SYMBOLIC) and not is_ragged(v) and not v.node.expr.is_number


def is_ragged(v: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Whether it is the ragged length of a nested tensor."""
    return not hasattr(v.node, "expr")  # torch's expressions are of symbols alone


def as_number(v: Any) -> Any:
    """A number that the program gets: of one that hangs on a length, what it is in the call at hand, for which alone the trace is then."""
    if isinstance(v, torch.Size):
        return torch.Size(map(as_number, v)) if any(isinstance(s, _SYMBOLIC) and not is_ragged(s) for s in v) else v
    if not isinstance(v, _SYMBOLIC) or is_ragged(v):
        return v
    return int(v) if isinstance(v, torch.SymInt) else float(v) if isinstance(v, torch.SymFloat) else bool(v)


class _Symbol(NamedTuple):
    """A length: the tensor whose size in dimension `dim` it is, and what that is in the call at hand."""

    name: str
    tensor: FakeTensor
    dim: int
    size: torch.SymInt


class Lengths:
    """The symbols of one acquisition."""

    def __init__(self) -> None:
        self.is_on = False
        self._is_one = False  # see `be_one`
        self._env: Any = None
        self._symbols: dict[Any, _Symbol] = {}
        self._inputs: dict[int, tuple[FakeTensor, _Symbol]] = {}  # by the identity of fakes
        self._proxies: dict[int, TensorProxy] = {}  # in the prologue

    # -- inputs -------------------------------------------------------------------------------------------------------

    def begin(self, mode: FakeTensorMode) -> None:
        """Total lengths are symbols for fakes of `mode`, which has made none yet."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)
        mode.shape_env, mode.static_shapes = self._env, False
        self.is_on = True

    def fake_of(self, x: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
        """A fake for the values of a nested tensor, an input: those of inputs that have offsets in common are of one length."""
        values, dim = x._values, x._ragged_idx - 1
        key = jagged.ragged_identity(x), values.shape[dim]
        known = self._symbols.get(key)
        size = self._new(f"length{len(self._symbols)}", values.shape[dim]) if known is None else known.size
        shape = [size if d == dim else n for d, n in enumerate(values.shape)]
        with mode:
            fake = torch.empty_strided(shape, _strides(shape, jagged.layout(values)[1]), dtype=values.dtype, device=values.device)
        symbol = self._symbols.setdefault(key, _Symbol(str(size), fake, dim, size))
        self._inputs[id(fake)] = fake, symbol
        return fake

    def _new(self, name: str, value: int) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(name)
        symbol = self._env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self._env.create_symintnode(symbol, hint=value, source=source)

    def be_one(self) -> None:
        """The trace is for the lengths at hand."""
        self._is_one = True
        for symbol in self._symbols.values():
            int(symbol.size)

    def is_symbol_in(self, fake: torch.Tensor | None) -> bool:
        """Whether a tensor has a size that is a symbol."""
        return self.is_on and fake is not None and is_symbolic(fake)

    # -- operations ---------------------------------------------------------------------------------------------------

    def late(self, func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
        """What stands in a log for an operation, and what it is called with: of numbers that hang on lengths, how they do."""
        found = [v for v in tree_leaves((args, kwargs)) if isinstance(v, _SYMBOLIC)] if self.is_on else []
        if not found:
            return func, args, kwargs
        if not isinstance(func, _CALLED_LATE):  # what has a part in the program besides what it returns
            self.be_one()
        symbols = self._symbols_in(found)
        names = {s.size.node.expr: _symbol(f"n{i}") for i, s in enumerate(symbols)}
        args, kwargs = tree_map(functools.partial(_written, names), (args, kwargs))
        if not symbols:
            return func, args, kwargs
        return Late(func, tuple([s.dim for s in symbols])), args, {**kwargs, "of": tuple([s.tensor for s in symbols])}

    def tensors_for(self, shapes: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
        """Those that say how long sizes are."""
        return [s.tensor for s in self._symbols_in([n for shape in shapes for n in shape])]

    def _symbols_in(self, numbers: Sequence[Any]) -> list[_Symbol]:
        used = set().union(*(v.node.expr.free_symbols for v in numbers if is_symbolic(v)))
        return [s for s in self._symbols.values() if s.size.node.expr in used]

    # -- what the trace serves ----------------------------------------------------------------------------------------

    @property
    def is_one(self) -> bool:
        """Whether the trace serves one length alone."""
        return self._is_one or any(s.size.node.maybe_as_int() is not None for s in self._symbols.values())

    def checks(self, fake: torch.Tensor) -> bool:
        """Whether it is checked here, and not by its shape, what an inner tensor of an input is."""
        return id(fake) in self._inputs

    def note_proxy(self, fake: torch.Tensor, proxy: TensorProxy) -> None:
        """What an inner tensor of an input is in the prologue."""
        if id(fake) in self._inputs:
            self._proxies[id(fake)] = proxy
            proxy.tags.add(OF_ANY_LENGTH)

    def guards(self) -> list[BoundSymbol]:
        """Operations of the prologue: the trace serves the lengths of the call."""
        if not self._proxies:
            return []
        expected = [_Expected.of(*self._inputs[i], p.requires_grad) for i, p in self._proxies.items()]

        def check(*tensors: torch.Tensor) -> None:
            found: dict[str, int] = {}
            for t, e in zip(tensors, expected, strict=True):
                if not e.is_like(t) or found.setdefault(e.name, t.shape[e.dim]) != t.shape[e.dim]:
                    raise GuardError("the values of a nested tensor are others than the trace was acquired for")
            if min(found.values()) < 2 or not self._serves(found):
                raise GuardError("the total lengths of nested tensors are none that the trace serves")

        return [bindable("check_lengths", check)(*self._proxies.values(), output=None)]

    def _serves(self, found: dict[str, int]) -> bool:
        try:
            conditions = [f"({_code(g.expr)})" for g in self._env.guards]
        except AssertionError:  # torch has no text for it
            return False
        return bool(_function(" and ".join(conditions) or "True", tuple(found))(*found.values()))


@dataclass(frozen=True)
class _Expected:
    name: str
    dim: int
    shape: tuple[int, ...]  # of all other dimensions
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(fake: FakeTensor, symbol: _Symbol, requires_grad: bool) -> _Expected:
        dim = next(d for d, n in enumerate(fake.shape) if isinstance(n, torch.SymInt))
        shape = tuple([0 if d == dim else int(n) for d, n in enumerate(fake.shape)])
        return _Expected(symbol.name, dim, shape, jagged.layout(fake)[1], fake.dtype, fake.device, requires_grad)

    def is_like(self, t: torch.Tensor) -> bool:
        if t.ndim != len(self.shape) or t.dtype is not self.dtype or t.device != self.device:
            return False
        if t.requires_grad is not self.requires_grad or any(
            n != e for d, (n, e) in enumerate(zip(t.shape, self.shape, strict=True)) if d != self.dim
        ):
            return False
        return t.stride() == _strides(t.shape, self.order)


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Those of a tensor without gaps, its dimensions given from the outermost in memory to the innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def _written(names: dict[Any, Any], v: Any) -> Any:
    """A number that hangs on lengths as what computes it, lengths by their names."""
    if not isinstance(v, _SYMBOLIC) or is_ragged(v):
        return v
    if not is_symbolic(v):
        return as_number(v)
    return _MARK + _code(v.node.expr.xreplace(names))


_CALLED_LATE = (torch._ops.OpOverload, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_MARK = "= "  # of texts that are computed


def _symbol(name: str) -> Any:
    import sympy  # which torch imports where it is needed: it takes a while

    return sympy.Symbol(name, integer=True)


@functools.cache
def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter()


def _code(expression: Any) -> str:
    return _printer().doprint(expression)


_NAMES = {"__builtins__": {}, "torch": torch, "math": math, "max": max, "min": min, "abs": abs}


@functools.cache
def _function(code: str, names: tuple[str, ...]) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(names)}: {code}", dict(_NAMES))  # noqa: S307


@dataclass(frozen=True)
class Late:
    """An operation with numbers among its arguments that hang on lengths: written out, and computed from the tensors ``of``.

    Attributes:
        func: torch's operation, or one that stands for it.
        dims: for each length, which the texts call n0, n1 and so on, the dimension of its tensor that has it.
    """

    func: Any
    dims: tuple[int, ...]

    @property
    def __name__(self) -> str:
        """What the operation is called in traces."""
        own = str(self.func) if isinstance(self.func, torch._ops.OpOverload) else self.func.__name__
        return identifier(f"{own}_late_{'_'.join(map(str, self.dims))}")

    @property
    def tags(self) -> Any:
        """Those of torch's operation."""
        return getattr(self.func, "tags", ())

    def __call__(self, *args: Any, of: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        """What the operation returns for tensors of the lengths that `of` have."""
        sizes = [t.shape[dim] for t, dim in zip(of, self.dims, strict=True)]
        names = tuple([f"n{i}" for i in range(len(sizes))])

        def computed(v: Any) -> Any:
            return _function(v.removeprefix(_MARK), names)(*sizes) if type(v) is str and v.startswith(_MARK) else v

        args, kwargs = map_leaves(computed, (args, kwargs))
        return self.func(*args, **kwargs)
