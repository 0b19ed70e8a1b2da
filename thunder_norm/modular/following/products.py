"""Matrix products, convolutions and tables: where parameters meet activations, and labels begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thunder_norm.modular.following.attentions import connected
from thunder_norm.modular.following.moves import mix
from thunder_norm.modular.following.notes import Call, Meeting, Notes
from thunder_norm.modular.following.sides import sum_over_keys
from thunder_norm.modular.following.strands import (
    Followed,
    Product,
    Scale,
    Score,
    Strand,
    added,
    head_rows,
    is_constant_along,
    survived,
)

Operand = tuple[torch.Tensor, Followed | None]

# operation -> how many dimensions of places there are, after those of channels
_POOLS = {
    prefix + f"{n}d" + suffix: n
    for n in (1, 2, 3)
    for prefix, suffix in (
        ("max_pool", "_with_indices"),
        ("avg_pool", ""),
        ("_adaptive_avg_pool", ""),
        ("adaptive_max_pool", ""),
        ("upsample_nearest", ""),
        ("upsample_linear", ""),
        ("upsample_bilinear", ""),
        ("upsample_bicubic", ""),
        ("upsample_trilinear", ""),
    )
}
# operation -> which arguments are multiplied
_FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "_grouped_mm": (0, 1),
    "grouped_mm_fallback": (0, 1),  # transformers' own
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
}


def multiply(notes: Notes, call: Call) -> None:
    """``a @ b``, and a third tensor added to it."""
    a, b = (call.args[i] for i in _FACTORS[call.name])
    of_a, of_b = call.state(a), call.state(b)
    is_parameter = all(state.is_parameter for state in call.states)
    score, scale, is_attended = _mixed(call, (a, of_a), (b, of_b)), Scale.NOTHING, False
    if of_b is not None and of_b.is_parameter:
        strands, scale = _product(notes, call, a, of_b, lambda t: _right(t, call)), of_b.scale
    elif of_a is not None and of_a.is_parameter:
        strands, scale = _product(notes, call, b, of_a, lambda t: _left(t, call)), of_a.scale
    else:
        is_attended = any(_probabilities(state) is not None for state in (of_a, of_b))
        strands, score = (), score or _of_activations(notes, call, (a, of_a), (b, of_b))
    if of_a is not None and of_b is not None and is_parameter:  # a matrix made of matrices, of which it has rows and columns
        columns = frozenset(s.name for s in strands if s.scales)
        rows = survived(of_a, "itself", [-1], lambda t: _left(t, call))
        rows = tuple(replace(s, scales=False, instead_of=columns if s.scales else s.instead_of and columns) for s in rows)
        strands = tuple(replace(s, kind="itself") for s in (*rows, *strands))
    state = Followed(strands, scale, is_parameter, score, is_attended)
    if call.name.startswith("add") or call.name == "baddbmm":
        state = _with_added(notes, call, state)
    notes.note(call.out, state)


def _mixed(call: Call, a: Operand, b: Operand) -> Score | None:
    """Scores, or their softmax, that a matrix mixes."""
    for (t, one), (m, other), summed in ((a, b, -1), (b, a, -2)):
        score = None if one is None else one.score
        if score is None or other is not None and not other.is_parameter:
            continue
        # a sum over keys is one of learned values, or of what was no attention: a state that is read (Mamba)
        is_of_heads = t.shape == call.out.shape if score.problem else _is_of_heads(score, t.ndim + summed)
        if is_of_heads:
            by = m * call.kwargs.get("alpha", 1)
            mixed = partial(torch.matmul, other=by) if t is a[0] else partial(torch.matmul, by)
            return _of_mixed(score, call.out.ndim + summed, call.out.shape, mixed)
    return None


def _is_of_heads(score: Score, dim: int) -> bool:
    """Whether heads are along a dimension of scores: several n, or rows of one n that have nothing in common."""
    if score.num_mixed:
        return not is_constant_along(score.ids[0], dim)
    for product, ids in zip(score.products, score.ids, strict=True):
        n, tokens, _ = product.shape
        if not is_constant_along(ids // tokens, dim):
            return True
        side = product.key if product.is_of_keys else product.query
        if not is_constant_along(ids, dim) and connected(side, n) is not None:
            return True
    return False


def _of_mixed(score: Score, dim: int, shape: torch.Size, mixed: Callable[[torch.Tensor], torch.Tensor]) -> Score:
    """Scores that a matrix mixes (talking heads): each of the heads along a dimension is multiplied if all that it is made of are.

    After the softmax it is not known any more whose they are, but what they are.
    """
    if score.problem or score.is_probability:
        return replace(score, problem=score.problem or "a matrix mixes the probabilities of heads")
    ids = torch.arange(shape[dim], dtype=torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
    return replace(score, ids=(ids,) * len(score.ids), raw=mixed(score.raw), is_raw=False, num_mixed=shape[dim])


def _product(
    notes: Notes, call: Call, factor: torch.Tensor, parameter: Followed, moved: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Strand, ...]:
    other = call.state(factor)
    left, right = (call.args[i] for i in _FACTORS[call.name])
    if other is not None and other.is_parameter:  # of which the product has rows, that are followed on
        for before, after in zip(other.strands, survived(other, "itself", [-1], lambda t: t), strict=True):
            notes.meet(replace(other, strands=(before,)), Meeting("factor", summed=before.axes - after.axes))
    elif other is not None:
        notes.use(other, call.name)
    if parameter is call.state(left):
        dims = [-1]
    else:
        dims = [0] if _is_vector(call) else [-2] if right.ndim <= call.out.ndim else [0, -2]
    found = survived(parameter, "weight", dims, moved)
    if other is None or not other.is_parameter:
        is_first, is_attended = not notes.is_dependent(factor), other is not None and other.is_attended
        is_of_constant = notes.is_constant(factor)
        for before, after in zip(parameter.strands, found, strict=True):
            summed = before.axes - after.axes
            meeting = Meeting("matrix", is_first=is_first, is_attended=is_attended, summed=summed, is_of_constant=is_of_constant)
            notes.meet(replace(parameter, strands=(before,)), meeting)
        found = _by_rows(found)
    return found


def _by_rows(strands: tuple[Strand, ...]) -> tuple[Strand, ...]:
    """Of a matrix that is a product of others, the rows scale its product with activations where its columns are summed over."""
    gone = {s.name for s in strands if s.scales and not s.axes}
    turned = [s for s in strands if s.axes and s.instead_of and s.instead_of <= gone]
    replaced = frozenset[str]().union(*(s.instead_of for s in turned))
    return tuple(
        replace(s, scales=True, instead_of=frozenset()) if s in turned else replace(s, scales=s.scales and s.name not in replaced)
        for s in strands
    )


def _is_vector(call: Call) -> bool:
    return call.args[_FACTORS[call.name][1]].ndim == 1


def _right(t: torch.Tensor, call: Call) -> torch.Tensor:
    """A label of the right factor [..., k, m] as one of the product."""
    if t.ndim == 1:
        return t[0].expand(call.out.shape)
    if t.ndim > call.out.ndim:  # groups of rows have matrices of their own
        t = t[0]
    return t.narrow(-2, 0, 1).expand(call.out.shape)


def _left(t: torch.Tensor, call: Call) -> torch.Tensor:
    """A label of the left factor [..., n, k] as one of the product."""
    return t.select(-1, 0).expand(call.out.shape) if _is_vector(call) else t.narrow(-1, 0, 1).expand(call.out.shape)


def _with_added(notes: Notes, call: Call, state: Followed) -> Followed:
    """The state with that of the tensor that is added."""
    beta = call.kwargs.get("beta", 1)
    bias = call.state(call.args[0])
    if bias is None:
        return state if beta == 0 else replace(state, scale=Scale.NOTHING)
    spread = bias.mapped(lambda t: t.expand(call.out.shape))
    if bias.is_parameter and any(s.kind == "weight" for s in state.strands):
        notes.meet(bias, Meeting("bias"))
        spread = replace(spread, strands=tuple(replace(s, kind="bias") for s in spread.strands))
    scale = min(state.scale, bias.scale) if beta == 1 else Scale.NOTHING
    return replace(state, strands=added([state, spread]), scale=scale)


def _of_activations(notes: Notes, call: Call, a: Operand, b: Operand) -> Score | None:
    """A product of activations: scores of an attention, perhaps, or probabilities times values."""
    of_a, of_b = a[1], b[1]
    for one, (t, of_values), dim in ((of_a, b, -1), (of_b, a, -2)):
        score = _probabilities(one)
        if score is not None:
            sum_over_keys(notes, score, dim)
            uses = notes.use(of_values, "value")
            for use, strand in zip(uses, of_values.strands if of_values is not None else (), strict=True):
                use.heads = heads_of_values(strand, t.shape, notes.shapes[strand.name], dim == -1)
            return None
    uses_a, uses_b = notes.use(of_a, call.name), notes.use(of_b, call.name)
    if of_a is None or of_b is None or call.name not in ("bmm", "mm", "baddbmm"):
        return None
    batched = (lambda t: t.unsqueeze(0)) if call.name == "mm" else (lambda t: t)
    query, key = of_a.mapped(batched), of_b.mapped(lambda t: batched(t).mT)
    n, num_queries, num_keys = shape = batched(call.out).shape
    is_of_keys = connected(query, n) is None and connected(key, n) is not None
    tokens = num_keys if is_of_keys else num_queries
    ids = torch.arange(n * tokens, dtype=torch.int32).view(n, 1 if is_of_keys else tokens, -1).expand(shape)
    is_raw = call.name != "baddbmm" or call.kwargs.get("beta", 1) == 0
    raw = call.out if is_raw else call.out - call.kwargs.get("beta", 1) * call.args[0]
    others = num_queries if is_of_keys else num_keys
    product = Product(query, key, (uses_a, uses_b), (n, tokens, a[0].shape[-1]), is_of_keys, others)
    return Score((product,), (ids[0] if call.name == "mm" else ids,), raw, is_raw)


def _probabilities(state: Followed | None) -> Score | None:
    """The scores of an attention after their softmax."""
    score = None if state is None else state.score
    return score if score is not None and score.is_probability else None


def heads_of_values(strand: Strand, values: Sequence[int], shape: Sequence[int], is_by_tokens: bool) -> torch.Tensor | None:
    """The heads of values [n, tokens, d], or [n, d, tokens], by the one axis of a parameter that has more than one index."""
    axes = [axis for axis in strand.axes if shape[axis] != 1]
    if len(values) != 3 or len(axes) != 1:
        return None
    of_axis = [labels[axes[0]] for labels in strand.labels if axes[0] in labels]
    return head_rows([_of_one_token(label if is_by_tokens else label.mT) for label in of_axis])


def _of_one_token(label: torch.Tensor) -> torch.Tensor:
    """A label of values [n, tokens, d] at a token that has it: others may stand around these (windows over a padded sequence)."""
    largest = label.amax(1) if label.shape[1] else label[:, 0]
    is_same = ((label == largest.unsqueeze(1)) | (label < 0)).all()
    return largest if is_same else label[:, 0]


def convolve(notes: Notes, call: Call) -> None:
    """A convolution: its weight's axis of output channels has labels, and so has its bias."""
    x, weight, bias = call.args[:3]
    transposed, groups = call.args[6], call.args[8]
    of_x, of_weight, of_bias = call.state(x), call.state(weight), call.state(bias)
    notes.use(of_x, "convolution")
    shape = [1, call.out.shape[1], *[1] * (call.out.ndim - 2)]
    if of_weight is None or not of_weight.is_parameter:
        notes.use(of_weight, "convolution")
        return notes.note(call.out, Followed())
    notes.meet(of_weight, Meeting("convolution", groups, int(transposed), not notes.is_dependent(x)))
    others = [d for d in range(weight.ndim) if d != int(transposed)]

    def channels(t: torch.Tensor) -> torch.Tensor:
        for d in reversed(others):
            t = t.select(d, 0)
        return (t.repeat(groups) if transposed else t).view(shape).expand(call.out.shape)

    strands = survived(of_weight, "weight", others, channels)
    scale = of_weight.scale if bias is None else Scale.NOTHING
    if of_bias is not None and of_bias.is_parameter:
        notes.meet(of_bias, Meeting("bias"))
        strands += survived(of_bias, "bias", [], lambda t: t.view(shape).expand(call.out.shape))
        scale = min(of_weight.scale, of_bias.scale)
    if of_x is not None and not of_x.is_parameter and 1 < groups == x.shape[1]:  # of each channel by itself
        strands += _of_channels(of_x, call.out.shape, len(others) - 1).with_strands(scales=False).strands
    score = None
    if of_x is not None and of_x.score is not None:  # of all places around, too: still linear in all scores
        channel = call.out.ndim - weight.ndim + 1
        mixed = lambda raw: call.func(raw, weight, None, *call.args[3:])  # noqa: E731
        score = _of_mixed(of_x.score, channel, call.out.shape, mixed)
    notes.note(call.out, Followed(strands, scale, score=score))


