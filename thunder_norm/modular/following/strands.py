"""Which entries of which parameters the entries of a tensor come from.

A *strand* of a tensor is one parameter in it.  Its labels say, for each entry of the tensor, which index along an axis of the parameter it
has: of ``y = x W^T`` the entry ``y[..., i]`` has index i along W's axis 0.  Where parts of a tensor were added (a rotary embedding adds two
entries of a head), an entry has several.  Labels are tensors of the tensor's shape, mostly expanded ones, so they take little memory, and
whatever moves the tensor's entries moves them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Literal

import torch

Labels = dict[int, torch.Tensor]
Kind = Literal["weight", "table", "bias", "gain", "itself"]
NOTHING = -1  # the label of an entry that is not of the parameter
MOST = 8  # strands of an entry, and labels of a strand: sums of more are not followed


class Scale(IntEnum):
    """What multiplies a tensor by c if it is multiplied by c; of what several tensors make it is the least of theirs."""

    NOTHING = 0
    GAINS = 1  # in some of its entries: of what was normalized, or is another function of products, the gains that it met since
    PRODUCTS = 2  # weights, tables and biases


@dataclass(frozen=True)
class Made:
    """What a program makes of a parameter w, entry by entry, before all else: ``min(w + offset, cap)``, or the exponential of that.

    A temperature is often the exponential of a parameter, with a cap (Swin v2).
    """

    offset: float = 0.0
    cap: float = math.inf
    is_exponential: bool = False

    @property
    def is_sum(self) -> bool:
        """Whether there is nothing but a number added."""
        return math.isfinite(self.offset) and self.cap == math.inf and not self.is_exponential

    def multiplied(self, w: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The parameter of which what is made is `factor` times as large, 0 < factor <= 1: no cap, which is not negative, is in the way."""
        if not self.offset and self.cap == math.inf and not self.is_exponential:
            return w * factor
        made = (w.double() + self.offset).clamp(max=self.cap)
        return (made + factor.log() if self.is_exponential else made * factor) - self.offset


@dataclass(frozen=True, eq=False)
class Strand:
    """One parameter in a tensor.

    Attributes:
        name: the parameter.
        kind: how it came in: multiplied with activations, looked up, added to them, multiplied entry by entry, or it is the tensor.
        labels: for each term of an entry, axis of the parameter -> index.
        scales: whether it is one of those that multiply the tensor if they are multiplied (see `Scale`).
        made: what the program makes of the parameter before all else (``1 + w``): that is what is multiplied.
        multiple: of kind itself, how many times that the tensor is; NaN if it is not known.
        instead_of: parameters that scale the tensor, in place of which this one may: the other factors of a product.
    """

    name: str
    kind: Kind
    labels: tuple[Labels, ...]
    scales: bool = True
    made: Made = Made()
    multiple: float = 1.0
    instead_of: frozenset[str] = frozenset()

    @property
    def identity(self) -> tuple[str, Kind, bool, Made, frozenset[str]]:
        """What strands that are one in a sum of tensors, or in tensors put beside each other, have in common."""
        return self.name, self.kind, self.scales, self.made, self.instead_of

    @property
    def axes(self) -> frozenset[int]:
        """The axes of the parameter that the tensor still has."""
        return frozenset().union(*self.labels) if self.labels else frozenset()

    @property
    def is_there(self) -> bool:
        """Whether any entry of the tensor is of the parameter, or the tensor has none."""
        there = self.entries
        return not there.numel() or bool(there.any())

    @property
    def entries(self) -> torch.Tensor:
        """Which entries of the tensor are of the parameter: a mask, without the dimensions along which that is one answer."""
        of_each = [varying(next(iter(of.values()))) >= 0 if of else torch.ones((), dtype=torch.bool) for of in self.labels]
        found = torch.zeros((), dtype=torch.bool)
        for of in of_each:
            found = found | of
        return found

    def mapped(self, f: Callable[[torch.Tensor], torch.Tensor]) -> Strand:
        """The strand with every label moved."""
        return replace(self, labels=tuple({axis: f(t) for axis, t in of_term.items()} for of_term in self.labels))

    def rows(self, axis: int, size: int) -> torch.Tensor:
        """Which of the indices along an axis occur, a mask."""
        found = torch.zeros(size, dtype=torch.bool)
        for of_term in self.labels:
            label = varying(of_term[axis])
            found[label[label >= 0].long()] = True
        return found


