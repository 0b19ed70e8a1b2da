"""What the prologue is to check, each once, and of which inputs.

Thunder compares a check with all before it, and each tensor of a check with all inputs, so that the time grows with the square of the
number of parameters; here a check with those of the same tensor or number, and inputs are looked up by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from thunder_norm.tracing.replacement import Replacement
from thunder.core import jit_ext
from thunder.core.proxies import Proxy, ProxyInterface, Variable, variableify

_INDEX = "_thunder_norm_constraints"


@dataclass(eq=False)
class _Index:
    """The constraints of one acquisition by function and first argument."""

    of: list[Any]
    found: dict[Any, list[Any]] = field(default_factory=dict)
    count: int = 0
    last: Any = None

    def is_of(self, constraints: list[Any]) -> bool:
        """Whether it has these constraints: others may have replaced or removed some."""
        return self.of is constraints and self.count == len(constraints) and (not constraints or self.last is constraints[-1])

    def adds(self, constraint: Any) -> bool:
        """Take in a constraint; whether it is new."""
        same = self.found.setdefault(_key(constraint), [])
        if any(_is_same(c, constraint) for c in same):
            return False
        same.append(constraint)
        return True

    def note(self) -> None:
        """The list is as it is now."""
        self.count, self.last = len(self.of), self.of[-1] if self.of else None


def _key(constraint: Any) -> Any:
    function, *arguments = constraint
    first = arguments[0] if arguments else None
    return len(constraint), function, first.name if isinstance(first, Proxy) else None


def _is_same(one: Any, other: Any) -> bool:
    for a, b in zip(one[1:], other[1:], strict=True):
        if isinstance(a, ProxyInterface) and isinstance(b, ProxyInterface):
            a, b = variableify(a), variableify(b)
        if a != b:
            return False
    return True


def _add_constraint(ctx: Any, constraint: Any) -> None:
    index = getattr(ctx, _INDEX, None)
    if index is None or not index.is_of(ctx._constraints):
        index = _Index(ctx._constraints)
        for c in ctx._constraints:
            index.adds(c)
        setattr(ctx, _INDEX, index)
    if index.adds(constraint):
        ctx._constraints.append(constraint)
    index.note()


class _Inputs(list):
    """Variables, of which the first of a name is found without a comparison with each."""

    def __init__(self, variables: list[Variable]):
        super().__init__(variables)
        self._places: dict[str, int] = {}
        for i, v in enumerate(variables):
            self._places.setdefault(v.proxy.name, i)

    def __contains__(self, variable: Variable) -> bool:
        return variable.proxy.name in self._places

    def index(self, variable: Variable) -> int:
        return self._places[variable.proxy.name]


def _comparable(place: Any) -> Any:
    """Where a prologue finds a value; an entry of a dict may be under a key that is a tensor, by the name that it has there."""
    return [step.name if isinstance(step, Proxy) else step for step in place] if isinstance(place, list) else place


def _sorted(values: Any, key: Any = None) -> list[Any]:
    found = sorted(values, key=None if key is None else lambda v: _comparable(key(v)))
    return _Inputs(found) if found and all(type(v) is Variable for v in found) else found


REPLACEMENTS = (
    Replacement(jit_ext.JitCtx, "add_constraint", _add_constraint, "JitCtx.add_constraint"),
    Replacement(jit_ext, "sorted", _sorted, "unpack_inputs, which looks for each tensor of each check in the sorted inputs"),
)
