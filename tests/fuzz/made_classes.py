"""Random wrapper classes, as text: what they keep, how they dispatch, and what they add to a tensor, each in the ways that people write."""

from __future__ import annotations

import random as randomness
import textwrap
from dataclasses import dataclass

HEADER = '''\
import dataclasses, enum, functools
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Kind(enum.Enum):
    PLAIN = "plain"
    SIGNED = "signed"


@dataclasses.dataclass(frozen=True)
class Notes:
    kind: Kind = Kind.PLAIN
    names: tuple = ()
    depth: int = 0


class Straight(torch.autograd.Function):
    """Its argument, with the gradient of twice as much."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * 2
'''

# How the outer tensor is kept: the size of the outer one, what is kept of a plain x, and the plain tensor that it stands for.
STORAGE = {
    "same": ("{d}.shape", "{d}.stride()", "{x}", "self.{d}"),
    "transposed": ("{d}.mT.shape", "{d}.mT.stride()", "{x}.mT.contiguous()", "self.{d}.mT"),
    "padded": (
        "(*{d}.shape[:-1], {d}.shape[-1] - 2)",
        "torch.empty((*{d}.shape[:-1], {d}.shape[-1] - 2), device='meta').stride()",
        "F.pad({x}, (0, 2))",
        "self.{d}[..., :-2]",
    ),
    "quantised": (
        "{d}.shape",
        "{d}.stride()",
        "({x} / 0.05).round().clamp(-127, 127).to(torch.int8)",
        "self.{d}.to(self.dtype) * 0.05",
    ),
    "low": ("{d}.shape", "{d}.stride()", "{x}.to(torch.bfloat16)", "self.{d}.to(self.dtype)"),
    "packed": (
        "(*{d}.shape[:-1], {d}.shape[-1] * 2)",
        "torch.empty((*{d}.shape[:-1], {d}.shape[-1] * 2), device='meta').stride()",
        "pack(({x} / 0.25).round().clamp(-8, 7))",
        "unpack(self.{d}).to(self.dtype) * 0.25",
    ),
}
PACKING = """
def pack(x):
    x = (x + 8).to(torch.uint8)
    return x[..., ::2] | (x[..., 1::2] << 4)


def unpack(x):
    return torch.stack([x & 15, x >> 4], -1).flatten(-2).to(torch.int8) - 8
"""


