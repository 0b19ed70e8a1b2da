"""Derivatives: functions of one to five operations under nests of one to four transforms, against `torch.func`."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import linecache
import math
import random
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves

import thunder_norm.transforms as ours

from .nests import DIFFERENTIATES, INNER, ORDERS, Argument, Level, Writing, is_inexact, write_level
from .operations import COMPLEX, LEAVING, REAL, Operation
from .oracles import DIFFERENCES, EVALUATIONS, NAMES, OTHER_ORDER, TORCH, TRANSFORMS_OF_JIT, Outermost
from .program import Outcome, outcome_of
from .writing import Redraw, Writer, tensor_text

Pair = collections.namedtuple("Pair", ["first", "second"])
OURS: dict[str, Any] = {name: getattr(ours, name) for name in (*NAMES, *TRANSFORMS_OF_JIT) if hasattr(ours, name)}
OURS |= {"jit": thunder.jit, "functional_call": torch.func.functional_call}
_NAMES = {"torch": torch, "F": F, "math": math, "functools": functools, "Pair": Pair}
_LARGEST = 1e6
_HIGHEST_ORDER = 4
_numbers = itertools.count()
_SHAPES = ((3,), (2, 3), (3, 3), (2,), (2, 2), (), (2, 1, 3), (4,), (1, 3), (3, 2))


# -- programs -------------------------------------------------------------------------------------------------------------------


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
            _check_fit(found)
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
                "import thunder, torch",
                "import torch.nn.functional as F",
                "from torch.func import functional_call",
                "from thunder_norm import transforms",
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


def executed(lines: Sequence[str], transforms: dict[str, Any], own_arguments: Writing | None = None) -> dict[str, Any]:
    """The names after running the statements; their text is known to tracebacks and to errors that quote it."""
    text = "\n".join(lines) + "\n"
    filename = f"<fuzz {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names: dict[str, Any] = _NAMES | transforms | {"__name__": "fuzz_program"}
    try:
        exec(compile(text, filename, "exec"), names)  # noqa: S102 - our own text
    finally:
        del linecache.cache[filename]
    return names


# -- the right answer -----------------------------------------------------------------------------------------------------------


_OPINIONS: dict[str, Callable[[], dict]] = {
    "the other order": lambda: OTHER_ORDER,
    "differences of the other order": lambda: Outermost(OTHER_ORDER),
    "differences of torch.func": lambda: Outermost(TORCH),
    "differences of differences": lambda: DIFFERENCES,
}
# Pairs of opinions, what both say is right, and how well differences can agree
_INDEPENDENT = (
    ("torch.func", "the other order", 1e-6),
    ("torch.func", "differences of the other order", 1e-4),
    ("the other order", "differences of torch.func", 1e-4),
    ("torch.func", "differences of differences", 1e-3),
    ("the other order", "differences of differences", 1e-3),
)


_SECONDS_OF_AN_OPINION = 40  # for what hangs; what only takes long has a number of evaluations


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in what takes longer; only in the main thread, as signals are."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Truth:
    """What a program has to return: what `torch.func` says, and where it is doubted what two opinions agree about."""

    def __init__(self, data: list[str], lines: list[str], dtype: str):
        self.data, self.lines, self.reason = data, lines, ""
        self.is_single = dtype == "torch.float32" or any("float32" in t or ".float()" in t for t in (*data, *lines))
        self.given = [*data, *lines]
        self.first = self._asked("torch.func", TORCH)
        self.rounded = self.first
        if self.is_single:
            self.data, self.lines = _double(data), _double(lines)
            self.first = self._asked("torch.func", TORCH)
        self._opinions: dict[str, Any] = {"torch.func": self.first}

    @property
    def is_known(self) -> bool:
        """Whether some oracle has an answer."""
        return self.first is not None or self._agreed() is not None

    def _asked(self, name: str, transforms: dict[str, Any], text: list[str] | None = None) -> Any:
        EVALUATIONS.restart()
        try:
            with _at_most(_SECONDS_OF_AN_OPINION):
                return executed(text or [*self.data, *self.lines], transforms)["result"]
        except Exception as e:  # noqa: BLE001 - it does not know
            self.reason += f"{name}: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:120]}; "
            return None

    def _opinion(self, name: str) -> Any:
        if name not in self._opinions:
            self._opinions[name] = self._asked(name, _OPINIONS[name]())
        return self._opinions[name]

    def _agreed(self) -> Any:
        """What two opinions say that have no formula in common."""
        for first, second, tolerance in _INDEPENDENT:
            a, b = self._opinion(first), self._opinion(second)
            if a is not None and b is not None and difference(b, a, tolerance, dtypes=False) is None:
                return a
        return None

    def verdict(self, found: Any) -> Outcome:
        """Whether what we return is right."""
        if self.first is not None:
            problem = difference(found, self.first, self._tolerance(), dtypes=not self.is_single)
            if problem is None and self._has_dtypes(found):
                return Outcome("right")
        truth = self._agreed()
        if truth is None:
            return Outcome("no oracle", "no two oracles agree")
        problem = difference(found, truth, max(self._tolerance(), 1e-6 if truth is not self.first else 0), dtypes=False)
        if truth is self.first and problem is None:  # only the dtypes of single precision differ
            problem = difference(found, self.rounded, math.inf)
        is_right = problem is None or self._differences_say(found, truth)
        return Outcome("right", "torch.func is wrong") if is_right else Outcome("wrong", str(problem))

    def _has_dtypes(self, found: Any) -> bool:
        """Whether a program in single precision returns the dtypes that one of torch's orders of differentiation returns.

        A tangent of ``torch.func.jvp`` is in double precision where a scalar in single precision was multiplied by a number.
        """
        if not self.is_single or self.rounded is None or difference(found, self.rounded, math.inf) is None:
            return True
        other = self._asked("the other order, in single precision", OTHER_ORDER, self.given)
        return other is not None and difference(found, other, math.inf) is None

    def _differences_say(self, found: Any, truth: Any) -> bool:
        """Whether differences of values agree with us much better than with torch: its formulas may be wrong in both orders.

        They are for second derivatives of layer_norm.
        """
        values = self._opinion("differences of differences")
        if values is None or difference(found, values, 1e-3, dtypes=False) is not None:
            return False
        return 10 * _farthest(found, values) < _farthest(truth, values)

    def _tolerance(self) -> float:
        if not self.is_single:
            return 1e-7
        if self.rounded is None or self.first is None:
            return 1e-2
        errors = zip(tree_leaves(self.rounded), tree_leaves(self.first), strict=True)
        return 2e-4 + 20 * max((_distance(a, b) for a, b in errors), default=0.0)


def _double(lines: list[str]) -> list[str]:
    return [line.replace("float32", "float64").replace(".float()", ".double()") for line in lines]


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to 1 and to the largest entry."""
    if not a.numel():
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.detach().to(kind), b.detach().to(kind)
    return ((a - b).abs().max() / max(1.0, b.abs().max().item())).item()


