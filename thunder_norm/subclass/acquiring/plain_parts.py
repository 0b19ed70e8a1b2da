"""The parts of a program that were compiled and run for values asked for so far.

A loop that asks in each step whether to go on (`while error > tolerance`, a generation that ends with a token) asks for values that are
made of all that came before: of each, only what no earlier one was made of is compiled, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thunder_norm.subclass.acquiring.plain_values import Made, compiled
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol


class Parts:
    """The parts of one program into which nothing is written."""

    def __init__(self) -> None:
        self._of: dict[int, _Part] = {}  # by the identity of operations, which their parts keep
        self._made_by: dict[str, _Part] = {}
        self._are_kept = True

    def forget_results(self) -> None:
        """Let go of what the parts returned for the inputs at hand: what is called from now on is called with others."""
        self._are_kept = False
        for part in set(self._of.values()):
            part.last = None

    def function(self, p: TensorProxy | NumberProxy, made: Made) -> tuple[Callable[..., Any], list[TensorProxy]]:
        """A function of tensors to the value of `p`, and what these stand for: what it is `made` of, and what else its parts take.

        Called again with the same tensors, it runs what it had not run.
        """
        new = [bsym for bsym in made.operations if id(bsym) not in self._of]
        if new:
            part = _Part(new)
            self._of.update((id(bsym), part) for bsym in new)
            self._made_by.update((name, part) for name in part.outputs)
        parts = self._with_theirs(self._of[id(bsym)] for bsym in made.operations)
        made_here = {name for part in parts for name in part.outputs}
        given = {a.name: a for a in made.given}
        given |= {a.name: a for part in parts for a in part.inputs.values() if a.name not in made_here}

        def run(*tensors: Any) -> Any:
            known = dict(zip(given, tensors, strict=True))
            for part in parts:
                known.update(zip(part.outputs, part.results(known, self._are_kept), strict=True))
            return known[p.name]

        return run, list(given.values())

    def _with_theirs(self, wanted: Iterable[_Part]) -> list[_Part]:
        """These parts and those whose results they take, in the order in which they were made."""
        found, pending = set(), list(wanted)
        while pending:
            part = pending.pop()
            if part not in found:
                found.add(part)
                pending += [self._made_by[name] for name in part.inputs if name in self._made_by]
        return [part for part in dict.fromkeys(self._of.values()) if part in found]


class _Part:
    """Operations that are compiled together."""

    def __init__(self, operations: Sequence[BoundSymbol]) -> None:
        self._operations = operations
        self.inputs: dict[str, Any] = {}
        made: dict[str, Any] = {}
        for bsym in operations:
            self.inputs.update((a.name, a) for a in bsym.flat_proxy_args if a.name not in made)
            made.update((o.name, o) for o in bsym.flat_proxy_outs if o.name not in self.inputs)
        self.outputs = tuple(made)
        self._run = compiled(list(made.values()), list(operations), list(self.inputs.values()))
        self.last: tuple[list[Any], Sequence[Any]] | None = None

    def results(self, known: Mapping[str, Any], are_kept: bool) -> Sequence[Any]:
        """What they return, by `outputs`; what they returned last if they take the same objects."""
        given = [known[name] for name in self.inputs]
        if self.last is not None and all(a is b for a, b in zip(self.last[0], given, strict=True)):
            return self.last[1]
        found = self._run(*given)
        found = found if len(self.outputs) > 1 else (found,)
        self.last = (given, found) if are_kept else None
        return found