@dataclass(eq=False)
class Use:
    """What one operation takes of a parameter's product, or of the parameter.

    Attributes:
        name: the parameter.
        op: the operation, or what it is for: "query", "key", "value", "gate", "gated", "output", "loss", ...
        kind: how the parameter came in.
        rows: axis -> which indices along it are taken.
        heads: of an attention, for each head its indices along the one axis, in order: [heads, entries]; None if they are not one axis'.
        is_sole: whether no other parameter's product was added.
    """

    name: str
    op: str
    kind: Kind
    rows: dict[int, torch.Tensor]
    heads: torch.Tensor | None = None
    is_sole: bool = True


@dataclass(frozen=True, eq=False)
class Product:
    """A product of queries and keys.

    Attributes:
        query: what the queries [n, tokens, d] are.
        key: what the keys [n, tokens, d] are.
        uses: those of the queries and of the keys.
        shape: (n, tokens, d), the tokens of the queries, or of the keys if rows are these.
        is_of_keys: whether rows of scores are counted by keys, as heads are among these alone.
        others: how many rows of the other side each n has: keys, or queries if rows are those of keys.
    """

    query: Followed
    key: Followed
    uses: tuple[list[Use], list[Use]]
    shape: tuple[int, int, int]
    is_of_keys: bool = False
    others: int = 1


@dataclass(frozen=True, eq=False)
class Score:
    """Products of queries and keys, on their way to a softmax; and its result.

    Attributes:
        products: the terms (latent attention may add two).
        ids: of each term, for each entry the number of its row: ``n * tokens + token``; NOTHING where there is no such term.
        raw: their sum, times constants alone.
        is_raw: whether the tensor is that itself.
        attention: the number of the attention whose softmax has been; None before that.
        num_mixed: how many heads a matrix made of all that the products have (talking heads), whose numbers `ids` are then; 0 if none did.
        problem: why it is not known any more which head an entry is of, if so.
        is_stretched: whether a function that makes large ones larger was taken of them, so that logits are not at most these products.
    """

    products: tuple[Product, ...]
    ids: tuple[torch.Tensor, ...]
    raw: torch.Tensor
    is_raw: bool = True
    attention: int | None = None
    num_mixed: int = 0
    problem: str = ""
    is_stretched: bool = False

    @property
    def is_probability(self) -> bool:
        """Whether the softmax has been."""
        return self.attention is not None


@dataclass(frozen=True, eq=False)
class Pair:
    """Two activations that were multiplied entry by entry; a sum along a dimension may make scores of them, or sum values.

    Attributes:
        states: of each.
        varies: of each whether it has more than one entry along each dimension of the product.
        uses: of each.
    """

    states: tuple[Followed, Followed]
    varies: tuple[tuple[bool, ...], tuple[bool, ...]]
    uses: tuple[list[Use], list[Use]]


@dataclass(frozen=True, eq=False)
class Followed:
    """What is known of a tensor that depends on parameters or inputs.

    Attributes:
        strands: the parameters in it; none if it was mixed from many.
        scale: what multiplies it if it is multiplied, among the strands that say that they do.
        is_parameter: whether it was made from parameters and constants alone.
        score: if it is the scores of an attention.
        is_attended: whether it is what an attention returns, its probabilities times values, or that times other numbers (gates).
        is_looked_up: whether it was made from rows of tables, parameters and constants alone: no other activation is in it.
        pair: of what it is the product entry by entry, if it is nothing else.
        reduced: the uses by which entries of products were lost in it, entry by entry and by sums: if it is a number that the program returns,
            that is a loss, and these are what it takes.
    """

    strands: tuple[Strand, ...] = ()
    scale: Scale = Scale.NOTHING
    is_parameter: bool = False
    score: Score | None = None
    is_attended: bool = False
    is_looked_up: bool = False
    pair: Pair | None = None
    reduced: frozenset[Use] = frozenset()

    def mapped(self, f: Callable[[torch.Tensor], torch.Tensor], raw: torch.Tensor | None = None) -> Followed:
        """The state of the tensor that `f` moves the entries into."""
        score = self.score
        if score is not None and not score.problem:
            moved = f(score.raw) if raw is None or not score.is_raw else raw
            score = replace(score, ids=tuple(map(f, score.ids)), raw=moved)
        strands = tuple(s.mapped(f) for s in self.strands)
        if len(strands) > 1:  # of what was joined a part may have nothing of some
            strands = tuple(s for s in strands if s.is_there)
        return replace(self, strands=strands, score=score, pair=None)

    def with_strands(self, **changes: Any) -> Followed:
        """The state with something else said of every strand."""
        return replace(self, strands=tuple(replace(s, **changes) for s in self.strands))

    def without(self, names: Iterable[str]) -> Followed:
        """The state without some parameters."""
        dropped = set(names)
        return replace(self, strands=tuple(s for s in self.strands if s.name not in dropped))


