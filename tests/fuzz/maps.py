"""What is computed from traces of random modules: norm maps, reports, sensitivities, profiles, memory budgets, and transforms at once.

See `map_norms`, `map_costs` and `map_transforms` for what has to hold, `map_models` for how modules are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import thunder

from . import map_costs, map_norms, map_transforms, modules
from .map_models import FORMS, RETURNED, Case
from .module_nodes import Node, Pick
from .modules import ModuleProgram
from .networks import OF_FAMILIES
from .plain_modules import Wrong
from .program import BAD, Outcome, outcome_of

CHECKS: dict[str, Callable[[Case], None]] = {**map_norms.CHECKS, **map_costs.CHECKS, **map_transforms.CHECKS}


@dataclass(frozen=True)
class MapProgram:
    """A random module, how it is called, and what is checked.

    Attributes:
        base: the module, its inputs, dtype and seed.
        given: how inputs are handed over.
        returned: the form of the result.
        frozen: whether every other parameter takes no gradient.
        leaf_inputs: whether inputs require grad.
        checks: what is checked.
    """

    base: ModuleProgram
    given: str
    returned: str
    frozen: bool
    leaf_inputs: bool
    checks: tuple[str, ...]

    def run(self) -> Outcome:
        """The worst of what the checks find."""
        try:
            case = Case(self)
        except Exception as e:  # noqa: BLE001 - whatever it is, there is nothing to compare with
            return Outcome("no oracle", f"{type(e).__name__}: {e}")
        found = [self._checked(case, name) for name in self.checks]
        for kind in (*BAD, "refused", "no oracle"):
            for o in found:
                if o.kind == kind:
                    return o
        return Outcome("right")

    def _checked(self, case: Case, name: str) -> Outcome:
        try:
            CHECKS[name](case)
        except Wrong as e:
            return Outcome("wrong", f"{name}: {e}")
        except Exception as e:  # noqa: BLE001 - every end of a program is a result
            of = outcome_of(e)
            if of.kind == "error" and not _thunder_runs(case):
                return Outcome("no oracle", f"Thunder alone: {of.detail}")
            return Outcome(of.kind, f"{of.detail.partition(':')[0]} in {name}: {of.detail.partition(':')[2].strip()}")
        return Outcome("right")

    def smaller(self) -> Iterable[MapProgram]:
        """With fewer checks, a simpler call, a smaller module."""
        for i in range(len(self.checks) if len(self.checks) > 1 else 0):
            yield replace(self, checks=self.checks[:i] + self.checks[i + 1 :])
        simpler: dict[str, Any] = {"given": "positions", "returned": "result", "frozen": False, "leaf_inputs": False}
        for name, value in simpler.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        for base in self.base.smaller():
            yield replace(self, base=base)
        if self.base.dtype != "float64":
            yield replace(self, base=replace(self.base, dtype="float64"))

    def source(self) -> str:
        """A program that can be pasted."""
        shown = "".join(f"# {line}\n" for line in f"{self.base.expression}\n{', '.join(self.base.inputs)}".splitlines())
        return (
            "from tests.fuzz.maps import MapProgram\nfrom tests.fuzz.module_nodes import Node\n"
            f"from tests.fuzz.modules import ModuleProgram\n\n{shown}print({self!r}.run())\n"
        )

    def labels(self) -> Sequence[str]:
        """What is checked, how it is called, and the parts of the module."""
        return [
            *(f"check: {c}" for c in self.checks),
            f"given: {self.given}",
            f"returned: {self.returned}",
            self.base.dtype,
            *self._parts(),
        ]

    def _parts(self) -> Iterable[str]:
        of_networks = (node.args[0] for layer in self.base.layers for node in layer.nodes() if node.head == "network_part")
        return [*self.base.labels(), *(f"part: {str(name)[1:-1]}" for name in of_networks)]


def _thunder_runs(case: Case) -> bool:
    """Whether Thunder alone runs the module, forward and backward: if not, an error may be its own."""
    try:
        case.run(thunder.jit(case.build()), *case.arguments())
    except Exception:  # noqa: BLE001 - Thunder's own affair
        return False
    return True


def draw(random: Random) -> MapProgram:
    """A module of `modules` or of parts of networks, at one of several sizes, with one or two checks."""
    pick = Pick(random)
    base = _network(pick) if pick.chance(0.4) else replace(modules.draw(random), extra=())
    base = _resized(pick, replace(base, dtype=pick.choice(["float64", "float64", "float32", "bfloat16"])))
    return MapProgram(
        base,
        pick.choice(["positions", *FORMS]),
        pick.choice(["result", *RETURNED]),
        pick.chance(0.2),
        pick.chance(0.4),
        tuple(random.sample(sorted(CHECKS), pick.choice([1, 1, 2]))),
    )


def _network(pick: Pick) -> ModuleProgram:
    """One to three parts of networks, one after the other."""
    d, batch, length = pick.choice([4, 6]), pick.choice([1, 2, 3]), pick.choice([1, 3, 4])
    family = pick.choice(["rows", "tokens", "tokens", "sequences", "images"])
    shape = {"rows": (batch, d), "images": (batch, d, 4, 3)}.get(family, (batch, length, d))
    of = OF_FAMILIES[family]
    parts = tuple(
        Node("network_part", (repr(pick.choice(list(pick.choice(of)))), str(pick.random.randrange(1000)), str(d)))
        for _ in range(pick.choice([1, 1, 2, 3]))
    )
    kind = pick.choice(["LinfTensor", "RMSTensor", "RMSTensor", "L2Tensor"])
    return ModuleProgram(parts, (f"torch.randn{shape}",), kind, pick.chance(0.5), seed=pick.random.randrange(1000))


def _resized(pick: Pick, base: ModuleProgram) -> ModuleProgram:
    """With a first dimension of 1, of an odd number, or an empty one, where the module runs so."""
    if not pick.chance(0.3):
        return base
    size = pick.choice([1, 1, 5, 0])
    inputs = tuple(_with_first(text, size) for text in base.inputs)
    other = replace(base, inputs=inputs)
    return other if modules._runs(other) else base


def _with_first(text: str, size: int) -> str:
    head, opened, shape = text.rpartition("(")
    return f"{head}{opened}{size},{shape.partition(',')[2]}" if "," in shape else text
