"""Nests of transforms: each level turns a function of the program's arguments into another one, as text.

A level knows the arguments' names and what the function before it returns; how it is written (outside, or inside the function that
the next one transforms; over all arguments, or closing over some) is drawn, or the plainest way where nothing is drawn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_structure

from .level_writing import Level, Writing, all_inexact, all_real, leaves_of, rebuilt, scalar_text, to_scalar
from .writing import Redraw

_MOST_ENTRIES = 300


def _transform(w: Writing, call: Callable[[str], str], wants: Callable[[Any], None] = all_inexact) -> None:
    """A transform that makes a function of the same arguments: ``call(function)`` is its text."""
    before, name = w.function, w.new()
    style = w.choose(["outside", "inside", "outside", "inside", "local", "held"])
    if style == "outside":
        w.lines.append(f"{name} = {call(before)}")
    elif style == "inside":
        w.define(name, [f"return {call(before)}({w.head})"])
    elif style == "local":
        w.define(name, [f"def inner({w.head}):", f"    return {before}({w.head})", f"return {call('inner')}({w.head})"])
    else:
        w.lines.append(f"h{w.count} = {call(before)}")
        w.define(name, [f"return h{w.count}({w.head})"])
    w.function = name


def _closing(w: Writing, call: Callable[[str], str]) -> None:
    """A transform of a function of the first argument, which closes over the others, and over the first one as well."""
    before, name, first = w.function, w.new(), w.names[0]
    inside = ", ".join(["y", *w.names[1:]])
    factor = w.choose(["", "", f" * {leaves_of(w.arguments[0].value, first)[0][0]}.sum()"])
    if not isinstance(w.out, torch.Tensor):
        factor = ""
    w.define(name, [f"return {call(f'lambda y: {before}({inside}){factor}')}({first})"])
    w.function = name


def _argnums(w: Writing) -> str:
    positions = range(len(w.arguments))
    text = w.choose(["", "int", "tuple"])
    if text == "":
        return ""
    if text == "int":
        return f", argnums={w.choose([*positions, -1])}"
    chosen = w.some(list(positions))
    return f", argnums=({', '.join(map(str, chosen))}{',' * (len(chosen) == 1)})"


def _differentiating(name: str) -> Callable[[Writing], None]:
    def level(w: Writing) -> None:
        if name in ("grad", "value_and_grad"):
            to_scalar(w)
        else:
            all_inexact(w.out)
            all_real((w.out, [a.value for a in w.arguments]))
            size = sum(v.numel() for v in tree_leaves(w.out)) * _entries(w) ** (2 if name == "hessian" else 1)
            if size > _MOST_ENTRIES * (4 if name == "hessian" else 1):
                raise Redraw
        style = w.choose(["plain", "plain", "plain", "closing", "aux"])
        if style == "closing":
            return _closing(w, lambda f: f"{name}({f})")
        argnums = _argnums(w)
        if style == "aux" and name != "hessian":
            before, pair = w.function, w.new("p")
            aux = w.choose(["out", f"{leaves_of(w.arguments[0].value, w.names[0])[0][0]} * 2"])
            w.define(pair, [f"out = {before}({w.head})", f"return out, {aux}"])
            w.function = pair
            return _transform(w, lambda f: f"{name}({f}{argnums}, has_aux=True)")
        options = ""
        if name in ("jacrev",) and argnums == "" and w.choose([False, False, True]):
            options = ", chunk_size=2"
        return _transform(w, lambda f: f"{name}({f}{argnums}{options})")

    return level


def _entries(w: Writing) -> int:
    return sum(v.numel() for a in w.arguments for v in tree_leaves(a.value))


def _tangent(w: Writing, tree: Any, name: str) -> str:
    how = w.choose(["{}.cos()", "torch.ones_like({})", "{} * 0.5", "{}"])
    return rebuilt(tree, name, lambda n, _: how.format(n))


def _jvp(w: Writing) -> None:
    all_inexact(w.out)
    chosen = w.some(w.arguments)
    before, name = w.function, w.new()
    points = ", ".join(a.name for a in chosen)
    tangents = ", ".join(_tangent(w, a.value, a.name) for a in chosen)
    inner = before
    if len(chosen) < len(w.arguments):
        inner = f"lambda {points}: {before}({w.head})"
    part = w.choose(["", "[1]", "[1]"])
    w.define(name, [f"return jvp({inner}, ({points},), ({tangents},)){part}"])
    w.function = name


def _vjp(w: Writing) -> None:
    all_inexact(w.out)
    before, name = w.function, w.new()
    how = w.choose(["torch.ones_like({})", "{}.cos()", "{} * 0.3", "torch.ones_like({}) * 2"])
    cotangents = rebuilt(w.out, "out", lambda n, _: how.format(n))
    chosen = w.some(w.arguments)
    points = ", ".join(a.name for a in chosen)
    inner = before if len(chosen) == len(w.arguments) else f"lambda {points}: {before}({w.head})"
    lines = [f"out, pull = vjp({inner}, {points})"]
    ending = w.choose(["pull", "with out", "twice", "aux"])
    if ending == "pull":
        lines.append(f"return pull({cotangents})")
    elif ending == "with out":
        lines.append(f"return out, pull({cotangents})")
    elif ending == "twice":
        other = rebuilt(w.out, "out", lambda n, _: f"{n}.sin()")
        lines += [f"return pull({cotangents}), pull({other})"]
    else:
        lines = [f"out, pull, aux = vjp(lambda {points}: ({before}({w.head}), {w.names[0]}), {points}, has_aux=True)"]
        lines.append(f"return pull({cotangents}), aux")
    w.define(name, lines)
    w.function = name


def _vmap(w: Writing) -> None:
    if not tree_leaves(w.out) or not all(isinstance(v, torch.Tensor) for v in tree_leaves(w.out)):
        raise Redraw
    if sum(v.numel() for v in tree_leaves(w.out)) > _MOST_ENTRIES:
        raise Redraw
    size = w.choose([2, 2, 3, 1])
    mapped = w.some(list(range(len(w.arguments))))
    dims: list[int | None] = []
    texts: list[str] = []
    for i, a in enumerate(w.arguments):
        lowest = min(v.ndim for v in tree_leaves(a.value))
        dim = None if i not in mapped else w.choose([0, 0, -1, lowest])
        dims.append(dim)
        if dim is None:
            texts.append(a.name)
        else:
            texts.append(rebuilt(a.value, a.name, lambda n, v, d=dim: _stacked(n, d, size)))
    if len(set(dims)) == 1 and w.choose([True, False]):
        in_dims = "" if dims[0] == 0 else f", in_dims={dims[0]}"
    else:
        in_dims = f", in_dims=({', '.join(map(str, dims))}{',' * (len(dims) == 1)})"
    lowest = min(v.ndim for v in tree_leaves(w.out))
    out_dims = w.choose(["", "", ", out_dims=-1", f", out_dims={lowest}"])
    options = in_dims + out_dims + w.choose(["", "", "", ", chunk_size=2", ', randomness="different"'])
    before, name = w.function, w.new()
    style = w.choose(["inside", "outside", "inside", "local"])
    if style == "outside":
        w.lines.append(f"{name} = vmap({before}{options})")
        for a, text, dim in zip(w.arguments, texts, dims, strict=True):
            if dim is not None:
                a.text = _replaced(text, a.name, a.text)
    elif style == "inside":
        w.define(name, [f"return vmap({before}{options})({', '.join(texts)})"])
    else:
        w.define(
            name, [f"def inner({w.head}):", f"    return {before}({w.head})", f"return vmap(inner{options})({', '.join(texts)})"]
        )
    w.function = name


def _replaced(text: str, name: str, by: str) -> str:
    """`text` as an expression of `by` in place of the variable `name`."""
    return by if text == name else f"(lambda {name}: {text})({by})"


def _stacked(name: str, dim: int, size: int) -> str:
    parts = [name, f"{name} * 0.875", f"{name} * 1.125"][:size]
    return f"torch.stack([{', '.join(parts)}], {dim})"


def _custom_vjp(w: Writing) -> None:
    all_inexact(w.out)
    before, name = w.function, w.new()
    body = [
        f"{name} = custom_vjp({before})",
        f"{name}.defvjp(lambda {w.head}: ({before}({w.head}), ({w.head},)), lambda saved, ct: vjp({before}, *saved)[1](ct))",
    ]
    if w.choose(["outside", "inside"]) == "outside":
        w.lines.extend(body)
        w.function = name
        return
    outer = w.new()
    w.define(outer, [*body, f"return {name}({w.head})"])
    w.function = outer


_TRANSFORMED = re.compile(r"\b(grad|value_and_grad|vjp|jvp|vmap|jacrev|jacfwd|hessian|custom_vjp)\(")


def _jit(w: Writing) -> None:
    if "namedtuple" in str(tree_structure(w.out)):  # Thunder itself returns none
        raise Redraw
    transforms = w.choose(["", "", ", transforms=[SubclassTransform()]", ", transforms=[NormTransform()]"])
    if not transforms and not _TRANSFORMED.search("\n".join(w.lines)):  # Thunder by itself, which we do not answer for
        transforms = ", transforms=[SubclassTransform()]"
    _transform(w, lambda f: f"jit({f}{transforms})")


def _both_orders(w: Writing) -> None:
    """Forward over reverse and reverse over forward."""
    to_scalar(w)
    before, name, first = w.function, w.new(), w.names[0]
    rest = "".join(f", {n}" for n in w.names[1:])
    tangent = _tangent(w, w.arguments[0].value, first)
    w.define(
        name,
        [
            f"direction = {tangent}",
            f"forward = jvp(grad(lambda y: {before}(y{rest})), ({first},), (direction,))[1]",
            f"reverse = grad(lambda y: jvp(lambda z: {before}(z{rest}), (y,), (direction,))[1])({first})",
            "return forward, reverse",
        ],
    )
    all_real(w.arguments[0].value)
    w.function = name


def _autograd(w: Writing) -> None:
    """torch's own autograd through what was written: only the outermost level."""
    leaves, fresh = [], []
    for a in w.arguments:
        fresh.append(rebuilt(a.value, a.name, lambda n, _: _leaf(leaves, n)))
    names = [f"leaf{i}" for i in range(len(leaves))]
    lines = [f"{leaf} = {n}.detach().clone().requires_grad_()" for leaf, n in zip(names, leaves, strict=True)]
    lines.append(f"out = {w.function}({', '.join(fresh)})")
    # whether a result requires grad that does not depend on the inputs is nobody's promise
    nothing = " + ".join(f"(0 * {leaf}).abs().sum()" for leaf in names)
    lines.append(f"loss = {scalar_text(w, 'out')} + {nothing}")
    if w.choose(["grad", "backward"]) == "grad":
        lines.append(f"return torch.autograd.grad(loss, ({', '.join(names)},), materialize_grads=True)")
    else:
        lines.append("loss.backward()")
        lines.append(f"return [torch.zeros_like(v) if v.grad is None else v.grad for v in ({', '.join(names)},)]")
    w.function = w.new("b")
    w.lines += [f"def {w.function}({w.head}):", *(f"    {line}" for line in lines)]


