"""How a compiled program is called and what surrounds it, against eager mode doing the same with the module itself.

Contexts around calls, ways to give arguments, transforms of torch and threads around calls, copies, hooks and changes between them: what the
steps return or raise, gradients, the module, the random state and the modes afterwards.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_norm.errors import ThunderNormError
from thunder_norm.executors import inductor
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform, grad
import thunder

from . import call_scope
from .call_comparison import difference, modes, restored, seen, state_of
from .call_parts import ARGUMENTS, BETWEEN, CALLS, HEAD, KEEPING, RESULTS, STATEMENTS, SURROUNDINGS, Action, Argument
from .program import Outcome, outcome_of

HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "NormTransform": lambda: {"transforms": [NormTransform()]},
    "SubclassTransform": lambda: {"transforms": [SubclassTransform()]},
    "CheckpointTransform": lambda: {"transforms": [CheckpointTransform()]},
    "Norm and Checkpoint": lambda: {"transforms": [NormTransform(), CheckpointTransform()]},
    "inductor": lambda: {"transforms": [NormTransform()], "executors": [inductor]},
}
_WEIGHTS = (8, 6, 4, 2, 0.15)
OTHER = {how: "SubclassTransform" if how == "NormTransform" else "NormTransform" for how in HOW}
CALLED = ("c", "c", "c", "c", "c.__call__", "(lambda *a, **b: c(*a, **b))", "functools.partial(c)")
# what torch's own transforms and graphs lack, and a compiled program need not
_NOT_IN_TORCH = re.compile(
    "don't yet support|must override the setup_context|is at version|use_reentrant=True is incompatible|derivative for aten::.* is not implemented"
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Step:
    """What is done: inputs are made, and a call or a change, inside of contexts; `is_inside` if the inputs are made there too."""

    action: Action
    argument: Argument
    surroundings: tuple[str, ...] = ()
    is_inside: bool = False
    called: str = "c"

    def text(self) -> str:
        """The statements."""
        action = re.sub(r"\bA\b", lambda _: self.argument.passed, self.action.text)
        made = self.argument.made if "A" in re.findall(r"\b\w\b", self.action.text) or "C(x" in action else ""
        outside, inside = ("", f"{made}\n{action}") if self.is_inside else (made, action)
        for context in reversed(self.surroundings):
            inside = f"with {context}:\n" + "\n".join(f"    {line}" for line in inside.splitlines() if line)
        text = f"{outside}\n{inside}" if outside else inside
        return re.sub(r"\bC\b", lambda _: self.called, text).strip() + "\n"


@dataclass(frozen=True)
class Calls:
    """The statements of a module's forward, what it returns, and steps."""

    statements: tuple[str, ...]
    returned: str
    steps: tuple[Step, ...]
    how: str

    def text(self) -> str:
        """The module."""
        body = [line for s in self.statements for line in s.splitlines()]
        return HEAD + "".join(f"        {line}\n" for line in [*body, f"return {self.returned}"])

    def run(self) -> Outcome:
        """Each step, ours and eager's."""
        try:
            eager = _Run(self.text(), _EAGER)
        except Exception as e:  # noqa: BLE001 - a program that does not run
            return Outcome("no oracle", f"{type(e).__name__}: {e}")
        ours = _Run(self.text(), _of_thunder(self.how))
        for number, step in enumerate(self.steps):
            wanted, found = eager.done(step.text(), number), ours.done(step.text(), number)
            at = f"step {number}, {step.action.name}"
            if isinstance(found.error, ThunderNormError) and wanted.error is not None:
                return Outcome("right")  # neither runs it, and what that leaves behind may differ
            if isinstance(found.error, ThunderNormError):
                return replace(
                    outcome_of(found.error), detail=f"{outcome_of(found.error).detail}\nin {at}; eager: {wanted.error!r}"
                )
            if wanted.error is not None and _NOT_IN_TORCH.search(str(wanted.error)):
                return Outcome("no oracle", f"{wanted.error}\nin {at}")
            if type(found.error) is not type(wanted.error):
                if found.error is not None and wanted.error is None:
                    outcome = outcome_of(found.error)
                    return replace(outcome, detail=f"{outcome.detail}\nin {at}")
                return Outcome("wrong", f"{at} raises {found.error!r}, not {wanted.error!r}")
            if wanted.error is not None:
                wanted.modes["random"] = found.modes["random"]  # an operation may have drawn before it raises
            for what in ("results", "state", "modes"):
                if place := difference(getattr(found, what), getattr(wanted, what), self.tolerance(), what):
                    return Outcome("wrong", f"{at}: {place}")
        return Outcome("right")

    def tolerance(self) -> float:
        """How far values may be from each other, for entries of 1: further where there is low precision."""
        texts = (self.text(), *(s.text() for s in self.steps))
        return 5e-2 if any(re.search("float16", text.replace(HEAD, "")) for text in texts) else 2e-4

    def smaller(self) -> Iterable[Calls]:
        """With fewer steps, contexts and statements."""
        steps = self.steps
        for i in range(len(steps)):
            yield replace(self, steps=steps[:i] + steps[i + 1 :])
        for i, s in enumerate(steps):
            for n in range(len(s.surroundings)):
                fewer = replace(s, surroundings=s.surroundings[:n] + s.surroundings[n + 1 :])
                yield replace(self, steps=(*steps[:i], fewer, *steps[i + 1 :]))
        for i in range(len(self.statements)):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        if self.returned != "x":
            yield replace(self, returned="x")
        for how in list(HOW)[: list(HOW).index(self.how)]:
            yield replace(self, how=how)
        for i, s in enumerate(steps):
            simpler = [replace(s, action=CALLS[0])] if s.action.name in {a.name for a in CALLS[1:]} else []
            simpler += [replace(s, argument=a) for a in ARGUMENTS[:2] if a != s.argument and s.argument not in ARGUMENTS[:2]]
            simpler += [replace(s, called="c")] if s.called != "c" else []
            for one in simpler:
                yield replace(self, steps=(*steps[:i], one, *steps[i + 1 :]))

    def source(self) -> str:
        """A program that can be pasted, run from the folder of the project."""
        steps = "".join(f"    run.show({s.text()!r}, {n})\n" for n, s in enumerate(self.steps))
        return f"""\
import sys
from tests.fuzz.calls import compiling
TEXT = '''
{self.text()}'''
for how in (None, {self.how!r}):
    run = compiling(TEXT, how)
{steps}"""

    def labels(self) -> Sequence[str]:
        """How it is compiled, what is done, what is given, and inside of what."""
        parts = [(s.action.name, s.argument.name, *s.surroundings) for s in self.steps]
        return [self.how, *itertools.chain(*parts)]


