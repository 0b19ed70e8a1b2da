"""Functions that draw random numbers, under function transforms in each other, against ``torch.func`` from the same state.

What they return, and the state of the generator afterwards: nothing is drawn twice, left out or drawn in another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

import thunder_norm.transforms as ours
from thunder_norm.transforms import SubclassTransform
import thunder

from .program import Outcome

_SEED = 3
DRAWS = (
    "torch.randn(4)", "torch.rand(4)", "torch.randint(0, 9, (4,))", "torch.randperm(4)", "torch.normal(0.0, 1.0, (4,))", "torch.rand(2, 2).view(4)",
    "torch.randn(())", "torch.randn_like(x)", "torch.rand_like(x)", "torch.randint_like(x, 9)", "torch.bernoulli(torch.full((4,), 0.5))",
    "torch.multinomial(torch.ones(9), 4)", "torch.poisson(torch.full((4,), 3.0))", "torch.bernoulli(x.detach().sigmoid())",
    "F.dropout(torch.ones(4), 0.3)", "torch.distributions.Normal(0.0, 1.0).sample((4,))",
)  # fmt: skip
STATEMENTS = (
    "x = x * ({a} - {a})", "x = x * ({a} - {b})", "x = x + {a}", "u = {a}\nx = x.sin() * u + u", "x = torch.where({a} > 0.5, x, x.cos())",
    "x = x * {a} + x * {b}", "for _ in range(2):\n    x = x * {a}", "x = F.dropout(x, 0.3)", "x = F.dropout(F.dropout(x, 0.2), 0.2)", "x = F.dropout(x, 0.5) - F.dropout(x, 0.5)",
    "x = F.alpha_dropout(x, 0.3, True)", "x = F.dropout1d(x[:, None], 0.4)[:, 0]", "x = F.gumbel_softmax(x)", "x = F.gumbel_softmax(x, hard=True) * x",
    "x = x[torch.randperm(4)]", "x = torch.normal(x.detach(), 1.0) * x", "x = x.sin()", "x = x * x", "x = torch.native_dropout(x, 0.3, True)[0]",
    "x = F.scaled_dot_product_attention(*[x.view(1, 2, 2)] * 3, dropout_p=0.3).view(4)", "x = F.dropout(x, 0.4, training=False)", "x = F.dropout(x.expand(2, 4), 0.4).sum(0)",
)  # fmt: skip
NESTS = {
    "grad": "grad(lambda x: {f}(x).sum())(x)",
    "vjp": "vjp({f}, x)[1](x.cos())[0]",
    "jvp": "jvp({f}, (x,), (x.cos(),))[1]",
    "value": "sum(jvp({f}, (x,), (x.cos(),)))",
    # samples in the first dimension: torch draws some numbers in the order in which a batch lies in memory
    "vmap": "(vmap({f}, randomness={randomness!r}, chunk_size={chunk})(torch.stack([x, x * 2, x.sin()])) * weights).sum(0)",
    "jacrev": "jacrev({f})(x).sum(0)",
}
_NAMES = ("grad", "vjp", "jvp", "vmap", "jacrev")
HOW = ("ours", "ours", "jitted")


@dataclass(frozen=True)
class Draws:
    """Statements of a function of four numbers, and the transforms around it, the innermost first."""

    statements: tuple[str, ...]
    nests: tuple[str, ...]
    how: str

    def text(self) -> str:
        """The functions ``f0``, which draws, and ``f1``, ... each of which transforms the one before."""
        body = [line for s in self.statements for line in s.splitlines()]
        written = ["def f0(x):", *(f"    {line}" for line in body), "    return x"]
        for n, nest in enumerate(self.nests):
            written.append(f"def f{n + 1}(x): return {nest.replace('{f}', f'f{n}')}")
        return "\n".join(written) + "\n"

    def run(self) -> Outcome:
        """From the same state, twice."""
        torchs, own = ({name: getattr(of, name) for name in _NAMES} for of in (torch.func, ours))
        expected = self._function(torchs)
        found = self._function(torchs if self.how == "jitted" else own)
        if self.how == "jitted":
            found = thunder.jit(found, transforms=[SubclassTransform()])
        try:
            wanted = _results(expected)
        except (RuntimeError, ValueError) as e:  # torch has no rule for it, or refuses a random operation
            return Outcome("no oracle", str(e))
        for ours_, torchs_ in zip(_results(found), wanted, strict=True):
            if not torch.allclose(ours_, torchs_, rtol=1e-3, atol=1e-4, equal_nan=True):
                return Outcome("wrong", f"{ours_.tolist()}, not {torchs_.tolist()}")
        return Outcome("right")

    def _function(self, names: dict[str, Any]) -> Callable:
        scope = {"torch": torch, "F": F, "weights": torch.tensor([[1.0], [-0.5], [0.25]]), **names}
        exec(self.text(), scope)
        return scope[f"f{len(self.nests)}"]

    def smaller(self) -> Iterable[Draws]:
        """With fewer transforms and statements."""
        for i in range(len(self.nests)):
            yield replace(self, nests=self.nests[:i] + self.nests[i + 1 :])
        for i in range(len(self.statements)):
            yield replace(self, statements=self.statements[:i] + self.statements[i + 1 :])

    def source(self) -> str:
        """A program that can be pasted."""
        last, imported = f"f{len(self.nests)}", ", ".join(_NAMES)
        theirs = f"from torch.func import {imported}\n"
        own = theirs if self.how == "jitted" else f"from thunder_norm.transforms import {imported}\n"
        called = f"thunder.jit({last}, transforms=[SubclassTransform()])" if self.how == "jitted" else last
        return f"""\
from thunder_norm.transforms import SubclassTransform
import thunder, torch, torch.nn.functional as F
weights = torch.tensor([[1.0], [-0.5], [0.25]])
def show(f):
    torch.manual_seed({_SEED})
    print([f(torch.linspace(0.3, 1.1, 4)) for _ in range(2)], torch.rand(1))
{self.text()}
{theirs}show({last})
{own}show({called})
"""

    def labels(self) -> Sequence[str]:
        """The transforms by name, and the statements."""
        return [self.how, *(n.partition("(")[0] for n in self.nests), *(" / ".join(s.splitlines()) for s in self.statements)]


def draw(random: random.Random) -> Draws:
    """One to four statements under one to three transforms."""
    count, how, nests = random.choice((1, 1, 2, 2, 3)), random.choice(HOW), []
    for name in random.choices(sorted(NESTS), k=count):
        nest = NESTS[name].replace("{randomness!r}", repr(random.choice(("different", "same"))))
        nests.append(nest.replace("{chunk}", str(random.choice((None, None, 2)))))
    # of a batch in a traced program, `gumbel_softmax` has others than torch's
    left_out = "gumbel" if how == "jitted" and any("vmap" in n for n in nests) else "\n\n"
    possible = [s for s in STATEMENTS if left_out not in s]
    statements = [_filled(random, s) for s in random.choices(possible, k=random.choice((1, 2, 2, 3, 4)))]
    return Draws(tuple(statements), tuple(nests), how)


def _filled(random: random.Random, statement: str) -> str:
    a, b = random.choices(DRAWS, k=2)
    return statement.replace("{a}", a).replace("{b}", b)


def _results(f: Callable) -> list[torch.Tensor]:
    torch.manual_seed(_SEED)
    found = [f(torch.linspace(0.3, 1.1, 4)) for _ in range(2)]
    return [*found, torch.rand(1)]