def _leaf(leaves: list[str], name: str) -> str:
    leaves.append(name)
    return f"leaf{len(leaves) - 1}"


KINDS: dict[str, Callable[[Writing], None]] = {
    "grad": _differentiating("grad"),
    "value_and_grad": _differentiating("value_and_grad"),
    "vjp": _vjp,
    "jvp": _jvp,
    "vmap": _vmap,
    "jacrev": _differentiating("jacrev"),
    "jacfwd": _differentiating("jacfwd"),
    "hessian": _differentiating("hessian"),
    "custom_vjp": _custom_vjp,
    "jit": _jit,
    "both orders": _both_orders,
    "autograd": _autograd,
}
# How often a level differentiates: a program's size grows with the product of its levels
ORDERS = dict.fromkeys(KINDS, 1) | {"vmap": 0, "custom_vjp": 0, "jit": 0, "hessian": 2, "both orders": 2}
INNER = tuple(kind for kind in KINDS if kind != "autograd")
DIFFERENTIATES = tuple(kind for kind in KINDS if ORDERS[kind])


def write_level(w: Writing, level: Level) -> None:
    """Write a level around what was written.

    Raises:
        Redraw: it does not fit what the function returns.
    """
    w.pick = None if level.seed is None else random.Random(level.seed)
    KINDS[level.kind](w)
