"""Random modules, with norms: see `module_checks` for what has to hold, `module_parts` for what they are made of."""

from __future__ import annotations

import contextlib
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import prune
from torch.utils._pytree import tree_leaves

from . import module_checks, module_classes
from .module_nodes import Node, Pick, Shape
from .module_parts import embedding, head, part
from .network_functions import network_part
from .program import Outcome

_MOST_ENTRIES = 1500
_DIMS = ((3, 4), (2, 6), (2, 3, 4), (2, 5, 6), (1, 4, 4), (2, 4, 6), (2, 4, 8), (2, 4, 5, 5), (1, 4, 6, 6), (2, 2, 4, 4, 4))


@dataclass(frozen=True)
class ModuleProgram:
    """``nn.Sequential`` of random parts, or of one of two arguments and parts, on random inputs.

    Attributes:
        layers: the parts.
        inputs: expressions for the inputs.
        kind: the norms of floating inputs: "natural" (what `ModularNorm` takes), or the name of a kind.
        training: whether the module is in training.
        dtype: of everything.
        seed: of parameters, inputs, dropout and the directions in which things move.
        extra: more that is checked besides the usual: "report", "modes", "nan", "map", "jit".
    """

    layers: tuple[Node, ...]
    inputs: tuple[str, ...]
    kind: str = "natural"
    training: bool = False
    dtype: str = "float64"
    seed: int = 0
    extra: tuple[str, ...] = ()

    @property
    def expression(self) -> str:
        """The module's text."""
        parts = ",\n    ".join(layer.text for layer in self.layers)
        if len(self.layers) == 1:
            return parts
        return f"{'nn.Sequential' if len(self.inputs) == 1 else 'Chain'}(\n    {parts},\n)"

    def build(self) -> nn.Module:
        """The module, the same each time."""
        with self._defaults(self.seed):
            model = _evaluated(self.expression).train(self.training)
            if any(isinstance(m, LazyModuleMixin) for m in model.modules()):  # the first call makes it another module
                model(*self.arguments())
                if any(nn.parameter.is_lazy(t) for t in [*model.parameters(), *model.buffers()]):
                    raise ValueError("a lazy module that is not called")
            return model

    def arguments(self) -> list[torch.Tensor]:
        """The inputs, plain, the same each time."""
        with self._defaults(self.seed + 1):
            return [_evaluated(text) for text in self.inputs]

    def call(self, model: nn.Module, *args: Any) -> Any:
        """The module's result; random numbers are the same each time."""
        with self._defaults(self.seed + 2):
            return model(*args)

    @contextlib.contextmanager
    def _defaults(self, seed: int) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also writes down a stack for each kind of device: 100 us
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def run(self) -> Outcome:
        return module_checks.outcome(self)

    def smaller(self) -> Iterator[ModuleProgram]:
        first = 0 if len(self.inputs) == 1 else 1
        for i in range(first, len(self.layers)):
            if len(self.layers) > 1:
                yield replace(self, layers=self.layers[:i] + self.layers[i + 1 :])
        for i in range(len(self.extra)):
            yield replace(self, extra=self.extra[:i] + self.extra[i + 1 :])
        if self.training:
            yield replace(self, training=False)
        for i, layer in enumerate(self.layers):
            for other in layer.smaller():
                yield replace(self, layers=(*self.layers[:i], other, *self.layers[i + 1 :]))

    def source(self) -> str:
        used = {name for layer in self.layers for node in layer.nodes() for name in _names(node)} - {"nn"}
        used |= {"Chain"} if len(self.inputs) > 1 and len(self.layers) > 1 else set()
        classes = [inspect.getsource(CLASSES[name]) for name in CLASSES if name in _with_helpers(used)]
        inputs = ", ".join(self.inputs) + ","
        return (
            _IMPORTS
            + "\n\n".join(classes)
            + f"\n\ntorch.set_default_dtype(torch.{self.dtype})\n"
            + f"\n\ndef made():\n    torch.manual_seed({self.seed})\n    return {self.expression}.train({self.training})\n\n\n"
            + f"torch.manual_seed({self.seed + 1})\ninputs = ({inputs})\n"
            + _SHOWN
        )

    def labels(self) -> Sequence[str]:
        return sorted({name for layer in self.layers for node in layer.nodes() for name in _names(node)})


class Chain(nn.Module):
    """The first part takes all arguments, the others what the one before made."""

    def __init__(self, first, *rest):
        super().__init__()
        self.first, self.rest = first, nn.Sequential(*rest)

    def forward(self, *args):
        return self.rest(self.first(*args))


CLASSES = {**module_classes.CLASSES, "Chain": Chain}
_NAMESPACE = {"torch": torch, "nn": nn, "prune": prune, "network_part": network_part, **CLASSES}

_IMPORTS = """import copy
from typing import NamedTuple
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from thunder_norm import LinfTensor, NormedTensor
from thunder_norm.modular import ModularNorm

"""
_SHOWN = """

def run(model, *args):
    torch.manual_seed(0)
    return [t for t in tree_leaves(model(*args)) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def attempt(what, f):
    model = made()  # anew: it may count its calls
    try:
        print(what, f(model))
    except Exception as e:
        print(what, type(e).__name__, e)


def reached(model):
    found = ModularNorm(model, *inputs).sensitivities
    return {name: s > 0 for name, s in found.items()}


def with_gradient(model):
    sum(t.square().sum() for t in run(model, *inputs)).backward()
    return {name: p.grad is not None for name, p in model.named_parameters()}


wrapped = [LinfTensor.of(x) if x.is_floating_point() else x for x in inputs]
attempt("bounds           ", lambda model: run(model, *wrapped))
attempt("largest entries  ", lambda model: [t.abs().amax().item() for t in run(model, *inputs)])
attempt("reached          ", reached)
attempt("with a gradient  ", with_gradient)
"""


