"""What a module does in plain PyTorch, and how a result with norms compares with it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import thunder_norm
from thunder_norm import LinfTensor, NormedTensor
from thunder_norm.audit import norm
from thunder_norm.errors import ThunderNormError
from thunder_norm.modular import ModularNorm

from .module_state import state

if TYPE_CHECKING:
    from .modules import ModuleProgram

SLACK = {"float64": 1e-8, "float32": 1e-4}


class Wrong(Exception):
    """What the library says is not so."""


class Plain:
    """What the module does in plain PyTorch.

    Attributes:
        results: the leaves of its result.
        state: what the module holds after the call.
        gradients: of a random combination of the results, for each parameter; None where there is none.
    """

    def __init__(self, program: ModuleProgram):
        self.program = program
        self.slack = SLACK[program.dtype]
        model = program.build()
        self.results, self.structure = tree_flatten(program.call(model, *program.arguments()))
        self.state = state(model, identity=False)
        again = self.at({}, [])
        floating = [t for t in self.results if is_floating(t)]
        if not floating or not all(t.isfinite().all() for t in floating):
            raise ValueError("the result has no finite entries")
        if not all(torch.equal(a, b) for a, b in zip(self.results, again, strict=True) if isinstance(a, torch.Tensor)):
            raise ValueError("it is not the same twice")
        generator = torch.Generator().manual_seed(program.seed)
        self.gradients = self._gradients(model, generator)
        self._norms: list[Any] | None = None

    def _gradients(self, model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor | None] | None:
        moving = [t for t in self.results if is_floating(t) and t.requires_grad]
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if not moving or not names:
            return {}
        total = sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in moving)
        found = dict(model.named_parameters())
        try:
            total.backward()
        except RuntimeError:
            return None  # torch has none: an in-place operation on what is saved, an inference tensor
        gradients = {name: found[name].grad for name in names}
        for p in found.values():
            p.grad = None
        return gradients

    def at(self, parameters: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> list[Any]:
        """The results with other parameters and inputs."""
        model = self.program.build()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in parameters:
                    p.copy_(parameters[name])
        with torch.no_grad():
            return tree_flatten(self.program.call(model, *(inputs or self.program.arguments())))[0]

    def inputs(self) -> list[Any]:
        """The floating inputs in their norms."""
        given = self.program.arguments()
        if self._norms is None:
            self._norms = [self._norm(x) for x in given]
            if self.program.kind == "natural":
                with contextlib.suppress(ThunderNormError):
                    natural = ModularNorm(self.program.build(), *given).inputs[0]
                    self._norms = [(type(x), x.elem_dims) if isinstance(x, NormedTensor) else None for x in natural]
        return [x if k is None else k[0].of(x, k[1]) for x, k in zip(given, self._norms, strict=True)]

    def _norm(self, x: torch.Tensor) -> tuple[type[NormedTensor], tuple[int, ...] | None] | None:
        """Without a better idea the largest entry."""
        return (getattr(thunder_norm, self.program.kind, LinfTensor), None) if x.is_floating_point() else None


def is_floating(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def norm_of(t: NormedTensor, of: torch.Tensor) -> float:
    return norm(type(t), of.detach().double(), t.elem_dims).item()


def compare(plain: Plain, result: Any, what: str) -> list[tuple[int, NormedTensor]]:
    """The normed results: of the same structure and values as the plain ones, and within their bounds."""
    leaves, structure = tree_flatten(result)
    if structure != plain.structure:
        raise Wrong(f"{what}: the result is {structure}, not {plain.structure}")
    found = []
    for i, (y, expected) in enumerate(zip(leaves, plain.results, strict=True)):
        value = y.backing if isinstance(y, NormedTensor) else y
        if not isinstance(expected, torch.Tensor):
            if value != expected:
                raise Wrong(f"{what}: result {i} is {value}, not {expected}")
            continue
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise Wrong(f"{what}: result {i} is {value.dtype} {list(value.shape)}, not {expected.dtype} {list(expected.shape)}")
        if not torch.allclose(value.detach(), expected.detach(), rtol=plain.slack, atol=plain.slack * 10):
            raise Wrong(f"{what}: result {i} has other values, by {(value - expected).abs().amax().item():.3g}")
        if not isinstance(y, NormedTensor):
            continue
        actual, bound = norm_of(y, expected), y.norm_size.item()
        if not actual <= bound * (1 + plain.slack) + plain.slack:
            raise Wrong(f"{what}: result {i} has norm {actual:.6g}, the bound is {bound:.6g}: {y!r}")
        found.append((i, y))
    return found
