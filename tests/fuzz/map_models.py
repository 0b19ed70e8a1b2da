"""The modules of random maps: how they are called, what they return, and what both are in plain PyTorch."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import register_dataclass, tree_flatten, tree_map

import thunder_norm
from thunder_norm import LinfTensor, NormedTensor
from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import ModularNorm

from .module_state import changed, random_state, state
from .plain_modules import Wrong, is_floating

if TYPE_CHECKING:
    from .maps import MapProgram

CLOSE = {"float64": 1e-6, "float32": 2e-3, "bfloat16": 8e-2}


@dataclass
class Batch:
    """What a module takes."""

    x: Any
    y: Any = None
    number: int = 3


@dataclass
class Found:
    """What a module returns."""

    result: Any
    nothing: None = None


for kind, fields in ((Batch, ["x", "y", "number"]), (Found, ["result", "nothing"])):
    register_dataclass(kind, field_names=fields)


class Called(nn.Module):
    """A module that is called in another way, and returns its result in another form."""

    def __init__(self, model: nn.Module, returned: str):
        super().__init__()
        self.model, self.returned = model, returned

    def answer(self, x, y=None):
        result = self.model(x) if y is None else self.model(x, y)
        if self.returned == "dict":
            return {"result": result, "nothing": None}
        if self.returned == "dataclass":
            return Found(result)
        if self.returned == "tuple":
            return 2, (None, [result])
        if self.returned == "twice":
            return result, result
        return (result, x) if self.returned == "with input" else result


class Plainly(Called):
    def forward(self, x, y=None):
        return self.answer(x, y)


class OfDict(Called):
    def forward(self, batch):
        return self.answer(**batch)


class OfDataclass(Called):
    def forward(self, batch):
        return self.answer(batch.x, batch.y)


class ByName(Called):
    def forward(self, *, x, y=None, mask=None):
        return self.answer(x, y)


class OfAny(Called):
    def forward(self, *args, **kwargs):
        return self.answer(*args, **{name: t for name, t in kwargs.items() if t is not None})


FORMS: dict[str, tuple[type[Called], Any]] = {
    "positions": (Plainly, lambda *xs: (xs, {})),
    "dict": (OfDict, lambda *xs: (({"x": xs[0], "y": xs[1] if xs[1:] else None},), {})),
    "dataclass": (OfDataclass, lambda *xs: ((Batch(*xs),), {})),
    "names": (ByName, lambda *xs: ((), dict(zip("xy", xs, strict=False)) | {"mask": None})),
    "any": (OfAny, lambda *xs: (xs[:1], {"y": xs[1] if xs[1:] else None})),
}
RETURNED = ("result", "dict", "dataclass", "tuple", "twice", "with input")


class Case:
    """A program with what it does in plain PyTorch.

    Attributes:
        leaves, structure: the result.
        gradients: of a sum of its entries with random weights, of each parameter, and of the inputs that require grad.
        state: what the module holds after the call and the backward.
    """

    def __init__(self, program: MapProgram):
        self.program, self.close = program, CLOSE[program.base.dtype]
        self.dtype = getattr(torch, program.base.dtype)
        model, (args, kwargs) = self.build(), self.arguments()
        self.leaves, self.structure, self.gradients = self.run(model, args, kwargs)
        self.state = state(model, identity=False)
        floating = [t for t in self.leaves if is_floating(t)]
        if not floating or not all(t.isfinite().all() for t in floating):
            raise ValueError("the result has no finite entries")
        again, _, gradients = self.run(self.build(), *self.arguments())
        if self.difference(again, gradients) is not None:
            raise ValueError("it is not the same twice")

    def build(self) -> nn.Module:
        """The module, the same each time."""
        program = self.program
        model = FORMS[program.given][0](program.base.build(), program.returned).train(program.base.training)
        for i, p in enumerate(model.parameters()):
            if program.frozen and i % 2 == program.base.seed % 2:
                p.requires_grad_(False)
        return model

    def arguments(self, of: Any = lambda x: x) -> tuple[tuple, dict[str, Any]]:
        """The inputs, plain, the same each time, or what is made of each."""
        inputs = self.program.base.arguments()
        if self.program.leaf_inputs:
            inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        return FORMS[self.program.given][1](*map(of, inputs))

    def call(self, model: Any, args: tuple, kwargs: dict) -> Any:
        """The result; random numbers are the same each time."""
        with self.program.base._defaults(self.program.base.seed + 2):
            return model(*args, **kwargs)

    def run(self, model: Any, args: tuple, kwargs: dict) -> tuple[list[Any], Any, dict[str, torch.Tensor | None]]:
        """The result and its gradients."""
        module = getattr(model, "_model", model)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        leaves, structure = tree_flatten(self.call(model, args, kwargs))
        moving = [t for t in leaves if is_floating(t) and t.requires_grad]
        weights = torch.Generator().manual_seed(self.program.base.seed)
        named = [*module.named_parameters(), *((f"input {i}", t) for i, t in enumerate(inputs) if t.requires_grad)]
        if moving:
            torch.autograd.backward(moving, [torch.randn(t.shape, generator=weights, dtype=t.dtype) for t in moving])
        gradients = {name: t.grad for name, t in named}
        for _, t in named:
            t.grad = None
        return [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves], structure, gradients

    def difference(self, leaves: list[Any], gradients: dict[str, torch.Tensor | None]) -> str | None:
        """Where these are others than the plain ones."""
        if len(leaves) != len(self.leaves):
            return f"{len(leaves)} results, not {len(self.leaves)}"
        pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(leaves, self.leaves, strict=True))]
        pairs += [(f"the gradient of {name}", gradients[name], g) for name, g in self.gradients.items()]
        for what, ours, expected in pairs:
            if isinstance(ours, torch.Tensor) != isinstance(expected, torch.Tensor):
                # torch leaves a gradient of zeros out, or not
                given = ours if isinstance(ours, torch.Tensor) else expected
                if what.startswith("result") or not isinstance(given, torch.Tensor) or given.to_dense().any():
                    return f"{what} is {ours}, not {expected}"
            elif not isinstance(expected, torch.Tensor):
                if ours != expected:
                    return f"{what} is {ours}, not {expected}"
            elif not self.agree(ours, expected):
                return f"{what} is {ours}, not {expected}"
        return None

    def agree(self, ours: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether two tensors are the same but for rounding."""
        if ours.shape != expected.shape or ours.dtype != expected.dtype:
            return False
        a, b = ours.to_dense().double(), expected.to_dense().double()
        # what cancels in bfloat16 is what roundings make of it
        least = 1.0 if self.dtype is torch.bfloat16 else 1e-3
        largest = max(b.abs().nan_to_num(posinf=0.0).amax().item(), least) if b.numel() else 1.0
        return torch.allclose(a, b, rtol=self.close, atol=self.close * largest, equal_nan=True)

    # -- norms --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _norms(self) -> list[tuple[type[NormedTensor], tuple[int, ...] | None] | None]:
        base = self.program.base
        inputs = base.arguments()
        kind = LinfTensor if base.kind == "natural" else getattr(thunder_norm, base.kind)
        found: list[Any] = [(kind, None) if x.is_floating_point() and x.ndim else None for x in inputs]
        if base.kind == "natural":
            try:
                natural = ModularNorm(base.build(), *inputs).inputs[0]
            except ThunderNormError:
                return found
            found = [(type(x), x.elem_dims) if isinstance(x, NormedTensor) else None for x in natural]
        return found

    def normed(self, *, unfinalized: bool = False, scale: float = 1.0, moving: bool = False) -> tuple[tuple, dict[str, Any]]:
        """The arguments in their norms.

        Args:
            unfinalized: norms alone.
            scale: of the sizes.
            moving: with a perturbation size of 1 that requires grad.
        """
        kinds = iter(self._norms)

        def of(x: torch.Tensor) -> Any:
            kind = next(kinds)
            if kind is None:
                return x.detach()
            x = x.detach()
            size = kind[0].of(x, kind[1]).norm_size * scale
            more = {"perturbation_size": torch.ones((), dtype=torch.float64, requires_grad=True)} if moving else {}
            return kind[0](size, elem_dims=kind[1], backing=None if unfinalized else x, **more)

        return self.arguments(of)

    def untouched(self, what: str, model: nn.Module, *args: Any) -> Untouched:
        """A block in which nothing of a module, of arguments and of random generators may change."""
        return Untouched(what, model, args)