def reduced(states: Iterable[Followed], uses: Iterable[Use] = ()) -> frozenset[Use]:
    """What was lost in several tensors, with some uses of their products."""
    return frozenset(u for u in uses if u.kind == "weight").union(*(state.reduced for state in states))


def of_parameter(name: str, shape: Sequence[int]) -> Followed:
    """The state of a parameter."""
    labels = {
        axis: torch.arange(n, dtype=torch.int32).view([-1 if d == axis else 1 for d in range(len(shape))]).expand(list(shape))
        for axis, n in enumerate(shape)
    }
    return Followed((Strand(name, "itself", (labels,)),), Scale.PRODUCTS, True)


def varying(label: torch.Tensor) -> torch.Tensor:
    """A label without the dimensions along which it is expanded."""
    for d in range(label.ndim):
        if label.shape[d] > 1 and label.stride(d) == 0:
            label = label.narrow(d, 0, 1)
    return label


def is_constant_along(label: torch.Tensor, dim: int) -> bool:
    """Whether a label is the same for all indices of a dimension."""
    if label.shape[dim] < 2 or label.stride(dim) == 0:
        return True
    label = varying(label)
    return bool((label == label.narrow(dim, 0, 1)).all())


def added(states: Sequence[Followed]) -> tuple[Strand, ...]:
    """The strands of a sum: those of one parameter become one with more terms."""
    found: dict[Any, Strand] = {}
    for strand in (s for state in states for s in state.strands):
        key = *strand.identity, strand.axes
        own = found.get(key)
        found[key] = strand if own is None else replace(own, labels=_distinct((*own.labels, *strand.labels)), multiple=math.nan)
    return tuple(found.values())


def _distinct(labels: Sequence[Labels]) -> tuple[Labels, ...]:
    found: list[Labels] = []
    for one in labels:
        if not any(_equal(one, other) for other in found):
            found.append(one)
    return tuple(found)


def _equal(one: Labels, other: Labels) -> bool:
    return one.keys() == other.keys() and all(torch.equal(varying(t), varying(other[axis])) for axis, t in one.items())


