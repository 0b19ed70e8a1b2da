"""Operations that move entries: labels are moved alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.modular.following.notes import Call, Meeting, Notes
from thunder_norm.modular.following.strands import (
    NOTHING,
    Followed,
    Labels,
    Scale,
    Score,
    Strand,
    Use,
    added,
    in_memory,
    is_constant_along,
    joined,
    reduced,
)

MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias permute transpose t expand squeeze unsqueeze slice select split unsafe_split "
    "split_with_sizes unsafe_split_with_sizes unbind alias detach clone _to_copy contiguous lift_fresh unfold diagonal flip roll "
    "repeat movedim repeat_interleave _conj resolve_conj native_dropout".split()
)
_STAYS = frozenset("clone _to_copy contiguous alias detach lift_fresh _conj resolve_conj native_dropout".split())
_RESHAPES = frozenset("view _unsafe_view reshape _reshape_alias".split())


def move(notes: Notes, call: Call) -> None:
    """One tensor's entries go elsewhere: a view, a part, a copy, several parts."""
    state = call.state(call.args[0])
    if state is None:
        return
    several = isinstance(call.out, list | tuple) and call.name != "native_dropout"
    outs: Any = call.out if several else [call.out[0] if call.name == "native_dropout" else call.out]
    for i, out in enumerate(outs):
        notes.note(out, state.mapped(lambda t, i=i, out=out: _moved(call, t, i if several else None, out.shape), raw=out))


def _moved(call: Call, label: torch.Tensor, i: int | None, shape: torch.Size) -> torch.Tensor:
    if call.name in _STAYS:
        return label
    if call.name in _RESHAPES:
        return label.reshape(shape)
    moved = call.func(label, *call.args[1:], **call.kwargs)
    return moved if i is None else moved[i]


def join(notes: Notes, call: Call) -> None:
    """Tensors become one, one beside the other (`cat`, `stack`)."""
    tensors = [t for t in call.args[0] if t.shape != (0,) or call.name == "stack"]
    states = [call.state(t) for t in tensors]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    put = torch.cat if call.name == "cat" else torch.stack
    known = [state for state in states if state is not None]
    strands = joined(states, [t.shape for t in tensors], lambda labels: _beside(call.name == "stack", labels, dim))
    is_parameter = all(state is None or state.is_parameter for state in states)
    is_scaled = all(_is_zero(t) for t, state in zip(tensors, states, strict=True) if state is None)
    scale = min((state.scale for state in known), default=Scale.NOTHING) if is_scaled else Scale.NOTHING
    score = _joined_scores(call, tensors, states, lambda some: put(list(some), dim))
    is_attended = bool(known) and all(state.is_attended for state in known)
    is_looked_up = not is_parameter and all(state.is_parameter or state.is_looked_up for state in known)
    lost = reduced(known)
    notes.note(call.out, Followed(strands, scale, is_parameter, score, is_attended, is_looked_up, reduced=lost))


