"""Random programs with checkpointed regions, in each other and in turn, against the same program without them in eager mode.

A region computes what it is, however often it is computed: values, gradients, random numbers, and what is written, which is written once.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Union

import torch
from torch.utils.checkpoint import checkpoint

from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder

from .program import Outcome

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.w = nn.Parameter(torch.rand(4) + 0.5)
        self.norm, self.lstm = nn.BatchNorm1d(4), nn.LSTM(4, 4, 2, dropout=0.4)
        self.register_buffer("seen", torch.ones(4) / 2)
        self.count = 0
    def forward(self, x):
        side = [x]
"""
STATEMENTS = (
    "x = self.a(x).tanh()", "x = self.b(x).relu() + x", "x = x * self.w", "x = x.sin()", "x = F.softmax(x, -1) * self.w",
    "x = x * x.detach().sigmoid()", "x = torch.cat(x.chunk(2, -1)[::-1], -1)", "with torch.no_grad():\n    c = x.exp()\nx = x + 0.1 * c",
    "y = x.clone()\ny[:, :2].mul_(2.0)\nx = y", "y = torch.zeros(4)\ny.copy_(x.mean())\nx = x + y", "with torch.autocast('cpu', torch.bfloat16):\n    x = self.a(x).float()",
    "x = (x.double() * self.w.double()).sin().to(x.dtype)", "x = torch.complex(x.float(), x.float().cos()).exp().real.to(x.dtype)", "x = x.half().to(x.dtype) + x",
    "x = torch.view_as_real(torch.view_as_complex(x.float().view(3, 2, 2)) * 1j).reshape(3, 4).to(x.dtype)", "x = x * x.argmax(-1, keepdim=True)", "x = torch.where(x > 0, x, x * 2)",
    "x = torch.fft.ifft(torch.fft.fft(x.float()) * 2).real.to(x.dtype)", "x, i = x.sort(-1)\nx = x * i", "i = x.argsort(-1)\nx = x.gather(-1, i)", "z = x.float() + 1j * self.w\nx = (z * z.conj()).real.to(x.dtype)",
    "if x.requires_grad:\n    x = x * 2", "y = x * 2\nif y.grad_fn is None:\n    x = y.sin()", "y = x * 1\nif y.requires_grad:\n    y.register_hook(lambda g: g * 2)\nx = y.sin()",
    "y = x * 1\nz = y.sin()\ny.detach().mul_(2.0)\nx = z + y", "x = x + self.seen", "x = x * self.seen[1:].sum()", "side.append(self.seen[1:])", "x = x * side[-1].sum()",
    "side.append(x * self.w)", "x = x + side[-1]", "if x.shape[0] > 2:\n    x = x.cos()", "x = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
)  # fmt: skip
DRAWING = (
    "x = F.dropout(x, 0.4, self.training)", "x = F.dropout(x * 1.5, 0.3, True, True)", "x = F.rrelu(x, 0.1, 0.4, self.training)", "x = F.gumbel_softmax(x)",
    "x = F.alpha_dropout(x, 0.3, True)", "x = F.dropout1d(x[None], 0.4, True)[0]", "x = x * torch.rand_like(x)", "x = x + torch.randn(4)", "x = x * torch.bernoulli(x.detach().sigmoid())",
    "x = self.lstm(x[None])[0][0]", "x = x[:, torch.randperm(4)]", "x = x + torch._standard_gamma(x.exp())", "x = x + torch.normal(0.0, 1.0, (4,))",
    "x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]", "x = F.dropout(x, 1.0) + x",
    "x = F.dropout(x.double(), 0.4, True).to(x.dtype)", "x = F.dropout(x.bfloat16(), 0.4, True).to(x.dtype)", "x = x + torch.randn(4, dtype=torch.double).to(x.dtype)",
    "x = x * torch.randn(4, dtype=torch.cfloat).abs().to(x.dtype)", "x = x * torch.rand(4, dtype=torch.bfloat16)", "x = x * torch.randint(1, 4, (4,))", "x = x + torch.empty(4).exponential_()",
    "x = x[:, torch.multinomial(x.detach().float().exp()[0], 4)]", "x = x * torch.poisson(x.detach().exp())", "x = x + torch.randint_like(x, 5)", "x = x * torch.rand(4).bernoulli(0.5)",
    "with torch.no_grad():\n    c = F.dropout(x, 0.3)\nx = x + c", "z = F.dropout(torch.view_as_real(torch.complex(x.float(), x.float())), 0.3)\nx = z[..., 0].to(x.dtype)",
    "torch.rand(3)", "F.dropout(x, 0.5)",
)  # fmt: skip
WRITING = (
    "self.seen.add_(x.detach().mean(0))", "self.seen.mul_(0.9).add_(x.detach().amax(0), alpha=0.1)", "self.seen.copy_(x.detach().mean(0))", "self.seen.copy_(x.detach().mean())",
    "with torch.no_grad():\n    self.seen.copy_(x.amax(0))", "self.seen[1:] += 1", "self.seen.fill_(0.5)", "x = self.norm(x)", "self.seen[:2].mul_(1.5)", "v = self.seen.view(2, 2)\nv[1] -= 0.5\nx = x * v.sum()", "self.seen[self.seen > 1] = 0.3",
    "x = x + self.seen\nself.seen.add_(1.0)", "self.norm.running_mean.mul_(0.5)", "side[-1].detach().mul_(0.5)", "self.seen = self.seen * 0.5", "with torch.no_grad():\n    self.w.data.mul_(1.1)", "self.count += 1\nx = x * self.count",
)  # fmt: skip
CALLS = (
    "x = checkpoint({g}, x, use_reentrant=False)", "x = checkpoint({g}, x, use_reentrant=True)", "x = checkpoint({g}, x, use_reentrant=False, preserve_rng_state=False)",
    "x = checkpoint({g}, x, use_reentrant=False).detach() * x",
    "x, s = checkpoint(lambda x: ({g}(x), x.mean()), x, use_reentrant=False)\nx = x * s.detach()",
    "x = checkpoint(lambda x, w, k: {g}(x) * w / k['by'], x, self.w, {'by': 2}, use_reentrant=False)", "with torch.no_grad():\n    c = checkpoint({g}, x, use_reentrant=False)\nx = x + c",
    "with torch.autocast('cpu', torch.bfloat16):\n    x = checkpoint({g}, x, use_reentrant=False)", "z = checkpoint(lambda x: torch.complex({g}(x).float(), x.float()), x, use_reentrant=False)\nx = (z * 1j).imag.to(self.w.dtype)",
    "x, i = checkpoint(lambda x: {g}(x).sort(-1), x, use_reentrant=False)\nx = x * i", "x = checkpoint({g}, checkpoint(self.b, x, use_reentrant=False), use_reentrant=False)",
    "x = checkpoint(lambda x, *, by: {g}(x) * by, x, by=x.mean(), use_reentrant=False)", "x, y, _ = checkpoint(lambda x: ({g}(x), x * 2, None), x, use_reentrant=False)\nx = x + y",
)  # fmt: skip
TRANSFORMS = {
    "CheckpointTransform()": (CheckpointTransform,),
    "NormTransform()": (NormTransform,),
    "SubclassTransform()": (SubclassTransform,),
    "NormTransform(), CheckpointTransform()": (NormTransform, CheckpointTransform),
    "SubclassTransform(), CheckpointTransform()": (SubclassTransform, CheckpointTransform),
}


