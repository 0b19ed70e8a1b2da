"""Random programs that write into wrappers, into views of them and into what is inside, against eager PyTorch.

Inputs may be one object, or lie in one memory; they may require grad, as leaves or computed.  Compared are results, what inputs hold
afterwards and who else sees it, which tensors share memory, histories and gradients.  Where we refuse a program that `torch.compile`
runs as one graph, and right, the outcome says so.
"""

from __future__ import annotations

import dataclasses
import random as randomness
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.transforms import SubclassTransform
import thunder

from .program import Outcome, beside_compile, outcome_of
from .wrapper_write_parts import GIVEN, MAKES, NAMES, WRITES, inside, is_wrapper, seen, tensors_in

HEADER = """\
import torch, thunder
import torch.nn.functional as F
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor
from tests.fuzz.wrapper_writes import Written
from thunder_norm.transforms import SubclassTransform
"""


@dataclass(frozen=True)
class Written:
    """A function of a few inputs; the statements are lines of it."""

    inputs: tuple[tuple[str, str], ...]  # names and the expressions that make them, in order
    statements: tuple[str, ...]
    results: tuple[str, ...]
    grad: bool  # whether gradients are recorded around the call
    seed: int

    def code(self) -> str:
        """The function ``f``, and what makes its arguments."""
        made = "\n".join(f"    {name} = {text}" for name, text in self.inputs)
        names = ", ".join(name for name, _ in self.inputs if not name.startswith("p"))
        body = "\n".join(f"    {line}" for s in self.statements for line in s.split("\n"))
        return (
            f"def given():\n    torch.manual_seed({self.seed})\n{made}\n    return [{', '.join(n for n, _ in self.inputs)}], [{names}]\n\n\n"
            f"def f({names}):\n{body}\n    return {', '.join(self.results)},\n"
        )

    def source(self) -> str:
        return (
            f"{HEADER}\n\n{self.code()}\n\n"
            f"print(Written({self.inputs!r}, {self.statements!r}, {self.results!r}, {self.grad}, {self.seed}).run())\n"
        )

    def labels(self) -> Sequence[str]:
        return [re.sub(r"\b([xpv])\d+\b", r"\1", s) for s in (*(text for _, text in self.inputs), *self.statements)]

    def _found(self, names: dict[str, Any], jit: Callable) -> tuple[dict[str, Any], list[Any]]:
        """What the outside sees, and the memory that tensors have in common."""
        with torch.set_grad_enabled(self.grad):
            everything, args = names["given"]()
            held = [t for x in args for t in inside(x)]
            results = jit(names["f"])(*args)
            found = {
                "results": [seen(t, self.grad) for t in results],
                "inputs": [seen(t, self.grad) for t in args],
                "inner tensors held by others": [seen(t, self.grad) for t in held],
                "which are those": [t is h for t, h in zip((t for x in args for t in inside(x)), held, strict=True)],
                "results that are inputs": [
                    [r is x for x in args] for r, n in zip(results, self.results, strict=True) if n[0] == "x"
                ],
            }
            all_of_them = [t for x in (*args, *results) for t in (*inside(x), x)]
            memory = [t.untyped_storage().data_ptr() if not is_wrapper(t) else 0 for t in all_of_them]
            has_history = any(t.requires_grad for t in all_of_them)
            found["gradients"] = self._gradients(everything, args, results) if self.grad else []
        return found, [] if has_history else [[a == b for b in memory] for a in memory]

    def _gradients(
        self, everything: Sequence[torch.Tensor], args: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> Any:
        """Those of all leaves, for what comes out and what inputs are then."""
        outputs = {id(t): t for t in (*results, *args) if t.requires_grad}
        leaves = {id(t): t for t in everything if t.requires_grad and t.is_leaf}
        losses = [t * 1 for t in outputs.values()]
        if not losses or not leaves:
            return []
        try:
            found = torch.autograd.grad(
                losses, list(leaves.values()), [torch.ones_like(t.detach()) for t in losses], allow_unused=True
            )
        except RuntimeError:
            return "an error"
        return [None if g is None else seen(g) for g in found]

    def run(self) -> Outcome:
        names = dict(NAMES)
        exec(self.code(), names)  # noqa: S102 - a program of ours
        try:
            want, shared = self._found(names, lambda f: f)
        except Exception as e:  # noqa: BLE001 - whatever eager mode says
            return Outcome("no oracle", f"{type(e).__name__}: {e}")
        jf = thunder.jit(names["f"], transforms=[SubclassTransform()])
        for call in ("first", "second"):
            try:
                got, ours = self._found(names, lambda f: jf)
            except Exception as e:  # noqa: BLE001 - every end of a program is a result
                return beside_compile(outcome_of(e), lambda jit: self._is(want, names, jit))
            different = [k for k, w in want.items() if not _same(got[k], w)]
            if different:
                return Outcome("wrong", f"{call} call: {different[0]}: {got[different[0]]} instead of {want[different[0]]}")
            if ours != shared:
                return Outcome("wrong", f"{call} call: other tensors share memory")
        if thunder.cache_misses(jf) != 1:
            return Outcome("wrong", f"{thunder.cache_misses(jf)} traces for two calls")
        return Outcome("right")

    def _is(self, want: dict[str, Any], names: dict[str, Any], jit: Callable) -> bool:
        got, _ = self._found(names, jit)
        return all(_same(got[k], w) for k, w in want.items())

    def smaller(self) -> Iterable[Written]:
        for i in range(len(self.statements)):
            yield dataclasses.replace(self, statements=self.statements[:i] + self.statements[i + 1 :])
        for i in range(len(self.results) if len(self.results) > 1 else 0):
            yield dataclasses.replace(self, results=self.results[:i] + self.results[i + 1 :])
        if self.grad:
            yield dataclasses.replace(self, grad=False)
        used = " ".join((*self.statements, *self.results, *(text for _, text in self.inputs)))
        for i, (name, _) in enumerate(self.inputs):
            if not re.search(rf"\b{name}\b", used):
                yield dataclasses.replace(self, inputs=self.inputs[:i] + self.inputs[i + 1 :])


def _same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return got.dtype == want.dtype and got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, equal_nan=True)
    if isinstance(want, list | tuple):
        return type(got) is type(want) and len(got) == len(want) and all(map(_same, got, want))
    return got == want


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(random: randomness.Random) -> Written:
    """A program that eager mode can run."""
    for _ in range(100):
        program = _drawn(random)
        if program is not None:
            return program
    raise AssertionError("no program that eager mode can run")