def _names(node: Node) -> Iterator[str]:
    """The names of classes in an expression, those in its texts too."""
    for text in (node.head, *(a for a in node.args if isinstance(a, str)), *node.options):
        for name in text.replace("(", " ").replace("=", " ").replace(",", " ").split():
            if name in CLASSES or name.startswith(("nn.", "prune.")):
                yield name


def _with_helpers(used: set[str]) -> set[str]:
    """These classes and what their sources mention."""
    found = set(used) & set(CLASSES)
    while True:
        sources = " ".join(inspect.getsource(CLASSES[name]) for name in found)
        more = {
            name
            for name in CLASSES
            if name + "(" in sources or name + "." in sources or f" {name}\n" in sources or f"({name})" in sources
        }
        if more <= found:
            return found
        found |= more


_compiled: dict[str, Any] = {}


def _evaluated(text: str) -> Any:
    """The value of an expression; its text is known to whoever shows a line of it."""
    if text not in _compiled:
        if len(_compiled) > 500:
            _compiled.clear()
        name = f"<module {abs(hash(text))}>"
        linecache.cache[name] = (len(text), None, [line + "\n" for line in text.splitlines()], name)
        _compiled[text] = compile(text, name, "eval")
    return eval(_compiled[text], dict(_NAMESPACE))


# -- drawing -----------------------------------------------------------------------------------------------------------------


def draw(random: Random) -> ModuleProgram:
    """A module of one to five parts that runs on its inputs; one in five ends in a loss or in several results.

    One in two hundred is short, and goes through Thunder as well, which takes seconds.
    """
    pick = Pick(random)
    program = _begun(pick)
    is_traced = pick.chance(1 / 200)
    for _ in range(1 if is_traced else pick.choice([1, 1, 2, 2, 3, 4])):
        program = _longer(program, pick, lambda shape: part(pick, shape))
    if pick.chance(0.2):
        program = _longer(program, pick, lambda shape: head(pick, shape))
    extra = ("report",) * pick.chance(0.2) + ("modes",) * pick.chance(0.2) + ("nan",) * pick.chance(0.3)
    return replace(program, extra=extra + (pick.choice(("map", "jit")),) * is_traced)


def _begun(pick: Pick) -> ModuleProgram:
    """A program of the inputs alone, or of what brings several or ids together."""
    given = {
        "kind": pick.choice(["natural", "natural", "natural", "LinfTensor", "RMSTensor"]),
        "training": pick.chance(0.5),
        "dtype": "float32" if pick.chance(0.2) else "float64",
        "seed": pick.random.randrange(1000),
    }
    if pick.chance(0.1):
        length = pick.choice([3, 4])
        return ModuleProgram((embedding(pick, length),), (f"torch.randint(7, (2, {length}))",), **given)
    shape = pick.choice(_DIMS)
    draw_input = pick.choice(["torch.randn{}", "torch.randn{}", "torch.randn{}", "torch.rand{}", "3 * torch.randn{}"])
    if pick.chance(0.1):
        c = str(shape[-1])
        for _ in range(5):
            first, second = part(pick, shape, 2), part(pick, shape, 2)
            if len(shape) == 3 and pick.chance(0.3):
                heads = 2 if shape[-1] % 2 == 0 else 1
                layer = Node("nn.TransformerDecoderLayer", (c, str(heads), "4"), ("batch_first=True",))
                node = Node("Translated", (layer, Node("nn.Identity"), Node("nn.Linear", (c, c))))
            else:
                node = Node("TwoInputs", (first, second, f"{pick.choice(['add', 'mul', 'cat', 'matmul'])!r}"))
            program = ModuleProgram((node,), (draw_input.format(shape), f"torch.randn{shape}"), **given)
            if _shape(program) is not None:
                return program
    return ModuleProgram((), (draw_input.format(shape),), **given)


def _longer(program: ModuleProgram, pick: Pick, draw_part: Any) -> ModuleProgram:
    """With one more part, if one of a few that are drawn fits."""
    shape: Shape | None = _shape(program)
    if shape is None:
        return program
    for _ in range(8):
        candidate = replace(program, layers=(*program.layers, draw_part(shape)))
        if _runs(candidate):
            return candidate
    return program


def _result(program: ModuleProgram) -> list[Any]:
    model = program.build()  # a pruned weight with gradients is not copied
    with torch.no_grad():
        return tree_leaves(program.call(model, *program.arguments()))


def _runs(program: ModuleProgram) -> bool:
    try:
        found = [t for t in _result(program) if isinstance(t, torch.Tensor)]
    except Exception:  # noqa: BLE001 - it does not fit
        return False
    return bool(found) and all(t.numel() <= _MOST_ENTRIES and (not t.is_floating_point() or t.isfinite().all()) for t in found)


def _shape(program: ModuleProgram) -> Shape | None:
    """The shape of the result, if it is one floating tensor that something can follow."""
    if not program.layers:
        return tuple(program.arguments()[0].shape)
    try:
        result = _result(program)
    except Exception:  # noqa: BLE001 - it does not fit
        return None
    if len(result) != 1 or not isinstance(result[0], torch.Tensor) or not result[0].is_floating_point():
        return None
    shape = tuple(result[0].shape)
    return shape if len(shape) >= 2 and result[0].numel() else None