def _farthest(found: Any, wanted: Any) -> float:
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=False)
    return max((_distance(a, b) for a, b in pairs if isinstance(b, torch.Tensor)), default=0.0)


def difference(found: Any, wanted: Any, tolerance: float, dtypes: bool = True) -> str | None:
    """How one tree of tensors differs from another, or None."""
    leaves, spec = tree_flatten(found)
    expected, expected_spec = tree_flatten(wanted)
    if spec != expected_spec:
        return f"structure {spec}, expected {expected_spec}"
    for i, (v, e) in enumerate(zip(leaves, expected, strict=True)):
        if not isinstance(e, torch.Tensor):
            if v != e:
                return f"{v!r}, expected {e!r}"
            continue
        if not isinstance(v, torch.Tensor):
            return f"a {type(v).__name__} at leaf {i}, expected a tensor"
        if type(v) not in (torch.Tensor, torch.nn.Parameter) or v.device != e.device:
            return f"a {type(v).__name__} on {v.device} at leaf {i}"
        if v.shape != e.shape:
            return f"shape {tuple(v.shape)} at leaf {i}, expected {tuple(e.shape)}"
        if dtypes and v.dtype != e.dtype:
            return f"{v.dtype} at leaf {i}, expected {e.dtype}"
        if tolerance < math.inf and not _distance(v, e) <= tolerance:
            return f"leaf {i} is off by {_distance(v, e):.2g} of its size: {_shown(v)}, expected {_shown(e)}"
    return None


def _shown(t: torch.Tensor) -> str:
    return str(t.detach().flatten()[:4].tolist())


def _check_fit(tree: Any) -> None:
    """Refuse what is not finite, huge, or made of anything but tensors.

    Raises:
        Redraw: it is.
    """
    for v in tree_leaves(tree):
        if not isinstance(v, torch.Tensor) or v.numel() > 2000:
            raise Redraw
        if is_inexact(v) and v.numel() and not v.detach().abs().max() < _LARGEST:
            raise Redraw


# -- drawing --------------------------------------------------------------------------------------------------------------------


def draw(random: random.Random) -> Derivative:
    """A program that some oracle can run, at a point where it is smooth."""
    for _ in range(200):
        try:
            program = _levelled(_function(random), random)
            _check_smooth(program)
            return program
        except Redraw:
            continue
    raise AssertionError("200 programs in a row could not be run by any oracle")