def joined(
    states: Sequence[Followed | None], shapes: Sequence[torch.Size], put: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[Strand, ...]:
    """The strands of tensors put one beside the other; `put` does that with labels, all of as many dimensions."""
    found: dict[Any, list[Strand | None]] = {}
    for i, state in enumerate(states):
        for strand in () if state is None else state.strands:
            found.setdefault(strand.identity, [None] * len(states))[i] = strand
    return tuple(_beside(strands, shapes, put) for strands in found.values())


def _beside(strands: Sequence[Strand | None], shapes: Sequence[torch.Size], put: Callable) -> Strand:
    some = [s for s in strands if s is not None]
    axes = frozenset.intersection(*(s.axes for s in some))
    terms = []
    for term in range(max(len(s.labels) for s in some)):
        terms.append(
            {axis: put([_label(s, term, axis, shape) for s, shape in zip(strands, shapes, strict=True)]) for axis in axes}
        )
    return replace(some[0], labels=tuple(terms))


def _label(strand: Strand | None, term: int, axis: int, shape: torch.Size) -> torch.Tensor:
    if strand is None or term >= len(strand.labels):
        return torch.full((), NOTHING, dtype=torch.int32).expand(shape)
    return strand.labels[term][axis]


def survived(
    state: Followed, kind: Kind, dims: Sequence[int], moved: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Strand, ...]:
    """The strands of what a tensor made of parameters is contracted to: axes that run along `dims` are gone, labels of others moved."""
    found = []
    for strand in state.strands:
        terms = tuple(
            {a: moved(_there(t)) for a, t in labels.items() if all(is_constant_along(t, d) for d in dims)}
            for labels in strand.labels
        )
        found.append(replace(strand, kind=kind if strand.kind == "itself" else strand.kind, labels=terms, multiple=math.nan))
    return tuple(found)


def _there(label: torch.Tensor) -> torch.Tensor:
    """A label that has a first index along every dimension: that of nothing, along those of size 0."""
    return label if label.numel() else torch.full((), NOTHING, dtype=torch.int32).expand([max(n, 1) for n in label.shape])


def used(state: Followed, op: str, shapes: Mapping[str, torch.Size]) -> list[Use]:
    """The uses that an operation makes of what is in a tensor."""
    products = [s.entries for s in state.strands if s.kind in ("weight", "table")]
    is_sole = len(products) <= 1 or most_at_once(products) <= 1
    return [
        Use(s.name, op, s.kind, {axis: s.rows(axis, shapes[s.name][axis]) for axis in s.axes}, is_sole=is_sole)
        for s in state.strands
    ]


def most_at_once(entries: Sequence[torch.Tensor]) -> int:
    """In how many of several masks an entry is at most."""
    count = torch.zeros((), dtype=torch.int32)
    for mask in entries:
        count = count + mask
    return int(count.max()) if count.numel() else 0


def head_rows(at: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Different sets of indices: for each, in order of their first, all that are there; of terms [n, entries] with -1 for none.

    None if there are no terms, or sets of different sizes.
    """
    if not at:
        return None
    found = {tuple(sorted({i for i in of_n if i >= 0})) for of_n in torch.unique(torch.cat(list(at), 1), dim=0).tolist()}
    found.discard(())  # heads of other parameters, which stand beside those of this one
    return torch.tensor(sorted(found)) if len({len(rows) for rows in found}) == 1 else None


Written = tuple[int, torch.Size, tuple[int, ...], Followed]
"""Offset, shape and strides of a part of a memory that was written, and what is there now."""


def in_memory(
    t: torch.Tensor, nothing: float, parts: Sequence[tuple[int, Sequence[int], Sequence[int], torch.Tensor]], out: torch.Tensor
) -> torch.Tensor:
    """Labels (or scores) of `out`, a tensor of the memory of t, of which parts, by offset, shape and strides, have them; `nothing` elsewhere."""
    dtype, device = parts[0][3].dtype, parts[0][3].device
    whole = torch.full((t.untyped_storage().nbytes() // t.element_size(),), nothing, dtype=dtype, device=device)
    for offset, shape, stride, label in parts:
        whole.as_strided(shape, stride, offset).copy_(label)
    return whole.as_strided(out.shape, out.stride(), out.storage_offset())


def assembled(t: torch.Tensor, written: Sequence[Written]) -> Followed:
    """What is known of a tensor from the parts of its memory that were written one by one."""
    of_each: dict[Any, list[tuple[int, Sequence[int], Sequence[int], torch.Tensor]]] = {}
    for offset, shape, stride, state in written:
        for strand in state.strands:
            for term, labels in enumerate(strand.labels):
                for axis, label in labels.items():
                    of_each.setdefault((strand.identity, term, axis), []).append((offset, shape, stride, label))
    terms: dict[Any, dict[int, Labels]] = {}
    for (identity, term, axis), parts in of_each.items():
        terms.setdefault(identity, {}).setdefault(term, {})[axis] = in_memory(t, NOTHING, parts, t)
    strands = tuple(
        Strand(name, kind, tuple(of_terms.values()), scales, made, math.nan, instead_of)
        for (name, kind, scales, made, instead_of), of_terms in terms.items()
    )
    is_all = sum(shape.numel() for _, shape, _, _ in written) >= t.numel()
    states = [state for *_, state in written]
    scale, is_attended = min(s.scale for s in states) if is_all else Scale.NOTHING, all(s.is_attended for s in states)
    return Followed(strands, scale, all(s.is_parameter for s in states), _written_scores(t, written), is_attended)


def _written_scores(t: torch.Tensor, written: Sequence[Written]) -> Score | None:
    """Scores that were written into parts of a memory (windows of one that slides); what else was written there is none."""
    scores = [state.score for *_, state in written if state.score is not None]
    if not scores:
        return None
    first = scores[0]
    if any(s.problem or s.num_mixed or s.is_probability != first.is_probability for s in scores):
        return replace(
            first, problem=next((s.problem for s in scores if s.problem), "") or "mixed scores are written beside others"
        )
    products = tuple({id(product): product for score in scores for product in score.products}.values())

    def ids(product: Product) -> torch.Tensor:
        none = torch.full((), NOTHING, dtype=torch.int32)
        return in_memory(t, NOTHING, [(*at, _ids_of(state.score, product, none).expand(at[1])) for *at, state in written], t)

    is_raw = len(scores) == len(written) and all(score.is_raw for score in scores)
    raw = t if is_raw else in_memory(t, -math.inf, [(*at, state.score.raw) for *at, state in written if state.score], t)
    return replace(first, products=products, ids=tuple(map(ids, products)), raw=raw, is_raw=is_raw)


def _ids_of(score: Score | None, product: Product, none: torch.Tensor) -> torch.Tensor:
    own = () if score is None else zip(score.products, score.ids, strict=True)
    return next((ids for of, ids in own if of is product), none)
