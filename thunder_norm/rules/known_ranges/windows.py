"""What is 0 outside an interval of x, entry by entry: indicators of intervals, and the splines that are made of them.

    bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
    bases = (x - left) / (middle - left) * bases[..., :-1] + (right - x) / (right - middle) * bases[..., 1:]

An affine function of x is as large as x; times what is 0 outside an interval it is as large as at an end of that.  Sums of such products are
0 outside the smallest interval that has all of theirs.

Source: de Boor 1972, "On calculating with B-splines" (the recursion); that it stays bounded holds for any ends
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from thunder_norm.core.context import current_environment
from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.local import is_local, is_within
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor, is_complex
from thunder_norm.op_names import op_key
from thunder_norm.rules._facts import Alternatives, Source, every_fact, fact, is_plain, moves_with, with_fact

_MOST_PARTS = 32  # of how many indicators; beyond, it is let go
T = TypeVar("T")
Known = dict["Lazy", Any]


@dataclass(frozen=True, eq=False)
class Lazy(Generic[T]):
    """What is computed where a rule asks for it, anew in each rule and once in each: of what one has computed another knows nothing."""

    compute: Callable[[Known], T]

    def __call__(self, known: Known) -> T:
        if self not in known:
            known[self] = self.compute(known)
        return known[self]


Ends = Lazy[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Window:
    """A fact: entries are 0 where x's entry beside them is not between two numbers, and where it is, a function of it.

    Attributes:
        x: the tensor, which broadcasts to the shape of this one.
        low: the least numbers, of the tensor's shape or one that broadcasts to it; None for none.
        high: the largest numbers.
        claims: how large an entry is at most, and how many times as far as x's it moves, 0-dim.
        parts: of how many indicators it is made.
        constants: the plain tensors that this is said of, and how often each had been written into.
    """

    x: Source
    low: Ends | None
    high: Ends | None
    claims: Lazy[tuple[torch.Tensor, torch.Tensor]]
    parts: int = 1
    constants: tuple[tuple[torch.Tensor, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Affine:
    """A fact: entries are an affine function of x's entries beside them, each one of its own."""

    x: Source
    at: Callable[[torch.Tensor], torch.Tensor]
    constants: tuple[tuple[torch.Tensor, int], ...] = ()


# -- indicators, which are plain tensors ----------------------------------------------------------------------------------

_indicators: WeakIdKeyDictionary = WeakIdKeyDictionary()  # how often each had been written into, and what it is


def _writes_into(t: torch.Tensor) -> int:
    return current_environment().writes_into(t)


def _as_now(constants: Iterable[torch.Tensor]) -> tuple[tuple[torch.Tensor, int], ...]:
    return tuple((t, _writes_into(t)) for t in constants)


def _are_as_they_were(of: Window | Affine) -> bool:
    return all(_writes_into(t) == writes for t, writes in of.constants)


def _union(a: Window | Affine, b: Window | Affine) -> tuple[tuple[torch.Tensor, int], ...]:
    """The constants of both."""
    known = {id(t) for t, _ in a.constants}
    return (*a.constants, *((t, writes) for t, writes in b.constants if id(t) not in known))


def _note(t: torch.Tensor, window: Window | None) -> None:
    if window is not None:
        _indicators[t] = _writes_into(t), window


def are_known() -> bool:
    """Whether there may be indicators."""
    return len(_indicators) > 0


def is_indicator(t: Any) -> bool:
    """Whether a plain tensor is known to be 0 outside an interval of another."""
    found = _indicators.get(t) if isinstance(t, torch.Tensor) else None
    return found is not None and found[0] == _writes_into(t)


def _window_of(t: Any) -> Window | None:
    """Of a plain indicator, also of one that is lifted, or of a normed tensor."""
    if isinstance(t, NormedTensor):
        found = fact(t, Window) or (_window_of(t.backing) if t._facts is None else None)
    else:
        found = _indicators[t][1] if is_indicator(t) else None
    return found if found is not None and _are_as_they_were(found) else None


def _is_constant(t: Any) -> bool:
    """Whether a plain tensor stays what it is, and is what its norm is of."""
    known = current_environment()
    return is_plain(t) and t.device.type != "meta" and not known.moves(t) and (known.is_constant(t) or known.is_measured(t))


