"""Attentions as text: how queries, keys and values are made, cut apart, rotated, normalized and multiplied, and which rows are whose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange

from .optimizer_truth import Cut, Known

WIDTH, BATCH, TOKENS = 8, 2, 5
ROLES = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Attended:
    """What is known of one attention for a clip.

    Attributes:
        heads, groups: of queries, of keys.
        scaled: parameter -> (axis, for each of queries and keys that are of it, the rows of each head); where gains or temperatures scale, none.
        by_gains: the parameters that are multiplied otherwise.
        is_shared: whether all heads have one gamma.
        is_refused: whether nothing can scale it.
        is_by_keys: whether keys, which heads share, take all of gamma.
        unscaled: which of queries and keys nothing multiplies, or something else than these rows.
    """

    name: str
    heads: int
    groups: int
    scaled: tuple[tuple[str, int, tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]], ...]
    by_gains: tuple[str, ...] = ()
    is_shared: bool = False
    is_refused: bool = False
    unscaled: tuple[str, ...] = ()
    is_by_keys: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a model: lines of its ``__init__`` and ``forward``, and what is known of its parameters."""

    label: str
    init: tuple[str, ...]
    forward: tuple[str, ...]
    known: tuple[tuple[str, Known], ...]
    attention: Attended | None = None


def projection(rng: random.Random, name: str, rows: int, x: str, kinds: Sequence[str] = (), inputs: int = WIDTH, is_first: bool = False) -> tuple[list[str], str, list[tuple[str, dict]], str]:  # fmt: skip
    """Lines that make a matrix of `rows` outputs, its product with `x`, what is known of its parameters, and how it is kept."""
    kind, bias = rng.choice(kinds or PROJECTIONS), rng.random() < 0.5
    kind = "F.linear" if kind == "joined" and rows < 4 else kind  # of one row the RMS is that of an entry
    of_w: dict[str, Any] = {"role": "matrix", "norm": "matrix", "mass": "heavy", "is_first": is_first}
    of_b: dict[str, Any] = {"role": "bias", "norm": "rows", "mass": "light"}
    module = [(f"{name}.weight", of_w), *([(f"{name}.bias", of_b)] if bias else ())]
    plain = [(f"{name}_w", of_w), *([(f"{name}_b", of_b)] if bias else ())]
    lines = [f"self.{name}_b = nn.Parameter(torch.randn({rows}) / 4)"] if bias else []
    outputs_first = [f"self.{name}_w = nn.Parameter(torch.randn({rows}, {inputs}) / 3)", *lines]
    inputs_first = [f"self.{name}_w = nn.Parameter(torch.randn({inputs}, {rows}) / 3)", *lines]
    w, b, plus = f"self.{name}_w", f"self.{name}_b" if bias else "None", f" + self.{name}_b" if bias else ""
    if kind == "linear":
        return [f"self.{name} = nn.Linear({inputs}, {rows}, bias={bias})"], f"self.{name}({x})", module, kind
    if kind == "conv1d":
        of_w |= {"role": "convolution", "is_kernel": True}
        return [f"self.{name} = nn.Conv1d({inputs}, {rows}, 1, bias={bias})"], f"self.{name}({x}.mT).mT", module, kind
    if kind == "lora":
        adapter = of_w | {"mass": "heavy", "is_first": False}
        frozen = [(f"{name}.weight", of_w | {"is_trained": False}), (f"{name}a.weight", dict(of_w)), (f"{name}b.weight", adapter)]
        init = [f"self.{name} = nn.Linear({inputs}, {rows}, bias=False).requires_grad_(False)"]
        init += [f"self.{name}a, self.{name}b = nn.Linear({inputs}, 3, bias=False), nn.Linear(3, {rows}, bias=False)"]
        return init, f"(self.{name}({x}) + 0.5 * self.{name}b(self.{name}a({x})))", frozen, kind
    if kind in ("merged", "low rank"):
        of_a = of_w | {"role": "matrix"}
        factors = [
            f"self.{name}_a, self.{name}_c = nn.Parameter(torch.randn(3, {inputs}) / 3), nn.Parameter(torch.randn({rows}, 3) / 3)"
        ]
        known = [(f"{name}_a", of_a), (f"{name}_c", dict(of_w)), *([(f"{name}_b", of_b)] if bias else ())]
        product = rng.choice([f"self.{name}_c @ self.{name}_a", f"(self.{name}_a.T @ self.{name}_c.T).T"])
        if kind == "merged":
            return [*outputs_first, *factors], f"F.linear({x}, {w} + 0.5 * ({product}), {b})", [plain[0], *known], kind
        return [*lines, *factors], f"F.linear({x}, {product}, {b})", known, kind
    if kind == "weight norm":
        known = [(f"{name}.bias", of_b)] if bias else []
        known += [(f"{name}.parametrizations.weight.original0", {"role": "gain"}), (f"{name}.parametrizations.weight.original1", {"role": "matrix"})]  # fmt: skip
        return [f"self.{name} = nn.utils.parametrizations.weight_norm(nn.Linear({inputs}, {rows}, bias={bias}))"], f"self.{name}({x})", known, kind  # fmt: skip
    if kind == "F.linear":
        return outputs_first, f"F.linear({x}, {w}, {b})", plain, kind
    if kind == "transposed":
        return outputs_first, f"({x} @ {w}.T{plus})", plain, kind
    if kind == "joined":
        cut = rng.randrange(2, rows - 1)
        return outputs_first, f"(torch.cat([F.linear({x}, w) for w in {w}.split([{cut}, {rows - cut}])], -1){plus})", plain, kind
    of_w["axes"] = (1, 0)
    if kind == "einsum":
        return inputs_first, f"(torch.einsum('bti,io->bto', {x}, {w}){plus})", plain, kind
    if kind == "addmm" and bias:
        return inputs_first, f"torch.addmm({b}, {x}.flatten(0, 1), {w}).unflatten(0, {x}.shape[:2])", plain, kind
    return inputs_first, f"({x} @ {w}{plus})", plain, kind


