"""Random programs with wrapper classes that are drawn too, against eager PyTorch: also what is changed between calls.

A program is that of `wrappers` in a class of `made_classes`. It is called three times: twice alike, and once more with inputs that were made
otherwise (another context, a part that is missing, another size), or with another class attribute, where the answer has to be eager mode's again.
"""

from __future__ import annotations

import dataclasses
import functools
import random as randomness
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.transforms import SubclassTransform
import thunder

from . import made_classes
from .program import Outcome, beside_compile, outcome_of
from .wrapper_runs import Ran, differences, ran
from .wrapper_statements import TEMPLATES, WEIGHTS
from .wrappers import NAMES, Input, Words, WrapperProgram, result_of, some_statements

OWN = {
    "made": "Made.of({p}) | Made.of({p} * 2, notes=Notes(names=('inside',))) | {w}.like({p}) | type({w}).of({p}) | Made.of({p}.sum(0, keepdim=True).expand(4, 4))",
    "members": """
        {w}.scaled({c}) | {a} * {w}.magnitude | {w}.plain() | {w}.plain() * {a} | {w}.inner * 2 | {a} * {w}.FACTOR | {a} * (len({w}.notes.names) + 2)
        {a} * 2 if {w}.notes.kind is Kind.PLAIN else {a} * 3 | {a} + 1 if isinstance({w}, Made) else {a} | {a} * type({w}).FACTOR | {w}.scaled(2).sum()
        {a} * 3 if {w}.requires_grad else {a} | {a} * 2 if {w}.inner.dtype == torch.int8 else {a} | {a} + {w}.notes.depth | {a} * 2 if hasattr({w}, "scale") else {a}
        {a} * 2 if getattr({w}, "mask", None) is None else {a} * 3 | {w}.clone().scaled({c}) | torch.relu({w}) | torch.tanh({w}) | {w}.sum() | {w}.data
        {v} = {w}.clone(); {v}.notes = Notes(names=("set",)); {v} = {v} * 2 | {v} = {w}.detach(); {v}.note = 3; {v} = {a} * {v}.note
    """,
    "layers": "F.linear({p}, {w}) | F.linear({p}, {w}, {p}[0]) | F.linear({w}, {p}) | F.linear({p}, {w}).relu() | F.embedding(torch.tensor([1, 0]), {w}) | F.linear({a}, {b})",
    "writes": """
        with torch.no_grad(): {v} = {x}.copy_({p}) | with torch.no_grad(): {v} = {x}.mul_({c}) | {x}[0].mul_(2) | {x}.view(-1).add_(1) | {v} = {a}.clone(); {v}[0] = 1.0
        {v} = {a}.clone(); {v}[:, 1].mul_({c}) | {v} = {w}.clone(); {v}.inner.mul_(2) | {x}.zero_() | {v} = {a}.t(); {v}.mul_({c}) | {x}.data.mul_(2) | {x}.detach().add_(1)
        {v} = {x}; {v}[0] = {p}[0] | {w}.inner.add_(1) | {v} = {a}.clone(); {v} += {b} | {v} = {a}.clone(); {v}.t().mul_(2)
    """,
}
MADE_TEMPLATES = TEMPLATES | {
    kind: [t.strip() for line in text.strip().splitlines() for t in line.split(" | ")] for kind, text in OWN.items()
}
del MADE_TEMPLATES["construction"], MADE_TEMPLATES["identities"]
MADE_WEIGHTS = WEIGHTS | {"members": 5, "made": 3, "layers": 3, "writes": 4}
HOW = ("Made.of({t})", "Made.of({t}, notes=Notes(Kind.SIGNED, ('x',)))", "Made.of({t}, notes=Notes(names=('x', 'y')))")


@dataclass(frozen=True)
class MadeProgram(WrapperProgram):
    """A program, the class that it is about, and what is changed before the third call."""

    form: made_classes.Form
    change: str  # "notes", "size", "factor", "gradients", "class"

    def _names(self) -> dict[str, Any]:
        names = NAMES | {"__name__": __name__}
        exec(made_classes.HEADER + self.form.text() + self.code(), names)  # noqa: S102 - a program of ours
        return names

    def source(self) -> str:
        return f"{made_classes.HEADER}\n{self.form.text()}\n\n{self.code()}\n\n# inputs: {self.inputs}, seed {self.seed}, tangent {self.tangent}, change {self.change}\n"

    def labels(self) -> Sequence[str]:
        return [*dict.fromkeys(s.kind for s in self.statements), *made_classes.labels(self.form)]

    def _changed(self, names: dict[str, Any]) -> MadeProgram:
        """The program with the inputs of the third call."""
        change: Callable[[Input], Input] = {
            "notes": lambda i: dataclasses.replace(
                i,
                expression=i.expression.replace("Notes(names=('x', 'y'))", "Notes()").replace(
                    "Made.of(", "Made.of(notes=Notes(Kind.SIGNED), x="
                )
                if "notes" not in i.expression
                else i.expression,
            ),
            "size": lambda i: dataclasses.replace(i, expression=i.expression.replace("(4, 4,", "(6, 6,")),
            "gradients": lambda i: dataclasses.replace(i, requires_grad=not i.requires_grad),
            "class": lambda i: dataclasses.replace(i, expression=i.expression.replace("Other.of", "Made.of")),
        }.get(self.change, lambda i: i)
        if self.change == "factor":
            names["Made"].FACTOR = 5.0
        return dataclasses.replace(self, inputs=tuple(map(change, self.inputs)))

    def difference(self, got: Ran, want: Ran) -> str | None:
        got.gradients = [None if w is None and _is_zero(g) else g for g, w in zip(got.gradients, want.gradients, strict=True)]
        return next(differences(got, want), None) or next(_aliases(got, want), None)

    def run(self) -> Outcome:
        names = self._names()
        compiled: list[Any] = []
        has_parameters = any(i.is_parameter for i in self.inputs)

        def jit(f: Callable) -> Callable:
            if not compiled:
                compiled.append(thunder.jit(f, transforms=[SubclassTransform()]))
            return compiled[0]

        calls = (
            [("first", self, self.seed)]
            if has_parameters
            else [("first", self, self.seed), ("second", self, self.seed + 1), ("third", None, self.seed + 2)]
        )
        for which, program, seed in calls:
            if program is None:
                program = self._changed(names)
            try:
                want = ran(*program._given(seed, names, lambda f: f), self.tangent)
            except Exception as e:  # noqa: BLE001 - whatever eager mode says
                return Outcome("right" if which == "third" else "no oracle", f"{type(e).__name__}: {e}")
            try:
                got = ran(*program._given(seed, names, jit), self.tangent)
            except Exception as e:  # noqa: BLE001 - every end of a program is a result
                found = outcome_of(e)
                found = Outcome(found.kind, found.detail.replace(":", f": {which} call:", 1))
                return beside_compile(found, functools.partial(program.gives, want, seed, names))
            different = self.difference(got, want)
            if different is not None:
                return Outcome("wrong", f"{which} call: {different}")
            if which == "second" and thunder.cache_misses(compiled[0]) != 1:
                return Outcome("wrong", f"{thunder.cache_misses(compiled[0])} traces for two calls")
        return Outcome("right")