def _drawn(random: randomness.Random) -> Written | None:
    grad = random.random() < 0.6
    inputs: list[tuple[str, str]] = []
    names = dict(NAMES)
    seed = random.randrange(10**6)
    torch.manual_seed(seed)

    def add(name: str, text: str, of: list[tuple[str, str]]) -> bool:
        try:
            exec(f"{name} = {text}", names)  # noqa: S102
        except Exception:  # noqa: BLE001 - not for values like these
            return False
        if not isinstance(names[name], torch.Tensor):
            return False
        of.append((name, text))
        return True

    with torch.set_grad_enabled(grad):
        for i in range(random.randint(1, 3)):
            before = [n for n, _ in inputs if n.startswith("x")]
            forms = [f for f in GIVEN if ("{x}" not in f or before) and ("{p}" not in f or grad)]
            form = random.choice(forms)
            if "{p}" in form:
                add(f"p{i}", "TwoTensor(r(), r()).requires_grad_()", inputs)
            add(f"x{i}", form.format(x=random.choice(before) if before else "", p=f"p{i}"), inputs)
        arguments = [n for n, _ in inputs if n.startswith("x")]
        if not any(is_wrapper(names[n]) for n in arguments):
            return None
        values, statements = list(arguments), []
        for i in range(random.randint(1, 5)):
            if random.random() < 0.45:
                text = random.choice(MAKES).format(a=random.choice(values), b=random.choice(values))
                made: list[tuple[str, str]] = []
                if add(f"v{i}", text, made):
                    values.append(f"v{i}")
                    statements.append(f"v{i} = {text}")
                continue
            text = random.choice(WRITES).format(t=random.choice(values), o=random.choice(values), k=random.choice(["0.5", "2.0"]))
            if random.random() < 0.4:
                text = f"with torch.no_grad():\n    {text}"
            try:
                exec(text, names)  # noqa: S102
            except Exception:  # noqa: BLE001, S112 - not for values like these
                continue
            statements.append(text)
    results = random.sample(values, min(len(values), random.randint(1, 3)))
    if not statements or not tensors_in([names[n] for n in results]):
        return None
    # a plain input that is handed back is another object in a program that Thunder differentiates
    handed = [r if random.random() < 0.6 and (r not in arguments or is_wrapper(names[r])) else f"{r} * 2" for r in results]
    program = Written(tuple(inputs), tuple(statements), tuple(handed), grad, seed)
    own = dict(NAMES)
    exec(program.code(), own)  # noqa: S102
    try:
        program._found(own, lambda f: f)
    except Exception:  # noqa: BLE001 - whatever eager mode says: not a program
        return None
    return program