def _compare(is_more: bool) -> Callable[[tuple, Mapping[str, Any], Any], None]:
    """Of ``a > b``, or ``a >= b``; or of ``a < b``: at an end that is one of neither it makes no difference."""

    def rule(args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
        if isinstance(out, NormedTensor) or not isinstance(out, torch.Tensor) or len(args) != 2:
            return
        a, b = args
        x, end = (a, b) if isinstance(a, NormedTensor) else (b, a)
        if not isinstance(x, RMSTensor) or is_complex(x) or not _is_constant(end):
            return
        is_low, ends = is_more is (x is a), Lazy(lambda _: end)
        low, high = (ends, None) if is_low else (None, ends)
        _note(out, Window(Source.of(x), low, high, Lazy(lambda _: _of_indicator(end)), constants=_as_now([end])))

    return rule


def _of_indicator(end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1, and what a comparison decides does not move."""
    return torch.ones((), dtype=torch.float64, device=end.device), torch.zeros((), dtype=torch.float64, device=end.device)


for _op in (torch.gt, torch.ge):
    normed_op(_op).register_condition(_compare(True))
for _op in (torch.lt, torch.le):
    normed_op(_op).register_condition(_compare(False))


def _end(f: Callable[..., torch.Tensor], a: Ends | None, b: Ends | None) -> Ends | None:
    """Of both, where both are known, else the one that is."""
    return a or b if a is None or b is None else Lazy(lambda known: f(a(known), b(known)))


def _both(a: Window | None, b: Window | None) -> Window | None:
    """Of the product of two indicators."""
    if a is None or b is None or not a.x.is_same(b.x):
        return None
    low, high = _end(torch.maximum, a.low, b.low), _end(torch.minimum, a.high, b.high)
    return Window(a.x, low, high, a.claims, constants=_union(a, b))


_CONJUNCTIONS = frozenset({"__and__", "bitwise_and", "logical_and", "mul"})
_SAME_ENTRIES = frozenset(
    {"to", "_to_copy", "float", "double", "type", "type_as", "convert_element_type", "clone", "contiguous", "detach"}
)


def follow(func: Callable, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
    """What an operation makes of indicators, all of which are plain."""
    if not args or not is_indicator(args[0]) or not isinstance(result, torch.Tensor):
        return
    key, of = op_key(func), _window_of(args[0])
    if key in _CONJUNCTIONS and len(args) == 2:
        _note(result, _both(of, _window_of(args[1])))
    elif key in _SAME_ENTRIES and result.shape == args[0].shape:
        _note(result, of)
    elif key == "getitem" and len(args) == 2:
        _note(result, _cut(of, args[1], args[0].shape, result.shape))


# -- of normed tensors ----------------------------------------------------------------------------------------------------


def _cut(w: Window | None, index: Any, shape: torch.Size, new: torch.Size) -> Window | None:
    """Of a part that slices cut along dimensions beside which x has one entry."""
    slices = index if isinstance(index, tuple) else (index,)
    if w is None or not all(i is Ellipsis or isinstance(i, slice) for i in slices) or len(shape) != len(new):
        return None
    own = (1,) * (len(shape) - w.x.backing.ndim) + tuple(w.x.backing.shape)
    if any(n != m and size != 1 for n, m, size in zip(shape, new, own, strict=True)):
        return None
    low, high = (None if end is None else _sliced(end, shape, index) for end in (w.low, w.high))
    return Window(w.x, low, high, w.claims, w.parts, w.constants)


def _sliced(end: Ends, shape: torch.Size, index: Any) -> Ends:
    return Lazy(lambda known: end(known).expand(shape)[index])


@normed_op(torch.Tensor.__getitem__).register_fact
def _(args: tuple, kwargs: Mapping[str, Any], out: NormedTensor) -> Any:
    if len(args) != 2 or not isinstance(args[0], NormedTensor):
        return out._facts
    return _with(out, _cut(fact(args[0], Window), args[1], args[0].shape, out.shape))


def _with(out: NormedTensor, found: Any) -> Any:
    return out._facts if found is None else Alternatives((*every_fact(out), found))


def _affine(op: Callable, places: tuple[int, ...]) -> Callable[[tuple, Mapping[str, Any], Any], None]:
    """Of an operation that is affine in the arguments at these places, where the others are constants."""

    def rule(args: tuple, kwargs: Mapping[str, Any], out: Any) -> None:
        moving = [i for i, t in enumerate(args) if isinstance(t, NormedTensor)]
        others = [t for t in args if isinstance(t, torch.Tensor) and not isinstance(t, NormedTensor)]
        if len(moving) != 1 or moving[0] not in places or not isinstance(x := args[moving[0]], RMSTensor) or is_complex(x):
            return
        before = fact(x, Affine)
        if not isinstance(out, RMSTensor) or not all(map(_is_constant, others)) or before is None and not others:
            return

        def at(t: torch.Tensor) -> torch.Tensor:
            entries = t if before is None else before.at(t)
            return op(*(entries if i in moving else other for i, other in enumerate(args)), **kwargs)

        of = Affine(Source.of(x), at, _as_now(others))
        out._facts = _with(out, of if before is None else Affine(before.x, at, _union(before, of)))

    return rule


for _op in (torch.add, torch.sub, torch.rsub, torch.mul):
    normed_op(_op).register_condition(_affine(_op, (0, 1)))
normed_op(torch.div).register_condition(_affine(torch.div, (0,)))


def _function_of(x: Source, t: Any) -> Affine | None:
    """What entries of t are, of those of x beside them, where that is affine."""
    if not isinstance(t, RMSTensor):
        return None
    if Source.of(t).is_same(x):
        return Affine(x, lambda entries: entries)
    found = fact(t, Affine)
    return found if found is not None and found.x.is_same(x) and _are_as_they_were(found) else None


def _product(f: Affine, w: Window) -> Window | None:
    """Of f(x) and what is 0 outside an interval: as large as there, and it moves with both."""
    low, high = w.low, w.high
    if low is None or high is None:
        return None

    def claims(known: Known) -> tuple[torch.Tensor, torch.Tensor]:
        largest, slope = w.claims(known)
        least, most = low(known), high(known)
        ends = f.at(least), f.at(most)
        of_entries = torch.maximum(ends[0].abs(), ends[1].abs())
        steepness = (ends[1] - ends[0]).abs() / (most - least)
        is_empty = most <= least  # where nothing is in the interval, the product is 0
        size, moves = (t.masked_fill(is_empty, 0.0).amax() for t in (of_entries, steepness))
        return size * largest, moves * largest + size * slope

    return Window(w.x, low, high, Lazy(claims), w.parts, _union(w, f))


def _sum(a: Window, b: Window) -> Window | None:
    """Of a sum: 0 outside the smallest interval that has both."""
    if a.low is None or b.low is None or a.high is None or b.high is None or a.parts + b.parts > _MOST_PARTS:
        return None

    def claims(known: Known) -> tuple[torch.Tensor, torch.Tensor]:
        (size, slope), (other_size, other_slope) = a.claims(known), b.claims(known)
        return size + other_size, slope + other_slope

    low, high = _end(torch.minimum, a.low, b.low), _end(torch.maximum, a.high, b.high)
    return Window(a.x, low, high, Lazy(claims), a.parts + b.parts, _union(a, b))


def _of_product(args: Mapping[str, Any]) -> Window | None:
    a, b = args["input"], args["other"]
    if is_within():
        return None
    for t, other in ((a, b), (b, a)):
        w = _window_of(other)
        f = None if w is None or is_local(w.x.moving()) else _function_of(w.x, t)
        if w is not None and f is not None:
            return _product(f, w)
    return None


def _of_sum(args: Mapping[str, Any]) -> Window | None:
    a, b = _window_of(args["input"]), _window_of(args["other"])
    if a is None or b is None or args.get("alpha", 1) != 1 or is_within() or is_local(a.x.moving()) or not a.x.is_same(b.x):
        return None
    return _sum(a, b) if args["input"].shape == args["other"].shape else None


def _result(found: Window | None) -> NormedTensor:
    assert found is not None, "as the condition says"
    largest, slope = (t.nan_to_num(nan=torch.inf) for t in found.claims({}))
    kind, n = found.x.kind, found.x.norm_size
    value = kind._wrap(None, largest.to(n.dtype), None, found.x.elem_dims)  # type: ignore[arg-type]
    return with_fact(moves_with(found.x, value, slope.to(n.dtype), "input", "other"), Alternatives((found,)))


@normed_op(torch.mul).register_norm(when=lambda args: _of_product(args) is not None)
def mul(input: RMSTensor, other: RMSTensor) -> NormedTensor:
    """f(x) w(x), f affine and w 0 outside an interval [a, b], entry by entry.

    Value:       max(|f(a)|, |f(b)|) |w|, over all entries
    Sensitivity: |f'| |w| + max(|f(a)|, |f(b)|) L, L that of w; what comparisons decide does not move
    Gap:         entries are bounded each by itself: splines of one x sum to 1
    """
    return _result(_of_product({"input": input, "other": other}))


@normed_op(torch.add).register_norm(when=lambda args: _of_sum(args) is not None)
def add(input: RMSTensor, other: RMSTensor, alpha: float = 1) -> NormedTensor:
    """Of two tensors that are 0 outside intervals of one x, entry by entry: their sums, of which intervals and how far they move.

    Value:       |a| + |b|
    Sensitivity: the sum of theirs
    Gap:         the two are nowhere largest at once
    """
    return _result(_of_sum({"input": input, "other": other, "alpha": alpha}))