def _function(pick: random.Random) -> Derivative:
    dtype = pick.choices(["torch.float64", "torch.float32", "torch.complex128"], [75, 15, 10])[0]
    args = {"x0": tensor_text(pick.choice(_SHAPES), pick, dtype)}
    values = executed([f"x0 = {args['x0']}"], TORCH)
    values = {"x0": values["x0"]}
    constants: dict[str, str] = {}
    steps: list[Step] = []
    for _ in range(pick.choice([1, 1, 2, 2, 3, 4, 5])):
        _add_step(args, constants, steps, values, pick, dtype)
    last = steps[-1].target
    if values[last].is_complex() and pick.random() < 0.8:
        _add_step(args, constants, steps, values, pick, dtype, LEAVING)
        last = steps[-1].target
    results = [last]
    container = pick.choices(["tensor", "tuple", "list", "dict", "pair", "nested"], [70, 8, 5, 8, 4, 5])[0]
    if container != "tensor":
        results = [pick.choice([s.target for s in steps] + list(args)), last]
    structure = "plain"
    if pick.random() < 0.25:
        structure = pick.choice(["dict", "tuple", "list", "module", "dict", "pair"])
    if structure == "pair" and len(args) != 2 or structure == "module" and (len(args) < 2 or dtype == "torch.complex128"):
        structure = "plain"
    return Derivative(
        tuple(args.items()), tuple(constants.items()), tuple(steps), tuple(results), (), structure, container, dtype
    )


def _add_step(
    args: dict[str, str],
    constants: dict[str, str],
    steps: list[Step],
    values: dict[str, Any],
    pick: random.Random,
    dtype: str,
    among: Sequence[Operation] | None = None,
) -> None:
    """Add an operation of the value so far."""
    for _ in range(60):
        x = steps[-1].target if steps and pick.random() < 0.85 else pick.choice(list(values))
        if among is not None:
            x = steps[-1].target
        value = values[x]
        if not is_inexact(value) or value.numel() > 60:
            continue
        family = among or pick.choice(COMPLEX if value.is_complex() else _weighted(REAL, pick))
        operation = pick.choice(family)
        target = f"t{len(steps)}"
        names = {*args, *constants, *values}
        try:
            writer = Writer(x, {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}, len(args), names, pick, dtype)
            lines = writer.write(pick.choice(operation.spellings), target)
            new = [f"{n} = {t}" for n, t in writer.new_args.items()]
            for n, t in writer.new_constants.items():
                new += t.splitlines() if "\n" in t else [f"{n} = {t}"]
            made = executed(new, TORCH)
            found = executed(lines, TORCH | values | made)[target]
            if not isinstance(found, torch.Tensor) or found.numel() > 60 or not is_inexact(found):
                continue
            _check_fit(found)
        except Exception:  # noqa: BLE001, S112 - it does not fit this value; another one will
            continue
        args |= writer.new_args
        constants |= writer.new_constants
        values[target] = found
        values |= {n: made[n] for n in (*writer.new_args,)}
        steps.append(Step(operation.label, target, tuple(lines), x))
        return
    raise Redraw


def _weighted(families: tuple, pick: random.Random) -> tuple:
    """Families as often as they have operations, the large ones a little less."""
    return tuple(pick.choices(families, [len(f) ** 0.7 for f in families], k=1))


def _levelled(program: Derivative, pick: random.Random) -> Derivative:
    """The program under a nest of one to four levels, at least one of which differentiates."""
    depth = pick.choice([1, 2, 2, 3, 3, 4])
    for _ in range(12):
        if len(program.levels) == depth:
            break
        is_last = len(program.levels) == depth - 1
        kinds = [k for k in INNER for _ in range(1 if k in ("both orders", "custom_vjp") else 2)]
        kind = pick.choice([*kinds, "autograd", "autograd"] if is_last else kinds)
        if is_last and not any(level.kind in DIFFERENTIATES for level in program.levels):
            kind = pick.choice(DIFFERENTIATES)
        candidate = replace(program, levels=(*program.levels, Level(kind, pick.randrange(10**6))))
        if sum(ORDERS[level.kind] for level in candidate.levels) > _HIGHEST_ORDER:
            continue
        try:
            data, lines = candidate.written
            _check_fit(Truth(data, lines, candidate.dtype).first)
        except Redraw:
            continue
        program = candidate
    if not any(level.kind in DIFFERENTIATES for level in program.levels):
        raise Redraw
    return program


def _check_smooth(program: Derivative) -> None:
    """Refuse a program at a kink, a tie or a pole: where moving the arguments a little changes the result a lot.

    Raises:
        Redraw: it is.
    """
    data, lines = program.written
    names = ", ".join(name for name, _ in program.args)
    results = []
    for shift in (0.0, 1e-7, -1e-7):
        moved = [f"{names}, = [v * (1 + {shift}) + {shift} * torch.rand(v.shape, dtype=v.dtype) for v in ({names},)]"]
        for transforms in (TORCH, OTHER_ORDER):
            try:
                results.append(executed([*_double(data), *moved, *_double(lines)], transforms)["result"])
            except Exception:  # noqa: BLE001, S112
                continue
            break
    if len(results) < 3 or any(difference(r, results[0], 1e-4, dtypes=False) is not None for r in results[1:]):
        raise Redraw