def _beside(is_stacked: bool, labels: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Labels of tensors as those of what they are joined to; expanded where all of them are: many tensors would take much memory."""
    ndim = labels[0].ndim
    others = range(ndim) if is_stacked else [d for d in range(ndim) if d != dim % ndim]
    shape = list(labels[0].shape)
    for d in others:
        if all(t.stride(d) == 0 for t in labels):
            labels = [t.narrow(d, 0, min(1, shape[d])) for t in labels]
    found = torch.stack(list(labels), dim) if is_stacked else torch.cat(list(labels), dim)
    if is_stacked:
        shape.insert(dim % (ndim + 1), len(labels))
    else:
        shape[dim % ndim] = found.shape[dim]
    return found.expand(shape)


def _is_zero(t: torch.Tensor) -> bool:
    """Whether a constant is known to be 0."""
    return not t.is_meta and not bool(t.any())


def _joined_scores(call: Call, tensors: Sequence[torch.Tensor], states: Sequence[Followed | None], put: Callable) -> Score | None:
    """Scores of heads beside each other; or with others, which count for nothing: sinks, the zeros of a relative shift."""
    scores = [None if state is None else state.score for state in states]
    own = [score for score in scores if score is not None]
    if not own:
        return None
    if any(score.problem or score.is_probability or score.num_mixed for score in own):
        return replace(own[0], problem=own[0].problem or "what a matrix mixes, or a softmax has made, is joined with others")
    is_zero = all(_is_zero(t) for t, score in zip(tensors, scores, strict=True) if score is None)
    is_raw = is_zero and all(score.is_raw for score in own)
    nothing = [torch.full((), NOTHING, dtype=torch.int32).expand(t.shape) for t in tensors]
    ids = tuple(
        put([ids if other is score else none for other, none in zip(scores, nothing, strict=True)])
        for score in own
        for ids in score.ids
    )
    less = [
        t.new_full((), -torch.inf).expand(t.shape) if score is None else score.raw
        for t, score in zip(tensors, scores, strict=True)
    ]
    products = tuple(product for score in own for product in score.products)
    return replace(own[0], products=products, ids=ids, raw=call.out if is_raw else put(less), is_raw=is_raw)


def _chosen(call: Call, has_values: bool) -> tuple[list[int], Callable[[torch.Tensor], torch.Tensor]] | None:
    """The dimensions that integers of a tensor choose from, and the choice: with zeros in their place, if their values are not known.

    None of masks.
    """

    def known(i: torch.Tensor) -> torch.Tensor:
        return i.cpu().long() if has_values else torch.zeros(i.shape, dtype=torch.long)

    if call.name == "index_select":
        dim = call.args[1] % call.args[0].ndim
        return [dim], lambda label: label.index_select(dim, known(call.args[2]))
    indices = call.args[1]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    dims = [d for d, i in enumerate(indices) if i is not None]
    return dims, lambda label: torch.ops.aten.index.Tensor(label, [None if i is None else known(i) for i in indices])


def look_up(notes: Notes, call: Call) -> None:
    """Entries along dimensions are chosen by integers: what labels do not differ along these is known of what is chosen.

    Of a parameter it is a table that is looked up, or, of one with three dimensions, a stack of matrices.  Integers that a program writes
    out have values without data too.
    """
    state = call.state(call.args[0])
    indices = call.args[2:3] if call.name == "index_select" else call.args[1]
    has_values = state is not None and not state.is_parameter and not any(i is not None and i.is_meta for i in indices)
    found = None if state is None else _chosen(call, has_values)
    if state is None or found is None:
        return mix(notes, call)
    dims, chosen = found
    if state.score is not None and has_values:
        return notes.note(call.out, state.mapped(chosen, raw=call.out))
    _choose(notes, call, state, dims, chosen, has_values)


def _choose(notes: Notes, call: Call, state: Followed, dims: Sequence[int], chosen: Callable, has_values: bool = False) -> None:
    """Note what is chosen along dimensions of a parameter or an activation."""
    indices = [t for t in call.tensors[1:]]
    is_table = state.is_parameter and call.args[0].ndim < 3
    kept: list[Strand] = []
    lost: list[Use] = []
    for strand in state.strands:
        terms = tuple(
            {a: chosen(t) for a, t in labels.items() if has_values or all(is_constant_along(t, d) for d in dims)}
            for labels in strand.labels
        )
        moved = replace(strand, labels=terms)
        if is_table:
            is_at_places = all(notes.is_constant(i) for i, _ in indices)
            notes.meet(Followed((strand,)), Meeting("table", is_at_places=is_at_places))
            moved = replace(moved, kind="table") if strand.kind == "itself" else moved
        elif moved.axes != strand.axes and not state.is_parameter:
            lost += notes.use(Followed((strand,)), call.name)
        kept.append(moved)
    is_parameter = state.is_parameter and not is_table
    strands = tuple(s for s, before in zip(kept, state.strands, strict=True) if s.axes or is_table or not before.axes)
    scale = state.scale if len(strands) == len(kept) else Scale.NOTHING
    is_looked_up = is_table or state.is_looked_up
    notes.note(call.out, Followed(strands, scale, is_parameter, is_looked_up=is_looked_up, reduced=reduced([state], lost)))


def gather(notes: Notes, call: Call) -> None:
    """Entries that are chosen one by one along a dimension: rows of a table, scores (relative positions), anything else as by integers."""
    state, score = call.state(call.args[0]), None
    is_unknown = state is None or call.args[2].is_meta and not call.args[0].is_meta and state.score is not None
    if is_unknown or not call.args[0].ndim or not call.args[2].ndim or state.is_parameter and call.args[0].ndim > 2:
        return mix(notes, call)
    dim, index = call.args[1] % call.args[0].ndim, call.args[2]
    if state.score is not None:
        places = torch.zeros(index.shape, dtype=torch.long) if index.is_meta else index.cpu()
        score = replace(state, strands=()).mapped(lambda t: t.gather(dim, places.to(t.device)), raw=call.out).score
    _choose(notes, call, state, [dim], lambda label: _first_along(label, dim, index.shape))
    chosen = notes.state(call.out)
    if score is not None and chosen is not None:
        notes.note(call.out, replace(chosen, score=score))


def _first_along(label: torch.Tensor, dim: int, shape: torch.Size) -> torch.Tensor:
    """A label that is the same along a dimension as one of what is gathered along it, of a part of the other dimensions."""
    for d, size in enumerate(shape):
        label = label.narrow(d, 0, 1 if d == dim else size)
    return label.expand(shape)


def triangle(notes: Notes, call: Call) -> None:
    """Scores on one side of a diagonal alone, others 0."""
    state = call.state(call.args[0])
    if state is None or state.score is None or state.score.problem:
        return mix(notes, call)
    raw = call.out if state.score.is_raw else call.func(state.score.raw, *call.args[1:])
    notes.note(call.out, replace(state, score=replace(state.score, raw=raw)))


def pad(notes: Notes, call: Call) -> None:
    """Entries of no parameter around a tensor; scores among which others stand that are none are no more products alone."""
    state = call.state(call.args[0])
    if state is not None:
        is_zero = (call.args[2] if len(call.args) > 2 else 0) == 0
        moved = state.mapped(lambda t: torch.constant_pad_nd(t, call.args[1], NOTHING), raw=call.out)
        score = moved.score and replace(moved.score, is_raw=moved.score.is_raw and is_zero)
        notes.note(call.out, replace(moved, scale=state.scale if is_zero else Scale.NOTHING, score=score))


def stride(notes: Notes, call: Call) -> None:
    """A part of a tensor's memory, in which entries may stand several times (chunks that overlap)."""
    t, out = call.args[0], call.out
    state = call.state(t)
    if state is None:
        return

    def moved(label: torch.Tensor) -> torch.Tensor:
        return in_memory(t, NOTHING, [(t.storage_offset(), t.shape, t.stride(), label)], out)

    notes.note(out, state.mapped(moved, raw=out))


def as_complex(notes: Notes, call: Call) -> None:
    """Two entries become a complex one."""
    state = call.state(call.args[0])
    if state is not None:
        strands = tuple(
            replace(s, labels=tuple({a: t.select(-1, i) for a, t in labels.items()} for labels in s.labels for i in (0, 1)))
            for s in state.strands
        )
        notes.note(call.out, Followed(strands, state.scale, state.is_parameter))


def as_real(notes: Notes, call: Call) -> None:
    """A complex entry becomes two."""
    state = call.state(call.args[0])
    if state is not None:
        notes.note(call.out, replace(state.mapped(lambda t: t.unsqueeze(-1).expand(call.out.shape)), score=None))


def write(notes: Notes, call: Call) -> None:
    """A tensor is written into another (`copy_`): where that is of the same parameters it stays what it is."""
    into, source = call.state(call.args[0]), call.state(call.args[1])
    own = {s.name for s in into.strands} if into is not None else set()
    if source is not None and own and not notes.is_written(call.out):
        notes.use(source.without(own), "copy")
    elif source is not None:
        shape = call.out.shape
        notes.write(call.out, source.mapped(lambda t: t.expand(shape) if t.ndim <= len(shape) else t.reshape(shape)))


def put(notes: Notes, call: Call) -> None:
    """Slices along a dimension are put into a tensor, or added to it, at places that integers say: what does not differ along it stays.

    So experts' results go back to their tokens.
    """
    into, dim, _, source = call.args[:4]
    own, state = call.state(into), call.state(source)
    if state is None or state.is_parameter:
        return mix(notes, call)
    dim %= max(into.ndim, 1)

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.narrow(dim, 0, 1).expand(call.out.shape)

    kept = tuple(
        replace(s, labels=tuple({a: moved(t) for a, t in labels.items() if is_constant_along(t, dim)} for labels in s.labels))
        for s in state.strands
        if source.shape[dim]
    )
    for before, after in zip(state.strands, kept, strict=False):
        if before.axes != after.axes:
            notes.use(Followed((before,)), call.name)
    scale = state.scale if _is_zero(into) else Scale.NOTHING
    spread = replace(state, strands=tuple(s for s in kept if s.axes), scale=scale, score=None)
    notes.note(
        call.out, spread if own is None else replace(spread, strands=added([own, spread]), scale=min(own.scale, state.scale))
    )


def put_at(notes: Notes, call: Call) -> None:
    """Entries are put where integers or masks say: rows of a tensor among constants, or constants into a tensor."""
    into, indices, source = call.args[:3]
    own, state = call.state(into), call.state(source)
    if own is not None and not own.is_parameter and state is None:
        scale = own.scale if _is_zero(source) else Scale.NOTHING
        return notes.note(call.out, replace(own, scale=scale, score=own.score and replace(own.score, is_raw=False)))
    is_leading = all(i is not None for i in indices)
    num_rest = into.ndim - sum(i.ndim if i.dtype in (torch.bool, torch.uint8) else 1 for i in indices) if is_leading else 0
    is_put = own is None and state is not None and not state.is_parameter and state.score is None
    if not is_put or not is_leading or not source.numel() or source.ndim < num_rest or call.args[3:] == (True,):
        return mix(notes, call)
    rows = range(source.ndim - num_rest)
    of_rows = [s for s in state.strands if all(is_constant_along(t, d) for of in s.labels for t in of.values() for d in rows)]
    lost = state.without(s.name for s in of_rows)
    if lost.strands:
        notes.use(lost, call.name)
    kept = replace(state, strands=tuple(of_rows)).mapped(lambda t: t[(0,) * len(rows)].expand(into.shape))
    is_zero = not into.is_meta and _is_zero(
        call.out.index_put(indices, call.out.new_zeros(()))
    )  # `into` has changed by now, if in place
    notes.note(call.out, replace(kept, scale=state.scale if is_zero and not lost.strands else Scale.NOTHING))


def mix(notes: Notes, call: Call) -> None:
    """Any other operation: a use of all that it takes, and what it returns has no entries of theirs.

    Of parameters alone it makes a parameter (positions that are interpolated, an orthogonal matrix of one that is not): what takes that
    takes them.
    """
    lost = reduced(call.states, [use for state in call.states for use in notes.use(state, call.name)])
    is_parameter = all(state.is_parameter for state in call.states)
    names = dict.fromkeys(s.name for state in call.states for s in state.strands if s.kind == "itself") if is_parameter else ()
    strands = tuple(Strand(name, "itself", ({},)) for name in names)
    for out in call.out if isinstance(call.out, list | tuple) else (call.out,):
        if isinstance(out, torch.Tensor) and (out.is_floating_point() or out.is_complex()):
            notes.note(out, Followed(strands, is_parameter=is_parameter, reduced=lost))


def reduce(notes: Notes, call: Call) -> None:
    """Sums, means and extremes along dimensions, which are multiplied as what they take: what labels do not differ along these stays.

    Of the two places that a rotation sums both are terms.
    """
    state = call.state(call.args[0])
    out = call.out if isinstance(call.out, torch.Tensor) else call.out[0]  # of extremes the places come second
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    ndim = call.args[0].ndim
    if state is None or state.is_parameter or given is None or not out.is_floating_point():
        return mix(notes, call)
    dims = [d % ndim for d in (given if isinstance(given, list | tuple) else [given])] or list(range(ndim))
    kept: list[Strand] = []
    lost: list[Use] = []
    for strand in state.strands:
        terms = [term for labels in strand.labels for term in _terms(labels, dims, out.shape)]
        if not terms or not all(term.keys() == strand.axes for term in terms):
            lost += notes.use(Followed((strand,)), call.name)
            terms = []
        kept.append(replace(strand, labels=tuple(terms)))
    strands = tuple(s for s in kept if s.axes)
    scale = state.scale if len(strands) == len(kept) else Scale.NOTHING
    notes.note(out, Followed(strands, scale, reduced=reduced([state], lost)))


def cumulate(notes: Notes, call: Call) -> None:
    """Sums and extremes of all before, along a dimension: what labels do not differ along it stays."""
    state = call.state(call.args[0])
    out = call.out if isinstance(call.out, torch.Tensor) else call.out[0]  # of extremes the places come second
    if state is None or state.is_parameter or not out.is_floating_point() or not out.ndim:
        return mix(notes, call)
    stays = [s for s in state.strands if all(is_constant_along(t, call.args[1]) for of in s.labels for t in of.values())]
    lost = notes.use(state.without(s.name for s in stays), call.name)
    scale = state.scale if not lost and call.name != "logcumsumexp" else Scale.NOTHING
    notes.note(
        out, Followed(tuple(s for s in stays if not any(s.name == u.name for u in lost)), scale, reduced=reduced([state], lost))
    )


def _terms(labels: Labels, dims: Sequence[int], shape: torch.Size) -> list[Labels]:
    """Labels of a tensor at each of the places along dimensions, as labels of what these are reduced to; nothing if there are more than two."""
    found = [labels]
    for d in dims:
        is_same = all(is_constant_along(t, d) for t in labels.values())
        size = next(iter(labels.values())).shape[d] if labels else 0
        places = range(min(size, 1) if is_same else size)
        if len(places) * len(found) > 2:
            return []
        found = [{a: t.narrow(d, i, 1) for a, t in some.items()} for some in found for i in places]
    return [{a: t.reshape(shape) for a, t in some.items()} for some in found]


def ignore(notes: Notes, call: Call) -> None:
    """An operation that asks for a shape, a dtype or a device alone: what it makes is a constant."""


HANDLERS: dict[str, Callable[[Notes, Call], Any]] = {
    **dict.fromkeys(MOVES, move),
    **dict.fromkeys(("cat", "stack"), join),
    **dict.fromkeys(("index", "index_select", "_unsafe_index"), look_up),
    **dict.fromkeys(("index_add", "index_copy"), put),
    **dict.fromkeys(("index_put", "_index_put_impl"), put_at),
    "constant_pad_nd": pad,
    "as_strided": stride,
    "gather": gather,
    **dict.fromkeys(("tril", "triu"), triangle),
    "view_as_complex": as_complex,
    "view_as_real": as_real,
    "copy": write,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min"), reduce),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "logcumsumexp"), cumulate),
    **dict.fromkeys(
        (
            "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_empty new_ones "
            "new_full new_empty_strided fill zero bernoulli random uniform normal"
        ).split(),
        ignore,
    ),
}