def _aliases(got: Ran, want: Ran) -> Iterator[str]:
    """Results that share memory with inputs in one run and not in the other, where there are no gradients."""
    if any(g is not None for g in want.gradients):
        return
    for i, (ours, eagers) in enumerate(zip(_leaves(got.result), _leaves(want.result), strict=True)):
        for j, (x, y) in enumerate(zip(_leaves(got.inputs), _leaves(want.inputs), strict=True)):
            if _memory(ours) == _memory(x) and not _memory(eagers) == _memory(y):
                yield f"part {i} of the results shares memory with part {j} of the inputs"
            if _memory(eagers) == _memory(y) and not _memory(ours) == _memory(x):
                yield f"part {i} of the results shares no memory with part {j} of the inputs"


def _is_zero(gradient: Any) -> bool:
    """Whether there is none, as a result whose gradient nobody asks for counts as one whose gradient is zero."""
    return gradient is None or not any(t.any() for t in _leaves(gradient))


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if hasattr(tree, "__tensor_flatten__"):
            return [x for n in tree.__tensor_flatten__()[0] for x in _leaves(getattr(tree, n))]
        return [tree]
    if isinstance(tree, dict):
        return _leaves(list(tree.values()))
    return [t for v in tree for t in _leaves(v)] if isinstance(tree, list | tuple) else []


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(random: randomness.Random) -> MadeProgram:
    """A program that eager mode can run."""
    for _ in range(60):
        try:
            program = _drawn(random)
        except Exception:  # noqa: BLE001, S112 - a class that cannot be made
            continue
        for attempt in (
            program,
            dataclasses.replace(
                program, inputs=tuple(dataclasses.replace(i, requires_grad=False) for i in program.inputs), tangent=1.0
            ),
        ):
            try:
                attempt.eager()
            except Exception:  # noqa: BLE001, S112 - whatever eager mode says: not a program
                continue
            return attempt
    raise AssertionError("no program that eager mode can run")


def _drawn(random: randomness.Random) -> MadeProgram:
    form = made_classes.drawn(random)
    names = NAMES | {"__name__": __name__}
    exec(made_classes.HEADER + form.text(), names)  # noqa: S102
    tensor = "torch.randn(4, 4, dtype=torch.float64)"
    has_gradients = random.random() < 0.55 and not form.counts  # how many operations a gradient takes is torch's own
    has_parameters = random.random() < 0.2
    inputs = []
    for i in range(random.randint(1, 3)):
        expression = tensor
        if i == 0 or random.random() < 0.6:
            expression = random.choice(HOW).format(t=tensor)
            if form.is_derived and random.random() < 0.6:
                expression = expression.replace("Made.of", "Other.of")
            if "mask" in form.parts and random.random() < 0.5:
                expression = expression[:-1] + f", mask={tensor} > -1)"
            if form.storage == "same" and random.random() < 0.12:
                expression = expression.replace(tensor, f"TwoTensor({tensor}, {tensor})", 1)
        is_parameter = has_parameters and random.random() < 0.6
        inputs.append(
            Input(f"{'p' if is_parameter else 'x'}{i}", expression, has_gradients and random.random() < 0.8, is_parameter)
        )
    if random.random() < 0.6:
        inputs.append(Input(f"x{len(inputs)}", tensor, has_gradients and random.random() < 0.5))
    seed = random.randrange(10**6)
    torch.manual_seed(seed)
    values = {i.name: eval(i.expression, dict(names)).requires_grad_(i.requires_grad) for i in inputs}  # noqa: S307
    words = Words(
        names,
        MADE_TEMPLATES,
        MADE_WEIGHTS,
        {"Made": ("inner", *(p for p in form.parts if p != "mask")), "Other": ("inner",), "TwoTensor": ("a", "b")},
    )
    statements = some_statements(random, 5, values, inputs, words)
    return MadeProgram(
        tuple(inputs),
        tuple(statements),
        result_of(random, values, statements),
        seed,
        random.choice([1.0, 0.5, None] if has_gradients else [1.0]),
        form,
        random.choice(["notes", "size", "factor", "gradients", "class"]),
    )
