"""Writes the structured programs: templates in templates, with the variables that there are at each place."""

from __future__ import annotations

import contextlib
import random
import re
import textwrap
import warnings
from dataclasses import dataclass, field, replace

from .python_definitions import CHANGES, DEFINITIONS, Definition
from .python_expressions import CAUGHT, ERRORS, EXPRESSIONS, KIND_OF, LITERALS
from .python_statements import COMPOUND, OF_GENERATORS, OF_LOOPS, SIMPLE

ARGUMENTS = ("x", "y", "n", "k", "s", "l", "d", "o")
_BLOCK = re.compile(r"^( *)\{([BLSFY])((?: [\w.]+)*)\}$", re.MULTILINE)
_HOLE = re.compile(r"\{\{|\}\}|\{(=?)([a-zA-Z])\}|\{x\}")
_NAME = re.compile(r"\$([A-Za-z]+)")
DEPTH = 3
_SHADOWED = frozenset({"n", "k", "x", "y", "s", "l", "d"})


@dataclass(frozen=True)
class Place:
    """What there is at a place in a program.

    Attributes:
        readable: names that may be read.
        assignable: those of them that may be assigned.
        returned: what ``return`` gives, None where there is no ``return``.
    """

    readable: tuple[str, ...]
    assignable: tuple[str, ...]
    depth: int = 0
    is_in_loop: bool = False
    yields: bool = False
    returned: str | None = None
    has_others: bool = True  # whether `o` is there


@dataclass
class Writer:
    """Draws the text of one program."""

    numbers: random.Random
    labels: list[str] = field(default_factory=list)
    names: int = 0

    def name(self, like: str) -> str:
        self.names += 1
        return f"{like}{self.names}"

    def expression(self, kind: str, place: Place, depth: int = 0) -> str:
        """One of a kind: a variable, a literal, or an operation on such."""
        pick = self.numbers.random()
        names = [n for n in place.readable if KIND_OF.get(n) == kind]
        if names and pick < 0.4 + 0.25 * depth:
            return self.numbers.choice(names)
        if kind in LITERALS and pick < 0.5 + 0.25 * depth:
            return self._filled(self.numbers.choice(LITERALS[kind]), place, depth)
        text = self._filled(self.numbers.choice(EXPRESSIONS[kind]), place, depth + 1)
        return f"({text})" if depth else text

    def _filled(self, template: str, place: Place, depth: int = 0) -> str:
        def of(match: re.Match) -> str:
            if match[0] in ("{{", "}}"):
                return match[0][0]
            kind = match[2] or "t"
            if match[1]:
                return self._assigned(kind, place)
            if kind in "IQ":
                names = [n for n in place.readable if KIND_OF.get(n) == {"I": "i", "Q": "s"}[kind]]
                return self.numbers.choice(names) if names else "len(r)"
            if kind == "e":
                return self._filled(self.numbers.choice(ERRORS), place, 1)
            if kind == "E":
                return self.numbers.choice(CAUGHT)
            return self.expression("t" if kind == "x" else kind, place, min(depth, 2))

        return _HOLE.sub(of, self._named(template, {}))

    def _named(self, template: str, names: dict[str, str]) -> str:
        def of(match: re.Match) -> str:
            if match[1] not in names:
                names[match[1]] = self.name(match[1])
            return names[match[1]]

        return _NAME.sub(of, template)

    def _assigned(self, kind: str, place: Place) -> str:
        names = [n for n in place.assignable if KIND_OF.get(n) == kind]
        return self.numbers.choice(names) if names else f"{kind}_"

    def template(self, template: str, place: Place, names: dict[str, str] | None = None) -> str:
        """The text of a template at a place."""
        lines = []
        for line in self._named(template, dict(names or {})).split("\n"):
            block = _BLOCK.match(line)
            if block is None:
                lines.append(self._filled(line, place))
            else:
                inside = self._inside(block[2], block[3].split(), place)
                lines.append(
                    textwrap.indent(self.block(inside, self.numbers.choice((1, 1, 2, 2, 3)) if block[2] != "S" else 1), block[1])
                )
        return "\n".join(lines)

    def _inside(self, kind: str, names: list[str], place: Place) -> Place:
        depth = place.depth + 1
        if kind in "BLS":
            return replace(place, depth=depth, is_in_loop=place.is_in_loop or kind == "L")
        outer = [n for n in place.readable if n not in names]
        return Place((*names, *outer), tuple(names), depth, False, kind == "Y", "{v}", place.has_others)

    def block(self, place: Place, count: int) -> str:
        """Some statements."""
        return "\n".join(self.statement(place) for _ in range(count))

    def statement(self, place: Place) -> str:
        """One statement that may stand at a place."""
        for _ in range(40):
            template = self._chosen(place)
            if self._fits(template, place):
                break
        else:
            template = "r.append({v})"
        self.labels.append(template.split("\n")[0])
        return self.template(template, place)

    def _chosen(self, place: Place) -> str:
        pick = self.numbers.random()
        if place.yields and pick < 0.4:
            return self.numbers.choice(OF_GENERATORS)
        if place.is_in_loop and pick < 0.15:
            return self.numbers.choice(OF_LOOPS)
        if place.returned is not None and pick > 0.96:
            return f"return {place.returned}"
        is_deep = place.depth >= DEPTH or self.numbers.random() < 0.25 * place.depth
        return self.numbers.choice(SIMPLE if is_deep or self.numbers.random() < 0.4 else COMPOUND)

    def _fits(self, template: str, place: Place) -> bool:
        if "{=" in template:
            for kind in re.findall(r"\{=(\w)\}", template):
                if not any(KIND_OF.get(n) == kind for n in place.assignable):
                    return False
        if re.search(r"\bo\b", template) and not place.has_others or "o = " in template and place.depth:
            return False
        if place.depth >= DEPTH and _BLOCK.search(template):
            return False
        return place.has_others or "nonlocal" not in template

    def definition(self, definition: Definition, place: Place) -> tuple[str, dict[str, str]]:
        """The text of a class or function, and the names of what it defines."""
        names = {key: self.name(key) for key in dict.fromkeys(_NAME.findall(definition.text))}
        return self.template(definition.text, place, names), names