class Untouched:
    """See `Case.untouched`."""

    def __init__(self, what: str, model: nn.Module, args: Any):
        self.what, self.model, self.args = what, model, args

    def __enter__(self) -> None:
        self.before, self.random, self.data = state(self.model), random_state(), self._data()

    def __exit__(self, *_: Any) -> None:
        if difference := changed(self.before, state(self.model)):
            raise Wrong(f"{self.what} changed the module: {difference[:3]}")
        if random_state() != self.random:
            raise Wrong(f"{self.what} drew random numbers that are not given back")
        if self._data() != self.data:
            raise Wrong(f"{self.what} changed its arguments")

    def _data(self) -> Any:
        inputs = [t for t in tree_flatten(self.args)[0] if isinstance(t, torch.Tensor) and not isinstance(t, NormedTensor)]
        return [None if t.is_meta else (t._version, t.tolist(), t.requires_grad, t.grad is None) for t in inputs]


def normed_leaves(result: Any) -> list[NormedTensor]:
    """The norms in a result."""
    return [y for y in tree_flatten(result)[0] if isinstance(y, NormedTensor)]


def on_meta(tree: Any) -> Any:
    """Tensors without data."""
    return tree_map(lambda t: t.detach().to("meta") if isinstance(t, torch.Tensor) else t, tree)


def module_on_meta(model: nn.Module) -> nn.Module:
    """The same module without data; what is tied is tied."""
    memo: dict[int, Any] = {}
    attributes = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    for t in [*model.parameters(), *model.buffers(), *attributes]:
        empty = t.detach().to("meta")
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
