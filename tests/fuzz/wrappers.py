"""Random programs with wrapper subclasses against eager PyTorch: values, types, metadata, gradients and what these hold inside.

A program is text: a function or a module of one to six statements, drawn so that eager mode can run it.  It is run in eager mode and
under `thunder.jit` with a `SubclassTransform`, twice with other values, of which the second call must be served from the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import random as randomness
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as the programs call it
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

from thunder_norm.transforms import SubclassTransform
import thunder

from .program import Outcome, beside_compile, outcome_of
from .wrapper_classes import Dual, Interval, Masked
from .wrapper_formats import BlockQuantised, LowRank
from .wrapper_parts import Called, Doubled, Pair, rows_of, tried
from .wrapper_runs import Ran, differences, given, ran
from .wrapper_statements import CONSTRUCTORS, INNER, TEMPLATES, WEIGHTS

NAMES = {
    "functools": functools,
    "torch": torch,
    "nn": nn,
    "F": F,
    "TwoTensor": TwoTensor,
    "WrapperSubclass": WrapperSubclass,
    "Masked": Masked,
    "Dual": Dual,
    "Interval": Interval,
    "LowRank": LowRank,
    "BlockQuantised": BlockQuantised,
    "Called": Called,
    "Doubled": Doubled,
    "Pair": Pair,
    "rows_of": rows_of,
    "tried": tried,
}
HEADER = """\
import functools
import torch, thunder
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from tests.fuzz.wrapper_classes import Dual, Interval, Masked
from tests.fuzz.wrapper_formats import BlockQuantised, LowRank
from tests.fuzz.wrapper_parts import Called, Doubled, Pair, rows_of, tried
from tests.fuzz.wrapper_runs import given, show
from thunder_norm.transforms import SubclassTransform
"""

# How an instance is made from plain tensors {a} (and {b}) of the program's shape.


@dataclass(frozen=True)
class Input:
    """An argument of the function, or a parameter of the module: an expression that makes it."""

    name: str
    expression: str
    requires_grad: bool
    is_parameter: bool = False


@dataclass(frozen=True)
class Statement:
    """``target = text``, or the lines of `text` if they define it themselves."""

    target: str
    text: str
    kind: str

    def lines(self) -> list[str]:
        """Python."""
        if re.search(rf"\b{self.target} \+?= ", self.text):
            if self.text.startswith("with "):
                head, body = self.text.split(": ", 1)
                return [head + ":", "    " + body]
            return self.text.split("; ")
        return [f"{self.target} = {self.text}"]


@dataclass(frozen=True)
class WrapperProgram:
    """A function of wrappers and plain tensors, or a module of such parameters."""

    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    result: str
    seed: int
    tangent: float | None  # the gradients of the results are this; None: the function returns a loss

    # -- text ---------------------------------------------------------------------------------------------------------

    def code(self) -> str:
        """The function ``f``, or the module ``M``."""
        arguments = [i.name for i in self.inputs if not i.is_parameter]
        body = [line for s in self.statements for line in s.lines()]
        if self.tangent is None:
            body.append(f"out = {self.result}")
            body.append("return sum(t.sum() for t in (out if type(out) is tuple else (out,)))")
        else:
            body.append(f"return {self.result}")
        parameters = [i for i in self.inputs if i.is_parameter]
        if not parameters:
            return f"def f({', '.join(arguments)}):\n" + textwrap.indent("\n".join(body), "    ")
        unpack = [f"{p.name} = self.{p.name}" for p in parameters]
        init = ["super().__init__()"]
        init += [f"self.{p.name} = nn.Parameter({p.name}, requires_grad={p.requires_grad})" for p in parameters]
        return (
            f"class M(nn.Module):\n    def __init__(self, {', '.join(p.name for p in parameters)}):\n"
            + textwrap.indent("\n".join(init), "        ")
            + f"\n    def forward(self, {', '.join(arguments)}):\n"
            + textwrap.indent("\n".join([*unpack, *body]), "        ")
        )

    def source(self) -> str:
        inputs = ", ".join(f"{i.name!r}: ({i.expression!r}, {i.requires_grad}, {i.is_parameter})" for i in self.inputs)
        return (
            f"{HEADER}\n{self.code()}\n\n"
            f"for name, jit in (('eager', lambda f: f), ('ours', lambda f: thunder.jit(f, transforms=[SubclassTransform()]))):\n"
            f"    show(name, *given({{{inputs}}}, {self.seed}, globals(), jit), {self.tangent})\n"
        )

    def labels(self) -> Sequence[str]:
        classes = {name for name in CONSTRUCTORS if re.search(rf"\b{name}\b", self.code() + str(self.inputs))}
        return [*dict.fromkeys(s.kind for s in self.statements), *sorted(classes)]

    # -- running ------------------------------------------------------------------------------------------------------

    def _given(self, seed: int, names: dict[str, Any], jit: Callable) -> tuple[Callable, list, list]:
        return given({i.name: (i.expression, i.requires_grad, i.is_parameter) for i in self.inputs}, seed, names, jit)

    def _names(self) -> dict[str, Any]:
        names = dict(NAMES)
        exec(self.code(), names)  # noqa: S102 - a program of ours
        return names

    def eager(self) -> Ran:
        """What eager mode gives."""
        return ran(*self._given(self.seed, self._names(), lambda f: f), self.tangent)

    def difference(self, got: Ran, want: Ran) -> str | None:
        """Where a run differs from another, or None."""
        return next(differences(got, want), None)

    def gives(self, want: Ran, seed: int, names: dict[str, Any], jit: Callable) -> bool:
        """Whether `want` is what the program gives that `jit` makes."""
        return self.difference(ran(*self._given(seed, names, jit), self.tangent), want) is None

    def run(self) -> Outcome:
        names = self._names()
        compiled: list[Any] = []

        def jit(f: Callable) -> Callable:
            if not compiled:
                compiled.append(thunder.jit(f, transforms=[SubclassTransform()]))
            return compiled[0]

        for seed in (self.seed, self.seed + 1):
            try:
                want = ran(*self._given(seed, names, lambda f: f), self.tangent)
            except Exception as e:  # noqa: BLE001 - whatever eager mode says
                return Outcome("no oracle", f"{type(e).__name__}: {e}")
            if compiled and any(i.is_parameter for i in self.inputs):
                break  # a module has parameters of its own
            try:
                got = ran(*self._given(seed, names, jit), self.tangent)
            except Exception as e:  # noqa: BLE001 - every end of a program is a result
                return beside_compile(outcome_of(e), functools.partial(self.gives, want, seed, names))
            different = self.difference(got, want)
            if different is not None:
                return Outcome("wrong", f"{'first' if seed == self.seed else 'second'} call: {different}")
        if thunder.cache_misses(compiled[0]) != 1:
            return Outcome("wrong", f"{thunder.cache_misses(compiled[0])} traces for two calls")
        return Outcome("right")

    # -- shrinking ----------------------------------------------------------------------------------------------------

    def smaller(self) -> Iterable[WrapperProgram]:
        names = [*(s.target for s in self.statements), *(i.name for i in self.inputs)]
        for name in names:
            if self.result != name:
                yield self._needed(result=name)
        for i, statement in enumerate(self.statements):
            for name in dict.fromkeys(re.findall(r"\b[vxpw]\d+\b", statement.text)):
                if name != statement.target:
                    rest = [
                        dataclasses.replace(s, text=_renamed(s.text, statement.target, name)) for s in self.statements[i + 1 :]
                    ]
                    yield self._needed(
                        statements=(*self.statements[:i], *rest), result=_renamed(self.result, statement.target, name)
                    )
        for i, given_ in enumerate(self.inputs):
            for change in ({"requires_grad": False}, {"is_parameter": False}):
                if any(getattr(given_, k) != v for k, v in change.items()):
                    yield self._needed(inputs=(*self.inputs[:i], dataclasses.replace(given_, **change), *self.inputs[i + 1 :]))
        if self.tangent != 1.0:
            yield dataclasses.replace(self, tangent=1.0)

    def _needed(self, **changes: Any) -> WrapperProgram:
        """The changed program without what its result does not need."""
        program = dataclasses.replace(self, **changes)
        text = program.result
        kept: list[Statement] = []
        for s in reversed(program.statements):
            if re.search(rf"\b{s.target}\b", text):
                kept.insert(0, s)
                text += " " + s.text
        inputs = tuple(i for i in program.inputs if re.search(rf"\b{i.name}\b", text))
        return dataclasses.replace(program, statements=tuple(kept), inputs=inputs)


def _renamed(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, text)


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(random: randomness.Random) -> WrapperProgram:
    """A program that eager mode can run."""
    for _ in range(50):
        program = _drawn(random)
        for attempt in (program, _without_gradients(program)):
            try:
                attempt.eager()
            except Exception:  # noqa: BLE001, S112 - whatever eager mode says: not a program
                continue
            return attempt
    raise AssertionError("no program that eager mode can run")


def _without_gradients(program: WrapperProgram) -> WrapperProgram:
    inputs = tuple(dataclasses.replace(i, requires_grad=False) for i in program.inputs)
    return dataclasses.replace(program, inputs=inputs, tangent=1.0)


def _drawn(random: randomness.Random) -> WrapperProgram:
    shape = random.choice([(4, 4), (4, 4), (2, 4), (3, 4)])
    dtype = random.choice(["torch.float64", "torch.float64", "torch.float64", "torch.float32"])
    tensor = f"torch.randn({shape[0]}, {shape[1]}, dtype={dtype})"
    has_gradients = random.random() < 0.65
    has_parameters = random.random() < 0.3
    classes = random.choices(list(CONSTRUCTORS), k=random.choice([1, 1, 1, 2]))
    inputs = []
    for i in range(random.randint(1, 3)):
        expression = tensor
        if i == 0 or random.random() < 0.6:
            expression = CONSTRUCTORS[random.choice(classes)].format(a=tensor, b=tensor)
            if random.random() < 0.08 and "TwoTensor" in classes:  # one in another
                expression = f"TwoTensor({expression}, {CONSTRUCTORS[classes[0]].format(a=tensor, b=tensor)})"
        is_parameter = has_parameters and random.random() < 0.6
        requires_grad = has_gradients and random.random() < 0.8
        inputs.append(Input(f"{'p' if is_parameter else 'x'}{i}", expression, requires_grad, is_parameter))
    if random.random() < 0.5:
        inputs.append(Input(f"x{len(inputs)}", tensor, has_gradients and random.random() < 0.5))
    seed = random.randrange(10**6)
    torch.manual_seed(seed)
    values = {i.name: eval(i.expression, dict(NAMES)).requires_grad_(i.requires_grad) for i in inputs}  # noqa: S307
    statements = some_statements(random, 6, values, inputs)
    return WrapperProgram(
        tuple(inputs),
        tuple(statements),
        result_of(random, values, statements),
        seed,
        random.choice([1.0, 0.5, None] if has_gradients else [1.0]),
    )


@dataclass(frozen=True)
class Words:
    """What statements are drawn from: names, forms of statements by kind, how often each is drawn, and inner tensors by class."""

    names: dict[str, Any]
    templates: dict[str, list[str]]
    weights: dict[str, int]
    inner: dict[str, tuple[str, ...]]


WORDS = Words(NAMES, TEMPLATES, WEIGHTS, INNER)


def some_statements(
    random: randomness.Random, most: int, values: dict[str, Any], inputs: Sequence[Input], words: Words = WORDS
) -> list[Statement]:
    """One after the other, each of what those before it have made."""
    drawn = [statement(random, f"v{n}", values, inputs, words) for n in range(random.randint(1, most))]
    return [s for s in drawn if s is not None]


def statement(
    random: randomness.Random, target: str, values: dict[str, Any], inputs: Sequence[Input], words: Words = WORDS
) -> Statement | None:
    """One that defines `target`, whose value goes to `values`; None where none was found."""
    kinds = list(words.templates)
    for _ in range(40):
        kind = random.choices(kinds, [words.weights.get(k, 1) for k in kinds])[0]
        recent = list(values)[-3:] if random.random() < 0.6 else list(values)
        plain = [k for k, v in values.items() if type(v) is torch.Tensor and v.is_floating_point()]
        wrappers = [k for k, v in values.items() if type(v).__name__ in words.inner]
        template = random.choice(words.templates[kind])
        if ("{p}" in template and not plain) or (("{w}" in template or "{inner}" in template) and not wrappers):
            continue
        wrapper = random.choice(wrappers) if wrappers else ""
        text = template.format(
            a=random.choice(recent),
            b=random.choice(list(values)),
            x=random.choice(inputs).name,
            p=random.choice(plain) if plain else "",
            w=wrapper,
            inner=f"{wrapper}.{random.choice(words.inner[type(values[wrapper]).__name__])}" if wrapper else "",
            c=random.choice(["2", "0.5", "-1.5", "3"]),
            v=target,
        )
        drawn = Statement(target, text, kind)
        names = words.names | values
        try:
            exec("\n".join(drawn.lines()), names)  # noqa: S102
        except Exception:  # noqa: BLE001, S112 - not for values like these
            continue
        made = names[target]
        if isinstance(made, torch.Tensor) and made.numel() <= 256 and all(_is_sane(v) for v in (made, *values.values())):
            values[target] = made
            return drawn
    return None


def _is_sane(t: torch.Tensor) -> bool:
    if hasattr(t, "__tensor_flatten__"):
        return all(_is_sane(getattr(t, name)) for name in t.__tensor_flatten__()[0])
    return not t.is_floating_point() or bool((t.isfinite() & (t.abs() < 1e6)).all())


def result_of(random: randomness.Random, values: dict[str, Any], statements: Sequence[Statement]) -> str:
    last = statements[-1].target if statements else next(iter(values))
    other = random.choice(list(values))
    return random.choice(
        [
            last,
            last,
            last,
            f"({last}, {other})",
            f"[{other}, {last}]",
            f"{{'a': {last}, 'b': ({other}, 3)}}",
            f"({last}, {last}.shape[0], None)",
        ]
    )