def written(numbers: random.Random) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The text of a program that compiles, the changes between its calls, and what is in it."""
    while True:
        found = _written(numbers)
        with warnings.catch_warnings(), contextlib.suppress(SyntaxError):
            warnings.simplefilter("ignore")
            compile(found[0], "drawn", "exec")
            return found


def _written(numbers: random.Random) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    writer = Writer(numbers)
    at_module = Place(("G", "H"), (), 1, has_others=False)
    in_function = Place((*ARGUMENTS, "G"), tuple(n for n in ARGUMENTS if n != "o"), 0, returned="r, {v}")
    before, inside, uses = [], [], []
    for definition in numbers.sample(DEFINITIONS, numbers.choice((0, 1, 1, 2, 2, 3))):
        is_local = numbers.random() < 0.4
        text, names = writer.definition(
            definition, replace(in_function, depth=1, returned=None, assignable=()) if is_local else at_module
        )
        writer.labels.append(definition.name)
        (inside if is_local else before).append(text)
        uses += [(use, names) for use in numbers.choices(definition.uses, k=numbers.choice((1, 2, 3)))]
    statements = [writer.template(use, in_function, names) for use, names in uses]
    statements += [writer.statement(in_function) for _ in range(numbers.choice((1, 2, 3, 4, 5)))]
    numbers.shuffle(statements)
    body = "\n".join(["global r", "r = []", *inside, *statements, "return r, n, x, l, d"])
    text = "".join(f"{t}\n" for t in before) + f"def f({', '.join(ARGUMENTS)}):\n" + textwrap.indent(body, "    ") + "\n"
    changes = tuple(numbers.choice(CHANGES) for _ in range(2))
    return text, changes, tuple(dict.fromkeys(writer.labels))