@dataclass(frozen=True)
class Region:
    """Statements in a region, and the lines that call it."""

    call: str
    body: tuple[Part, ...]


Part = Union[str, "Region"]


@dataclass(frozen=True)
class Regions:
    """The body of a module, with regions in it."""

    body: tuple[Part, ...]
    transforms: str
    trains: bool
    is_leaf: bool
    dtype: str = "float32"

    def text(self) -> str:
        """The module."""
        return (
            HEAD
            + "".join(f"        {line}\n" for line in _lines(self.body, iter(range(1000))))
            + "        return x.square().sum()\n"
        )

    def run(self) -> Outcome:
        """Three calls with their backwards, from the same state."""
        try:
            wanted = self._results(lambda g, *args, use_reentrant, preserve_rng_state=True, **kwargs: g(*args, **kwargs), None)
        except (RuntimeError, ValueError) as e:
            return Outcome("no oracle", str(e))
        if not all(torch.isfinite(v).all() for found in wanted for v in found.values() if isinstance(v, torch.Tensor)):
            return Outcome("no oracle", "numbers too large")
        transforms = [make() for make in TRANSFORMS[self.transforms]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self._results(checkpoint, transforms)
        for call, (ours, eagers) in enumerate(zip(found, wanted, strict=True)):
            for name, expected in eagers.items():
                if not _agree(ours[name], expected, 5e-2 if "bfloat16" in self.text() else 1e-2):
                    return Outcome("wrong", f"{name} of call {call}: {ours[name]}, not {expected}")
        return Outcome("right")

    def _results(self, checkpoint: Any, transforms: list | None) -> list[dict[str, Any]]:
        scope = {"checkpoint": checkpoint}
        exec(self.text(), scope)
        torch.manual_seed(0)
        module = scope["Module"]().to(getattr(torch, self.dtype)).train(self.trains)  # type: ignore[operator]
        call = module if transforms is None else thunder.jit(module, transforms=transforms)
        results = []
        for n in range(3):
            x = torch.randn(3, 4, dtype=getattr(torch, self.dtype)).requires_grad_(self.is_leaf)
            out = call(x)
            out.backward()
            found = {
                "result": out.detach(),
                "gradient": x.grad,
                "count": module.count,
                "random": torch.rand(1) if n == 2 else None,
            }
            found |= {name: p.grad for name, p in module.named_parameters()}
            results.append(found | {name: b.clone() for name, b in module.named_buffers()})
            module.zero_grad()
        return results

    def smaller(self) -> Iterable[Regions]:
        """Without a part, or with what is in a region in its place."""
        for body in _smaller(self.body):
            yield replace(self, body=body)

    def source(self) -> str:
        """A program that can be pasted."""
        return f"""\
from thunder_norm.transforms import CheckpointTransform, NormTransform, SubclassTransform
import thunder
from torch.utils import checkpoint as of_torch
{self.text()}
def show(jit, checkpoint_):
    global checkpoint
    checkpoint = checkpoint_
    torch.manual_seed(0)
    module = Module().to(torch.{self.dtype}).train({self.trains})
    call = jit(module)
    for _ in range(3):
        x = torch.randn(3, 4, dtype=torch.{self.dtype}).requires_grad_({self.is_leaf})
        out = call(x)
        out.backward()
        print(out.item(), x.grad, [p.grad for p in module.parameters()], list(module.buffers()), module.count)
        module.zero_grad()
    print(torch.rand(1))
show(lambda m: m, lambda g, *args, use_reentrant, preserve_rng_state=True, **kwargs: g(*args, **kwargs))
show(lambda m: thunder.jit(m, transforms=[{self.transforms}]), of_torch.checkpoint)
"""

    def labels(self) -> Sequence[str]:
        """The transforms, the calls and the statements."""
        return [self.transforms, *(" / ".join(s.splitlines()) for s in _statements(self.body))]


def draw(random: random.Random) -> Regions:
    """One to four parts, regions of up to three levels among them; few programs write into what was there before."""
    writes = random.random() < 0.35

    def body(level: int) -> tuple[Part, ...]:
        return tuple(part(level) for _ in range(random.choice((1, 2, 2, 3))))

    def part(level: int) -> Part:
        if level < 3 and random.random() < (0.8, 0.5, 0.3)[level]:
            return Region(random.choice(CALLS), body(level + 1))
        return random.choice(random.choice((STATEMENTS, DRAWING, WRITING) if writes else (STATEMENTS, DRAWING)))

    return Regions(
        body(0),
        random.choice(tuple(TRANSFORMS)),
        random.random() < 0.8,
        random.random() < 0.8,
        random.choice(("float32", "float32", "float64")),
    )


def _lines(body: Sequence[Part], numbers: Iterator[int]) -> Iterator[str]:
    for part in body:
        if isinstance(part, str):
            yield from part.splitlines()
            continue
        name = f"g{next(numbers)}"
        yield f"def {name}(x):"
        yield from (f"    {line}" for line in _lines(part.body, numbers))
        yield "    return x"
        yield from part.call.replace("{g}", name).splitlines()


def _statements(body: Sequence[Part]) -> Iterator[str]:
    for part in body:
        if isinstance(part, str):
            yield part
        else:
            yield part.call
            yield from _statements(part.body)


def _smaller(body: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    for i, part in enumerate(body):
        before, after = body[:i], body[i + 1 :]
        yield before + after
        if isinstance(part, Region):
            yield before + part.body + after
            yield from (before + (replace(part, body=inside),) + after for inside in _smaller(part.body))


def _agree(ours: Any, expected: Any, of_largest: float) -> bool:
    if not isinstance(expected, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return ours is expected or ours == expected
    # attention of large numbers loses digits, and in single precision alone are other numbers drawn where a kernel is another
    largest = expected.abs().nan_to_num(posinf=0.0).max().clamp(min=1.0).item()
    return (ours.shape, ours.dtype) == (expected.shape, expected.dtype) and torch.allclose(
        ours, expected, rtol=2e-2, atol=of_largest * largest, equal_nan=True
    )
