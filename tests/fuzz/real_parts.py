"""The statements of programs in real mode, and the module whose forward they make."""

from __future__ import annotations

from .real_contexts import CONTEXTS
from .real_dtypes import DTYPES
from .real_python import PYTHON
from .real_statement import Statement
from .real_views import VIEWS

__all__ = ["HEAD", "PARTS", "RETURNS", "Statement"]

HEAD = """\
import collections, contextlib, dataclasses, enum, functools, itertools, math, operator, typing
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Pair(typing.NamedTuple):
    first: object
    second: object = 2.0

@dataclasses.dataclass
class Box:
    value: object
    scale: float = 2.0
    extra: list = dataclasses.field(default_factory=list)
    @property
    def scaled(self): return self.value * self.scale

class Lazy:
    def __init__(self, v): self.v = v
    def __getattr__(self, name):
        if name.startswith("times"): return self.v * int(name[5:])
        raise AttributeError(name)

def scaled(t, by=2.0, *more, shift=0.0, **named):
    for m in more: t = t * m
    for v in named.values(): t = t + v
    return t * by + shift

def pieces(t):
    for row in t: yield row * 2

@functools.singledispatch
def dispatched(v): return 1.0
@dispatched.register
def _(v: torch.Tensor): return v.sum()
@dispatched.register
def _(v: int): return v * 2.0

@functools.lru_cache
def cached(n): return n * 3

@torch.no_grad()
def without(t): return t * 3

@torch.enable_grad()
def with_grad(t): return t * 3

@torch.inference_mode()
def inferred(t): return t * 3

@torch.autocast("cpu", dtype=torch.bfloat16)
def low(t): return t @ t.t()

def arguments(x):
    return {
        "x": x,
        "y": torch.randn(4),
        "z": torch.tensor(0.5),
        "i": torch.arange(12).view(3, 4) - 3,
        "b": torch.randn(3, 4) > 0,
        "e": torch.empty(0, 4),
        "h": torch.randn(3, 4).bfloat16(),
        "c": torch.randn(3, 4, dtype=torch.complex64),
        "d": {"b": torch.randn(4), "a": torch.randn(4)},
        "l": [torch.randn(4), torch.randn(4)],
        "n": 2, "k": 1.5, "s": "sum", "o": None,
    }

class Module(nn.Module):
    scale = 2.0
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.twin = nn.Linear(4, 4)
        self.twin.weight = self.lin.weight
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))
        self.table = {"a": 2.0, "b": torch.ones(4)}
    @property
    def doubled(self): return self.w * 2
    @staticmethod
    def halved(t): return t / 2
    def helper(self, t, *, by=2): return t * by
    def forward(self, x, y, z, i, b, e, h, c, d, l, n=2, k=1.5, *, s="sum", o=None):
        x0, r = x, []
"""

RETURNS = (
    "(x, *r)", "x, r", "x, r", "{'x': x, 'r': r}", "Pair(x, r)", "[x, *r]", "(x, r, x)", "(x, {'y': y, 'r': tuple(r)})", "(x, r, d)",
    "(x, x0, r)", "(x, r, l)", "(x, r, n, k, s)", "(x, r, x.view(-1))", "collections.OrderedDict(r=r, x=x)",
)  # fmt: skip

PARTS: tuple[Statement, ...] = (*CONTEXTS, *DTYPES, *PYTHON, *VIEWS)