@dataclass(frozen=True)
class Form:
    """What a class is."""

    storage: str
    parts: tuple[str, ...]  # of "twin", "scale", "mask"; the mask may be missing
    context: str  # "none", "dict", "tuple", "notes"
    dispatch: str  # "map", "table", "packet"
    fallback: str  # "plain": results of other operations are plain; "kept": wrapped again
    writes: str  # "inner", "copied"
    function: str  # "none", "disabled", "linear", "named", "method"
    corrects_aliasing: bool
    says_strides: bool
    says_grad: str  # "no", "inner"
    is_derived: bool
    counts: bool  # the context says how many operations it has seen

    @property
    def names(self) -> list[str]:
        return ["inner", *self.parts]

    def text(self) -> str:
        """The class ``Made``, and for a derived one ``Other``."""
        size, stride, keep, plain = (s.format(d="inner", x="x") for s in STORAGE[self.storage])
        arguments = "".join(f", {p}=None" for p in self.parts)
        lines = [PACKING if self.storage == "packed" else "", "class Made(torch.Tensor):", "    FACTOR = 2.0"]
        body = [
            "@staticmethod",
            f"def __new__(cls, inner{arguments}, notes=Notes(), dtype=torch.float64):",
            f"    return torch.Tensor._make_wrapper_subclass(cls, {size}, "
            + (f"strides={stride}, " if self.says_strides else "")
            + ("requires_grad=inner.requires_grad, " if self.says_grad == "inner" else "")
            + "dtype=dtype, device=inner.device)",
            "",
            f"def __init__(self, inner{arguments}, notes=Notes(), dtype=torch.float64):",
            f"    self.{', self.'.join(self.names)} = {', '.join(self.names)}" if self.parts else "    self.inner = inner",
            "    self.notes = notes",
            "",
            *self._protocol(),
            "@classmethod",
            f"def of(cls, x, notes=Notes(), {', '.join(p + '=None' for p in self.parts)}):",
            *(["    twin = x * 0.5 if twin is None else twin"] if "twin" in self.parts else []),
            *(["    scale = x.detach().abs().amax() if scale is None else scale"] if "scale" in self.parts else []),
            f"    return cls({keep}{''.join(f', {p}={self._kept(p)}' for p in self.parts)}, notes=notes, dtype=x.dtype)",
            "",
            "def plain(self):",
            f"    x = {plain}",
            *(["    x = x if self.mask is None else x * self.mask"] if "mask" in self.parts else []),
            "    return x",
            "",
            "def like(self, x):",
            f"    return type(self).of(x, notes=self.notes{''.join(f', {p}=self.{p}' for p in self.parts if p == 'scale')})",
            "",
            "def scaled(self, c):",
            "    return self * c * self.FACTOR",
            "",
            "@property",
            "def magnitude(self):",
            "    return self.plain().abs().sum() + len(self.notes.names)",
            "",
            "def __repr__(self):",
            "    return f'{type(self).__name__}(" + ", ".join(f"{n}={{self.{n}}}" for n in self.names) + ", {self.notes})'",
            "",
            *self._function(),
            *self._dispatch(),
        ]
        lines.append(textwrap.indent("\n".join(body), "    "))
        if self.is_derived:
            lines += [
                "",
                "",
                "class Other(Made):",
                "    FACTOR = 3.0",
                "",
                "    def scaled(self, c):",
                "        return super().scaled(c) + 1",
            ]
        if self.dispatch == "table":
            lines.append(self._table())
        return "\n".join(lines) + "\n"

    def _kept(self, part: str) -> str:
        return STORAGE[self.storage][2].format(x=part) if part == "twin" else part

    def _protocol(self) -> list[str]:
        names = "['inner'" + "".join(f", '{p}'" for p in self.parts if p != "mask") + "]"
        if "mask" in self.parts:
            names += " + ([] if self.mask is None else ['mask'])"
        context, notes, dtype = {
            "none": ("self.dtype", "Notes()", "context"),
            "dict": ("{'notes': self.notes, 'dtype': self.dtype}", "context['notes']", "context['dtype']"),
            "tuple": ("(self.notes, self.dtype)", "context[0]", "context[1]"),
            "notes": ("(self.notes.kind, self.notes.names, self.notes.depth, self.dtype)", "Notes(*context[:3])", "context[3]"),
        }[self.context]
        return [
            "def __tensor_flatten__(self):",
            f"    return {names}, {context}",
            "",
            "@classmethod",
            "def __tensor_unflatten__(cls, inner, context, size, stride):",
            f"    return cls(inner['inner']{''.join(f', {p}=inner.get({p!r})' for p in self.parts)}, notes={notes}, dtype={dtype})",
            "",
        ]

    def _function(self) -> list[str]:
        if self.function == "none":
            return []
        if self.function == "disabled":
            return ["__torch_function__ = torch._C._disabled_torch_function_impl", ""]
        special = {
            "linear": [
                "    if func is F.linear and isinstance(args[1], cls) and not isinstance(args[0], cls):",
                "        y = args[0] @ Straight.apply(args[1].plain()).mT",
                "        return y if len(args) < 3 or args[2] is None else y + args[2]",
            ],
            "named": [
                "    if func.__name__ in ('relu', 'tanh') and isinstance(args[0], cls):",
                "        return args[0].like(getattr(torch, func.__name__)(args[0].plain() * cls.FACTOR))",
            ],
            "method": [
                "    if func is torch.Tensor.sum and len(args) == 1:",
                "        return args[0].plain().sum() * cls.FACTOR",
                "    if func in (torch.Tensor.mul, torch.mul) and not isinstance(args[0], cls):",
                "        return func(args[1], args[0])",
            ],
        }[self.function]
        return [
            "@classmethod",
            "def __torch_function__(cls, func, types, args=(), kwargs=None):",
            *special,
            "    with torch._C.DisableTorchFunctionSubclass():",
            "        return func(*args, **(kwargs or {}))",
            "",
        ]

    def _dispatch(self) -> list[str]:
        lines = [
            "@classmethod",
            "def __torch_dispatch__(cls, func, types, args=(), kwargs=None):",
            "    kwargs = kwargs or {}",
        ]
        writes = [
            "    if func._schema.is_mutable:",
            "        x = args[0]",
            "        if not isinstance(x, Made):",
            "            return func(*tree_map_only(Made, Made.plain, args), **kwargs)",
            "        y = x.plain().clone()",
            "        func(y, *tree_map_only(Made, Made.plain, args[1:]), **kwargs)",
            "        y = x.like(y)",
            *(
                f"        {'if x.mask is not None and y.mask is not None: ' if n == 'mask' else ''}x.{n}.copy_(y.{n})"
                for n in self.names
                if n != "scale"
            ),
            "        return x",
        ]
        first = "next(a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Made))"
        count = ", depth=x.notes.depth + 1" if self.counts and self.context != "none" else ""
        rest = [
            f"    x = {first}",
            "    out = func(*tree_map_only(Made, Made.plain, args), **tree_map_only(Made, Made.plain, kwargs))",
        ]
        if self.fallback == "kept":
            rest += [
                "    def kept(t):",
                "        if t.dtype != x.dtype or t.ndim != 2"
                + (" or t.shape[-1] % 2" if self.storage == "packed" else "")
                + ":",
                "            return t",
                f"        return type(x).of(t, notes=dataclasses.replace(x.notes{count})"
                + (", scale=x.scale" if "scale" in self.parts else "")
                + ")",
                "    return tree_map_only(torch.Tensor, kept, out)",
            ]
        else:
            rest.append("    return out")
        if self.dispatch == "map" and self.storage == "same":
            inner = [n for n in self.names if n in ("inner", "twin")]
            lines += [] if self.writes == "inner" else writes
            lines += [
                f"    x = {first}",
                f"    outs = [func(*tree_map_only(Made, lambda t: getattr(t, n), args), **tree_map_only(Made, lambda t: getattr(t, n), kwargs)) for n in {inner}]",
                "    if not isinstance(outs[0], (torch.Tensor, list, tuple)):",
                "        return outs[0]",
                "    def kept(*ts):",
                "        if not isinstance(ts[0], torch.Tensor):",
                "            return ts[0]",
                f"        return type(x)(*ts{''.join(f', {p}=x.{p}' for p in self.parts if p == 'scale')}, notes=dataclasses.replace(x.notes{count}), dtype=ts[0].dtype)",
                "    out = kept(*outs) if isinstance(outs[0], torch.Tensor) else type(outs[0])(kept(*ts) for ts in zip(*outs))",
                "    return return_and_correct_aliasing(func, args, kwargs, out)" if self.corrects_aliasing else "    return out",
            ]
            if self.writes == "inner" and not self.corrects_aliasing:
                lines.insert(3, "    is_written = func._schema.is_mutable and isinstance(args[0], Made)")
                lines[-1] = "    return args[0] if is_written else out"
            return lines
        keep = [
            f"return type(x)({', '.join(f'func(x.{n})' if n != 'scale' else 'x.scale' for n in self.names if n != 'mask')}"
            + (", mask=None if x.mask is None else func(x.mask)" if "mask" in self.parts else "")
            + ", notes=x.notes, dtype=x.dtype)"
        ]
        if self.dispatch == "table":
            lines += ["    if func in TABLE:", "        return TABLE[func](cls, func, args, kwargs)"]
        elif self.dispatch == "packet":
            lines += [
                "    if func.overloadpacket in (aten.detach, aten.clone, aten.alias):",
                "        x = args[0]",
                f"        out = {keep[0].removeprefix('return ')}",
                "        return return_and_correct_aliasing(func, args, kwargs, out)"
                if self.corrects_aliasing
                else "        return out",
            ]
        else:
            lines += [
                "    if func in (aten.detach.default, aten.clone.default, aten.alias.default):",
                "        x = args[0]",
                f"        {keep[0]}",
            ]
        return [*lines, *writes, *rest]

    def _table(self) -> str:
        build = f"type(x)({', '.join(f'func(x.{n})' if n != 'scale' else 'x.scale' for n in self.names if n != 'mask')}"
        build += (
            ", mask=None if x.mask is None else func(x.mask)" if "mask" in self.parts else ""
        ) + ", notes=x.notes, dtype=x.dtype)"
        out = "return_and_correct_aliasing(func, args, kwargs, out)" if self.corrects_aliasing else "out"
        return f"""

TABLE = {{}}


def implements(*functions):
    def register(implementation):
        for f in functions:
            TABLE[f] = implementation
        return implementation

    return register


@implements(aten.detach.default, aten.clone.default, aten.alias.default)
def _same(cls, func, args, kwargs):
    x = args[0]
    out = {build}
    return {out}


@implements(aten.mul.Tensor, aten.div.Tensor)
def _scaled(cls, func, args, kwargs):
    x, y = args
    if isinstance(x, Made) and not isinstance(y, torch.Tensor):
        return x.like(func(x.plain(), y))
    return func(*tree_map_only(Made, Made.plain, args))


@implements(aten.mm.default, aten.addmm.default)
def _product(cls, func, args, kwargs):
    return func(*(a.plain() if isinstance(a, Made) else a for a in args), **kwargs)


@implements(aten._to_copy.default)
def _to(cls, func, args, kwargs):
    x = args[0]
    dtype = kwargs.get("dtype") or x.dtype
    return type(x).of(x.plain().to(dtype), notes=dataclasses.replace(x.notes, names=(*x.notes.names, "to")))
"""