def pool(notes: Notes, call: Call) -> None:
    """Means and extremes of windows, and interpolations: of each channel by itself, and multiplied as what they take."""
    state = call.state(call.args[0])
    if state is None or state.is_parameter:
        return mix(notes, call)
    out = call.out if isinstance(call.out, torch.Tensor) else call.out[0]  # of extremes the places come second
    found = _of_channels(state, out.shape, _POOLS[call.name])
    if len(found.strands) < len(state.strands):
        notes.use(state, call.name)
    notes.note(out, replace(found, score=None, is_attended=False))


def _of_channels(state: Followed, shape: torch.Size, num_places: int) -> Followed:
    """What is made of each channel by itself, before the dimensions of places: channels stay, and what differs within one is lost."""
    channel = len(shape) - num_places - 1

    def moved(t: torch.Tensor) -> torch.Tensor:
        for d in range(channel + 1, t.ndim):
            t = t.narrow(d, 0, 1)
        return t.repeat_interleave(shape[channel] // t.shape[channel], channel).expand(shape)

    kept = tuple(
        replace(s, labels=tuple({a: moved(t) for a, t in of.items() if _is_of_channels(t, channel)} for of in s.labels))
        for s in state.strands
    )
    strands = tuple(s for s in kept if s.axes)
    is_all = all(a.axes == b.axes for a, b in zip(kept, state.strands, strict=True))
    return replace(state, strands=strands, scale=state.scale if is_all else Scale.NOTHING)


def _is_of_channels(label: torch.Tensor, channel: int) -> bool:
    return label.numel() > 0 and all(is_constant_along(label, d) for d in range(channel + 1, label.ndim))


def embed(notes: Notes, call: Call) -> None:
    """Rows of a table."""
    table, out = call.args[0], call.out[0] if isinstance(call.out, tuple) else call.out
    state = call.state(table)
    if state is None or not state.is_parameter:
        return mix(notes, call)
    notes.meet(state, Meeting("table", is_at_places=notes.is_constant(call.args[1])))
    strands = survived(state, "table", [0], lambda t: t[0].expand(out.shape))
    notes.note(out, Followed(strands, state.scale, is_looked_up=True))


def bilinear(notes: Notes, call: Call) -> None:
    """``x W y`` of `F.bilinear`: a matrix for each output."""
    weight = call.state(call.args[1])
    if weight is not None and weight.is_parameter:
        is_first = not any(map(notes.is_dependent, (call.args[0], call.args[2])))
        notes.meet(weight, Meeting("matrix", is_first=is_first, summed=frozenset({1, 2})))
    mix(notes, call)


HANDLERS: dict[str, Callable[[Notes, Call], Any]] = {
    "_trilinear": bilinear,
    **dict.fromkeys(_FACTORS, multiply),
    "convolution": convolve,
    "_convolution": convolve,
    **dict.fromkeys(_POOLS, pool),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"), embed),
}