@dataclass
class _Done:
    """What came of a step."""

    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    state: dict[str, Any] = field(default_factory=dict)
    modes: dict[str, Any] = field(default_factory=dict)


class _Run:
    """A module and what is called in its place, from step to step."""

    def __init__(self, text: str, compilers: dict[str, Callable]):
        module = types.ModuleType(f"calls_{next(_numbers)}")
        self.scope = scope = vars(module)
        sys.modules[module.__name__] = module  # as pickle looks for it
        scope.update({k: v for k, v in vars(call_scope).items() if not k.startswith("_")}, **compilers)
        scope.update(x=None, y=None, log=[], kept=[], out=lambda value: self.results.append(seen(value)))
        self.results: list[Any] = []
        torch.manual_seed(0)
        _execute(text, scope)
        _execute("x = torch.randn(3, 4)\nm = Module()\nc = J(m)\n", scope)

    def done(self, text: str, seed: int) -> _Done:
        """What comes of a step."""
        self.results, error = [], None
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                _execute(text, self.scope)
        except Exception as e:  # noqa: BLE001 - an outcome
            error = e
        done = _Done(self.results, error, modes=modes())
        restored()
        done.state = state_of(self.scope)
        return done

    def show(self, text: str, seed: int) -> None:
        """Print what comes of a step."""
        done = self.done(text, seed)
        print(*(f"{name}: {value}" for name, value in vars(done).items()), sep="\n")


_EAGER: dict[str, Callable] = {"J": lambda f: f, "K": lambda f: f, "G": torch.func.grad}


def _of_thunder(how: str) -> dict[str, Callable]:
    return {"J": lambda f: thunder.jit(f, **HOW[how]()), "K": lambda f: thunder.jit(f, **HOW[OTHER[how]]()), "G": grad}


def compiling(text: str, how: str | None) -> _Run:
    """A run of a module, by eager mode where it is not said how it is compiled."""
    return _Run(text, _EAGER if how is None else _of_thunder(how))


def _execute(text: str, scope: dict[str, Any]) -> None:
    name = f"<calls {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), scope)  # noqa: S102 - of this package


def draw(random: random.Random) -> Calls:
    """One to four statements, and two to five steps."""
    chosen = [random.choice(STATEMENTS) for _ in range(random.choice((1, 2, 2, 3, 4)))]
    keeps = random.random() < 0.35
    if keeps:
        chosen.insert(random.randint(0, len(chosen)), random.choice(KEEPING))
    steps = tuple(_step(random, keeps) for _ in range(random.choice((2, 3, 3, 4, 5))))
    if any("checkpoint" in s for s in chosen):
        # in eager mode a region is computed again with the module's own parameters, as they are by then
        steps = tuple(s for s in steps if not s.action.name.startswith(("functional_call", "after a change")))
    if any(re.search(r"[JK]\(m", s.action.text) for s in steps):
        # a hook of the compiled module is its own, and none of another one of the same module
        steps = tuple(s for s in steps if not s.action.text.startswith("c.register"))
    how = random.choices(list(HOW), _WEIGHTS)[0]
    return Calls(tuple(chosen), random.choice(RESULTS), steps, how)


def _step(random: random.Random, keeps: bool) -> Step:
    while True:
        actions = CALLS if random.random() < 0.65 else BETWEEN
        if keeps:
            actions = [
                a for a in actions if not re.search(r"in_threads\([23]|FakeTensorMode|checkpoint\(|KeyboardInterrupt", a.text)
            ]
        action = random.choices(actions, [a.weight for a in actions])[0]
        number = (
            0 if re.search("weakref|in_threads", action.text) else random.choice((0, 0, 0, 1, 1, 2))
        )  # which keep tensors, or are of one thread
        surroundings = tuple(random.choice(SURROUNDINGS) for _ in range(number))
        argument = random.choice(ARGUMENTS[:4]) if random.random() < 0.4 else random.choice(ARGUMENTS)
        step = Step(action, argument, surroundings, random.random() < 0.4, random.choice(CALLED))
        with contextlib.suppress(SyntaxError):
            compile(step.text(), "<step>", "exec")
            return step