def drawn(random: randomness.Random) -> Form:
    """A form."""
    storage = random.choice(["same", "same", "same", *STORAGE])
    parts = [p for p, chance in (("twin", 0.35), ("scale", 0.35), ("mask", 0.3)) if random.random() < chance]
    dispatch = random.choice(["map", "map", "table", "packet"])
    writes = random.choice(["inner", "copied"])
    if dispatch == "map" and storage == "same":  # each part by itself: a mask is none, and what is copied has the twin of its own
        parts = [p for p in parts if p != "mask" and (p != "twin" or writes == "inner")]
    return Form(
        storage=storage,
        parts=tuple(parts),
        context=random.choice(["none", "dict", "tuple", "notes"]),
        dispatch=dispatch,
        fallback=random.choice(["plain", "kept", "kept"]),
        writes=writes,
        function=random.choice(["none", "none", "disabled", "linear", "named", "method"]),
        corrects_aliasing=random.random() < 0.5,
        says_strides=random.random() < 0.6,
        says_grad=random.choice(["no", "no", "inner"]),
        is_derived=random.random() < 0.3,
        counts=random.random() < 0.2,
    )


def labels(form: Form) -> list[str]:
    """What the class is, for counts."""
    return [f"{form.storage} storage", f"dispatch: {form.dispatch}", f"function: {form.function}", *form.parts]
