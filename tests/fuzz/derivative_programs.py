"""Random programs of derivatives as text: steps, the function that they make, and the levels around it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import thunder_norm.transforms as ours
import thunder

from .level_writing import Argument, Level, Writing
from .nests import write_level
from .oracles import DIFFERENCES, NAMES, OTHER_ORDER, TORCH, TRANSFORMS_OF_JIT
from .program import Outcome, outcome_of
from .truth import Pair, Truth, check_fit, executed
from .writing import Redraw

OURS: dict[str, Any] = {name: getattr(ours, name) for name in (*NAMES, *TRANSFORMS_OF_JIT) if hasattr(ours, name)}
OURS |= {"jit": thunder.jit, "functional_call": torch.func.functional_call}


@dataclass(frozen=True)
class Step:
    """Statements that assign the result of an operation to `target`."""

    label: str
    target: str
    lines: tuple[str, ...]
    operand: str


@dataclass(frozen=True)
class Derivative:
    """A function, the nest of transforms around it, and what it is given."""

    args: tuple[tuple[str, str], ...]  # names and values of the tensors to differentiate
    constants: tuple[tuple[str, str], ...]  # what the function closes over: names and statements
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    levels: tuple[Level, ...]
    structure: str = "plain"  # of the arguments
    container: str = "tensor"  # of the results
    dtype: str = "torch.float64"

    # -- text -----------------------------------------------------------------------------------------------------------------

    def data(self) -> list[str]:
        """The statements that make tensors and modules."""
        used = "\n".join([*itertools.chain(*(s.lines for s in self.steps)), *self.results])
        lines = [f"{name} = {text}" for name, text in self.args]
        for name, text in self.constants:
            if re.search(rf"\b{name}\b", used):
                lines += text.splitlines() if "\n" in text or text.startswith(f"{name} =") else [f"{name} = {text}"]
        return lines

    def function(self) -> list[str]:
        """The definition of ``f``."""
        names = [name for name, _ in self.args]
        body = [line for step in self.steps for line in step.lines]
        listed = ", ".join(self.results)
        body.append(
            "return "
            + {
                "tensor": self.results[-1],
                "tuple": f"({listed},)",
                "list": f"[{listed}]",
                "dict": "{" + ", ".join(f"'{'abcdef'[i]}': {r}" for i, r in enumerate(self.results)) + "}",
                "pair": f"Pair({self.results[0]}, {self.results[-1]})",
                "nested": f"({self.results[0]}, {{'last': [{self.results[-1]}]}})",
            }[self.container]
        )
        if self.structure == "plain":
            return [f"def f({', '.join(names)}):", *_indented(body)]
        if self.structure == "module":
            made = [f"        self.{n} = torch.nn.Parameter({n})" for n in names[1:]]
            taken = [f"        {n} = self.{n}" for n in names[1:]]
            given = "{" + ", ".join(f"'{n}': {n}" for n in names[1:]) + "}"
            return [
                "class Net(torch.nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *made,
                f"    def forward(self, {names[0]}):",
                *taken,
                *_indented(_indented(body)),
                "net = Net()",
                f"def f({', '.join(names)}):",
                f"    return functional_call(net, {given}, ({names[0]},))",
            ]
        taken = {
            "dict": [f"{n} = p['{n}']" for n in names],
            "tuple": [f"{', '.join(names)}, = p"],
            "list": [f"{n} = p[{i}]" for i, n in enumerate(names)],
            "pair": [f"{n} = p.{field}" for n, field in zip(names, Pair._fields, strict=False)],
        }[self.structure]
        return ["def f(p):", *_indented([*taken, *body])]

    def arguments(self, values: dict[str, Any]) -> list[Argument]:
        """The arguments of ``f``."""
        names = [name for name, _ in self.args]
        if self.structure in ("plain", "module"):
            return [Argument(n, values[n], n) for n in names]
        text = {
            "dict": "{" + ", ".join(f"'{n}': {n}" for n in names) + "}",
            "tuple": f"({', '.join(names)},)",
            "list": f"[{', '.join(names)}]",
            "pair": f"Pair({', '.join(names)})",
        }[self.structure]
        return [Argument("p", eval(text, dict(values)), text)]  # noqa: S307 - our own text

    @functools.cached_property
    def written(self) -> tuple[list[str], list[str]]:
        """The statements that make the data, and the program, which assigns ``result``.

        Raises:
            Redraw: no oracle can run it, or the levels do not fit each other.
        """
        data = self.data()
        values = executed(data, TORCH)
        w = Writing(self.arguments(values), self.function())
        for level in self.levels:
            w.out = self._returned(data, w)
            write_level(w, level)
        return data, [*w.lines, _call(w)]

    def _returned(self, data: list[str], w: Writing) -> Any:
        """What the function written last returns for the arguments as the function takes them."""
        call = f"result = {w.function}({w.head})"
        given = [f"{a.name} = {a.text}" for a in self.arguments(executed(data, TORCH)) if a.name != a.text]
        for names in (TORCH, OTHER_ORDER, DIFFERENCES):
            try:
                found = executed([*data, *w.lines, *given, call], dict(names), own_arguments=w)["result"]
            except Exception:  # noqa: BLE001, S112 - another one may know
                continue
            check_fit(found)
            return found
        raise Redraw

    def source(self) -> str:
        try:
            data, lines = self.written
        except Redraw:
            data, lines = self.data(), [*self.function(), f"# levels {self.levels} do not fit"]
        text = "\n".join([*data, *lines])
        used = [n for n in (*NAMES, *TRANSFORMS_OF_JIT) if re.search(rf"\b{n}\(", text)]
        torchs = {
            "jit": "staticmethod(lambda f, **options: f)",
            "custom_vjp": "type('custom_vjp', (), dict(__init__=lambda s, f: setattr(s, 'f', f), __call__=lambda s, *a: s.f(*a), defvjp=lambda s, fwd, bwd: None))",
            "value_and_grad": "staticmethod(lambda *a, **k: lambda *args: torch.func.grad_and_value(*a, **k)(*args)[::-1])",
            "SubclassTransform": "NormTransform = staticmethod(lambda: None)",
            "NormTransform": "SubclassTransform = staticmethod(lambda: None)",
        }
        own = [f"    {n} = {torchs.get(n, f'staticmethod(torch.func.{n})')}" for n in used]
        theirs = ["    jit = staticmethod(thunder.jit)" if n == "jit" else f"    {n} = {f'transforms.{n}'}" for n in used]
        theirs = [f"    {line.strip()}" for line in theirs]
        return "\n".join(
            [
                "import collections, functools, math",
                "import torch",
                "import torch.nn.functional as F",
                "from torch.func import functional_call",
                "from thunder_norm import transforms",
                "import thunder",
                "Pair = collections.namedtuple('Pair', ['first', 'second'])",
                "class Torch:",
                *(own or ["    pass"]),
                "class Ours:",
                *(line if "jit" in line else re.sub(r"= (.*)$", r"= staticmethod(\1)", line) for line in theirs),
                "for T in (Torch, Ours):",
                *(f"    {n} = T.{n}" for n in used),
                *_indented(data),
                *_indented(lines),
                "    print(T.__name__, result)",
            ]
        )

    def labels(self) -> Sequence[str]:
        return [*(s.label for s in self.steps), *(f"[{level.kind}]" for level in self.levels)]

    # -- running --------------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        try:
            data, lines = self.written
        except Redraw:
            return Outcome("no oracle", "the program does not fit together")
        truth = Truth(data, lines, self.dtype)
        if not truth.is_known:
            return Outcome("no oracle", truth.reason)
        try:
            found = executed([*data, *lines], OURS)["result"]
        except Exception as e:  # noqa: BLE001 - its class is the outcome
            return outcome_of(e)
        return truth.verdict(found)

    # -- shrinking --------------------------------------------------------------------------------------------------------------

    def smaller(self) -> Iterable[Derivative]:
        yield from self._with_fewer_levels()
        yield from self._with_fewer_steps()
        if self.container != "tensor":
            yield from (replace(self, container="tensor", results=(r,)) for r in self.results)
        if self.structure != "plain":
            yield replace(self, structure="plain")
        for i, level in enumerate(self.levels):
            if level.seed is not None:
                yield replace(self, levels=(*self.levels[:i], Level(level.kind), *self.levels[i + 1 :]))
        yield from self._with_fewer_arguments()
        yield from self._with_smaller_tensors()
        if self.dtype == "torch.float32":
            yield _map_text(self, lambda text: text.replace("float32", "float64"), dtype="torch.float64")

    def _with_fewer_levels(self) -> Iterator[Derivative]:
        for i in range(len(self.levels)):
            yield replace(self, levels=self.levels[:i] + self.levels[i + 1 :])

    def _with_fewer_steps(self) -> Iterator[Derivative]:
        for i, step in enumerate(self.steps):
            pattern = re.compile(rf"\b{step.target}\b")
            later = tuple(
                replace(
                    s,
                    lines=tuple(pattern.sub(step.operand, line) for line in s.lines),
                    operand=pattern.sub(step.operand, s.operand),
                )
                for s in self.steps[i + 1 :]
            )
            results = tuple(dict.fromkeys(pattern.sub(step.operand, r) for r in self.results))
            container = self.container if len(results) == len(self.results) else "tensor"
            yield replace(self, steps=self.steps[:i] + later, results=results, container=container)

    def _with_fewer_arguments(self) -> Iterator[Derivative]:
        used = "\n".join([*itertools.chain(*(s.lines for s in self.steps)), *self.results])
        for i, (name, text) in enumerate(self.args):
            if len(self.args) == 1:
                return
            others = self.args[:i] + self.args[i + 1 :]
            if not re.search(rf"\b{name}\b", used):
                yield replace(self, args=others)
            elif self.structure == "plain":
                yield replace(self, args=others, constants=(*self.constants, (name, text)))

    def _with_smaller_tensors(self) -> Iterator[Derivative]:
        values = executed([f"{name} = {text}" for name, text in self.args], TORCH)
        for i, (name, _) in enumerate(self.args):
            value = values[name]
            for d in range(value.ndim):
                if value.shape[d] > 1:
                    shorter = value.narrow(d, 0, value.shape[d] - 1)
                    text = f"torch.tensor({shorter.tolist()}, dtype={value.dtype})"
                    yield replace(self, args=(*self.args[:i], (name, text), *self.args[i + 1 :]))


def _map_text(program: Derivative, change: Any, **others: Any) -> Derivative:
    return replace(
        program,
        args=tuple((n, change(t)) for n, t in program.args),
        constants=tuple((n, change(t)) for n, t in program.constants),
        steps=tuple(replace(s, lines=tuple(map(change, s.lines))) for s in program.steps),
        **others,
    )


def _call(w: Writing) -> str:
    return f"result = {w.function}({', '.join(a.text for a in w.arguments)})"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]