PROJECTIONS = (
    "linear",
    "linear",
    "conv1d",
    "lora",
    "F.linear",
    "transposed",
    "joined",
    "einsum",
    "addmm",
    "matmul",
    "weight norm",
    "merged",
    "low rank",
)


def cut_apart(rng: random.Random, y: str, names: Sequence[str], sizes: Sequence[int]) -> str:
    """A line that cuts the last dimension of `y`, of three dimensions, apart."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    starts, targets, n = [0, *ends[:-1]], ", ".join(names), len(names)
    if n == 1:
        return f"{names[0]} = {y}"
    options = [
        f"{targets} = {y}.split({list(sizes)}, -1)",
        f"{targets} = torch.split_with_sizes({y}, {list(sizes)}, -1)",
        f"{targets} = {y}.tensor_split({ends[:-1]}, -1)",
        f"{targets} = torch.dsplit({y}, {ends[:-1]})",
        f"{targets} = " + ", ".join(f"{y}[..., {a}:{b}]" for a, b in zip(starts, ends, strict=True)),
        f"{targets} = " + ", ".join(f"{y}.narrow(-1, {a}, {size})" for a, size in zip(starts, sizes, strict=True)),
        f"{targets} = " + ", ".join(f"{y}.index_select(-1, torch.arange({a}, {b}))" for a, b in zip(starts, ends, strict=True)),
        f"{targets} = " + ", ".join(f"{y}[:, :, list(range({a}, {b}))]" for a, b in zip(starts, ends, strict=True)),
        f"{targets} = (t.mT for t in {y}.mT.split({list(sizes)}, 1))",
        f"{targets} = (t.movedim(0, -1) for t in {y}.movedim(-1, 0).split({list(sizes)}))",
        f"{targets} = (t.unflatten(0, ({BATCH}, -1)) for t in {y}.flatten(0, 1).split({list(sizes)}, 1))",
    ]
    if len(set(sizes)) == 1:
        options += [
            f"{targets} = {y}.chunk({n}, -1)",
            f"{targets} = torch.chunk({y}, {n}, dim=2)",
            f"{targets} = {y}.unflatten(-1, ({n}, -1)).unbind(-2)",
            f"{targets} = {y}.view({BATCH}, -1, {n}, {sizes[0]}).permute(2, 0, 1, 3)",
            f"{targets} = {y}.reshape({BATCH}, -1, {n}, {sizes[0]}).movedim(2, 0)",
            f"{targets} = rearrange({y}, 'b t (n d) -> n b t d', n={n})",
            f"{targets} = {y}.unfold(-1, {sizes[0]}, {sizes[0]}).unbind(2)",
            f"{targets} = {y}.split({sizes[0]}, -1)",
        ]
    return rng.choice(options)


def _heads(rng: random.Random, name: str, num: int, width: int, layout: str) -> str:
    """A line that makes [batch, tokens, heads, width] of a part."""
    if layout == "in turn":
        return f"{name} = " + rng.choice(
            [f"{name}.unflatten(-1, ({width}, {num})).mT", f"rearrange({name}, 'b t (d h) -> b t h d', h={num})"]
        )
    options = [
        f"{name}.unflatten(-1, ({num}, {width}))",
        f"{name}.reshape(*{name}.shape[:-1], {num}, {width})",
        f"rearrange({name}, 'b t (h d) -> b t h d', h={num})",
        f"torch.stack({name}.chunk({num}, -1), 2)",
        f"torch.stack([t.clone() for t in {name}.split({width}, -1)], -2)",
    ]
    return f"{name} = {rng.choice(options)}"


def _parts(rng: random.Random, of: str, num: dict[str, int], width: int, layout: str, groups: int) -> list[str]:
    """Lines that make of a product `y` its parts [batch, tokens, heads, width]."""
    names = list(of)
    if layout == "by groups" and len(of) > 1:
        sizes = [num[p] // groups * width for p in of]
        if len(set(sizes)) == 1 and sizes[0] == width and rng.random() < 0.5:
            n = len(of)
            return [f"{', '.join(of)} = " + rng.choice([f"y.unflatten(-1, ({groups}, {n}, {width})).unbind(-2)", f"rearrange(y, 'b t (h n d) -> n b t h d', n={n}, h={groups})"])]  # fmt: skip
        cuts = [f"y.unflatten(-1, ({groups}, -1)).split({sizes}, -1)"]
        ends = [0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))]
        cuts.append(
            "(" + ", ".join(f"y.unflatten(-1, ({groups}, -1))[..., {a}:{b}]" for a, b in zip(ends, ends[1:], strict=False)) + ")"
        )
        return [f"{', '.join(of)} = {rng.choice(cuts)}", *(f"{p} = {p}.unflatten(-1, (-1, {width})).flatten(2, 3)" for p in of)]
    if len({num[p] for p in of}) == 1 and layout == "blocks" and len(of) > 1 and rng.random() < 0.4:
        n, h = len(of), num[of[0]]
        return [f"{', '.join(of)} = " + rng.choice([
            f"y.unflatten(-1, ({n}, {h}, {width})).unbind(2)",
            f"y.view({BATCH}, {TOKENS}, {n}, {h}, {width}).permute(2, 0, 1, 3, 4)",
            f"y.unflatten(-1, ({n}, {h}, {width})).movedim(2, 0)",
            f"rearrange(y, 'b t (n h d) -> n b t h d', n={n}, h={h})",
        ])]  # fmt: skip
    return [cut_apart(rng, "y", names, [num[p] * width for p in of]), *(_heads(rng, p, num[p], width, layout) for p in of)]


def rows_of(lines: Sequence[str], names: Sequence[str], rows: int) -> dict[str, torch.Tensor]:
    """The numbers of rows, where the lines put them: of queries [heads, width]."""
    scope: dict[str, Any] = {"y": torch.arange(rows).expand(BATCH, TOKENS, rows).clone(), "torch": torch, "rearrange": rearrange}
    exec("\n".join(lines), scope)  # of this file's lines
    return {name: scope[name][0, 0] for name in names}


_ROTATED = ("", "", "rotated_halves", "rotated_pairs")
_NORMED = ("", "", "", "", "gains", "gains of heads", "temperature")


def attention(rng: random.Random, n: str, is_first: bool) -> Part:
    """An attention beside the residual stream."""
    heads, width = rng.choice((1, 2, 3, 4)), rng.choice((2, 4))
    groups = rng.choice([g for g in range(1, heads + 1) if heads % g == 0])
    num = {"q": heads, "k": groups, "v": groups}
    order = "".join(rng.sample("qkv", 3))
    fused = rng.choice((("qkv",), ("qkv",), ("q", "kv"), ("qk", "v"), ("q", "k", "v")))
    layout, normed = rng.choice(("blocks", "blocks", "by groups", "in turn")), rng.choice(_NORMED)
    init: list[str] = []
    forward, known, scaled, frozen, unscaled = [], [], [], set(), set()
    for i, some in enumerate(fused):
        of = "".join(p for p in order if p in some)
        rows = sum(num[p] for p in of) * width
        made, product, params, kind = projection(rng, f"{n}p{i}", rows, "h", is_first=is_first)
        lines = _parts(rng, of, num, width, layout, groups)
        of_each = {p: tuple(map(tuple, t.tolist())) for p, t in rows_of(lines, of, rows).items()}
        cuts = tuple(Cut(ROLES[p], tuple(sorted(sum(of_each[p], ()))), of_each[p]) for p in of)
        init += made
        forward += [f"y = {product}", *lines]
        for name, fields in params:
            is_small = name.endswith({"lora": "a.weight", "merged": "_a", "low rank": "_a"}.get(kind, "-"))
            its = {} if is_small else {"cuts": cuts}
            mass = (
                {}
                if is_small or fields["role"] not in ("matrix", "convolution") or fields.get("norm", "") == ""
                else {"mass": "attention"}
            )
            known.append((name, Known(**fields | its | mass)))
            if not is_small and fields["role"] != "gain" and fields.get("is_trained", True):
                axis = fields.get("axes", (0, 1))[0]
                scaled.append((name, axis, tuple((p, of_each[p]) for p in of if p != "v")))
        frozen |= set(some) if kind == "lora" else set()
        unscaled |= set(some) & set("qk") if kind in ("lora", "weight norm") else set()
    forward += ["q, k, v = (t.transpose(1, 2) for t in (q, k, v))"]
    gains: list[str] = []
    if normed.startswith("gains"):
        for p in "qk":
            shape = f"{num[p]}, 1, {width}" if normed == "gains of heads" else f"{width}"
            init.append(f"self.{n}{p}g = nn.Parameter(torch.rand({shape}) + 0.5)")
            forward.append(f"{p} = F.rms_norm({p}, ({width},)) * self.{n}{p}g")
            known.append((f"{n}{p}g", Known(role="gain", norm="entries", mass="")))
            gains.append(f"{n}{p}g")
    if normed == "temperature":
        init.append(f"self.{n}t = nn.Parameter(torch.rand({heads}, 1, 1) + 0.5)")
        forward.append("q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)")
        known.append((f"{n}t", Known(role="gain", norm="entries", mass="light")))
        gains.append(f"{n}t")
    if (rotate := rng.choice(_ROTATED)) and normed != "temperature":
        forward.append(f"q, k = {rotate}(q), {rotate}(k)")
    causal = rng.random() < 0.5
    forward += _multiplied(rng, n, heads, groups, width, causal, normed)
    init.append(f"self.{n}out = nn.Linear({heads * width}, {WIDTH}, bias=False)")
    known.append((f"{n}out.weight", Known("matrix", "matrix", mass="attention")))
    forward.append(f"x = x + self.{n}out(y)")
    attended = Attended(
        n,
        heads,
        groups,
        () if gains else tuple(scaled),
        tuple(gains),
        normed == "gains",
        not gains and {"q", "k"} <= frozen,
        tuple(sorted(unscaled)),
        not gains and "q" in frozen,
    )
    return Part(f"attention, {layout}, {normed or 'plain'}", tuple(init), tuple(forward), tuple(known), attended)


def _multiplied(rng: random.Random, n: str, heads: int, groups: int, width: int, causal: bool, normed: str) -> list[str]:
    """Lines that make `y` [batch, tokens, heads * width] of q, k and v [batch, heads, tokens, width]."""
    more, scale = heads // groups, round(width**-0.5, 6)
    if normed == "temperature":
        look = [f"self.look({n!r}, q * self.{n}t, k, 1.0, {causal})"]
        q = f"q * self.{n}t"
        lines = [f"q = {q}", f"k, v = (t.repeat_interleave({more}, 1) for t in (k, v))"]
        return [*look, *lines, *_masked("q @ k.mT", causal), "y = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)"]
    how = rng.choice(("sdpa", "sdpa", "grouped", "expanded", "by hand", "einsum", "keys scaled", "in groups"))
    look, end = f"self.look({n!r}, q, k, {scale}, {causal})", "y = y.transpose(1, 2).flatten(2)"
    repeat = f"k, v = (t.repeat_interleave({more}, 1) for t in (k, v))"
    if how == "grouped":
        return [look, f"y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}, scale={scale}, enable_gqa=True)", end]
    if how == "expanded":
        repeat = f"k, v = (t[:, :, None].expand(-1, -1, {more}, -1, -1).flatten(1, 2) for t in (k, v))"
    if how in ("sdpa", "expanded"):
        return [look, repeat, f"y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}, scale={scale})", end]
    if how == "in groups":
        product = f"(q.unflatten(1, ({groups}, {more})) @ k.unsqueeze(2).mT).flatten(1, 2) * {scale}"
        return [look, *_masked(product, causal), f"y = s.softmax(-1) @ v.repeat_interleave({more}, 1)", end]
    if how == "keys scaled":
        return [look, repeat, f"k = k * {scale}", *_masked("q @ k.transpose(-2, -1)", causal), "y = s.softmax(-1) @ v", end]
    if how == "einsum":
        product = f"torch.einsum('bhtd,bhsd->bhts', q, k) * {scale}"
        return [look, repeat, *_masked(product, causal), "y = torch.einsum('bhts,bhsd->bthd', s.softmax(-1), v).flatten(2)"]
    return [look, repeat, *_masked(f"q @ k.mT * {scale}", causal), "y = F.softmax(s, dim=-1) @ v", end]


def _masked(product: str, causal: bool) -> list[str]:
    mask = ["s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float('-inf'))"] if causal else []
    return [f"s = {product}", *mask]
