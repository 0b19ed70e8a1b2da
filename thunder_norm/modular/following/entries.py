"""Operations entry by entry, normalizations and softmaxes: labels stay, what is linear in parameters may not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.modular.following.attentions import Attention, Side, connected
from thunder_norm.modular.following.moves import mix
from thunder_norm.modular.following.notes import Call, Meeting, Notes
from thunder_norm.modular.following.sides import by_queries
from thunder_norm.modular.following.strands import (
    Followed,
    Pair,
    Product,
    Scale,
    Score,
    Use,
    added,
    head_rows,
    is_constant_along,
    reduced,
    used,
)

Operand = tuple[torch.Tensor, Followed]

SUMS = frozenset(["add", "sub", "rsub", "where", "masked_fill"])
_PRODUCTS = frozenset(["mul", "div"])
_LINEAR = frozenset(["neg", "positive", "conj_physical", "real", "imag"])
_STRETCHING = frozenset("pow square float_power sinh cosh tan expm1 exp2".split())
_OF_TEMPERATURES = frozenset(["exp", "clamp", "clamp_max"])
_OVER_LAST = ("native_layer_norm", "_fused_rms_norm")
_NORMALIZATIONS = (
    *_OVER_LAST,
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
)
_LOSSES = (
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "huber_loss",
    "smooth_l1_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
)


def entry_by_entry(notes: Notes, call: Call) -> None:
    """A sum, a product or any other function of entries in the same place."""
    if not isinstance(call.out, torch.Tensor):
        return
    if not (call.out.is_floating_point() or call.out.is_complex()):
        return  # a comparison: a mask
    operands = [(t, state) for t, state in call.tensors if state is not None]
    active = [state for _, state in operands if not state.is_parameter]
    pair = None
    if call.name not in SUMS and len(active) > 1 and not _is_by_rows(active):
        ops = _as_factors(notes, call, active)
        uses = [notes.use(state, op) for state, op in zip(active, ops, strict=True)]
        notes.multiply(uses)
        pair = _pair(call, uses)
    spread = [_spread(notes, call, t, state, operands) for t, state in operands]
    spread, scale = _scaled(call, operands, spread)
    if call.name in SUMS or len(active) < 2:
        strands = added(spread)
    else:  # factors: each goes on as it is
        strands = tuple(s for state in spread for s in state.strands)
    is_attended = any(state.is_attended for state in active) and (call.name not in SUMS or len(active) == 1)
    is_looked_up = bool(active) and all(state.is_looked_up for state in active)
    score = _score(call, active)
    notes.note(call.out, Followed(strands, scale, not active, score, is_attended, is_looked_up, pair, reduced(active)))


def _pair(call: Call, uses: Sequence[list[Use]]) -> Pair | None:
    """The two factors of a product of activations."""
    if call.name != "mul" or len(uses) != 2 or len(call.tensors) != 2:
        return None
    states, ndim = [state for state in call.states if not state.is_parameter], call.out.ndim
    varies = [
        (*[False] * (ndim - t.ndim), *(n > 1 and step != 0 for n, step in zip(t.shape, t.stride(), strict=True)))
        for t, _ in call.tensors
    ]
    return Pair((states[0], states[1]), (varies[0], varies[1]), (uses[0], uses[1]))


def _is_by_rows(states: Sequence[Followed]) -> bool:
    """Whether all but one of several factors are rows of tables (sines and cosines), which multiply that one as numbers do."""
    others = [state for state in states if not state.is_looked_up]
    return len(others) == 1 and others[0].scale is not Scale.NOTHING


def _as_factors(notes: Notes, call: Call, states: Sequence[Followed]) -> list[str]:
    """What each of several operands is: a gate, or gated by one, if the others are of other entries of parameters."""
    taken = [_taken(notes, state) for state in states]
    if not all(taken) or any(a == b for a, b in itertools.combinations(taken, 2)):
        return [call.name] * len(states)  # as a function of one tensor may be written out, or a normalization
    return ["gated" if state.scale is Scale.PRODUCTS else "gate" for state in states]


def _taken(notes: Notes, state: Followed) -> frozenset[Any]:
    """Which entries of which parameters are in a tensor; of what an attention returns it is not known, but others than its gate's."""
    if state.is_attended and not state.strands:
        return frozenset(["attention"])
    uses = used(state, "", notes.shapes)
    return frozenset((u.name, axis, tuple(rows.tolist())) for u in uses if u.kind != "gain" for axis, rows in u.rows.items())


def glu(notes: Notes, call: Call) -> None:
    """``a sigmoid(b)`` of the two halves of a tensor."""
    state = call.state(call.args[0])
    if state is None or state.is_parameter:
        return mix(notes, call)
    dim = call.args[1] if len(call.args) > 1 else -1
    halves = [replace(state, score=None).mapped(lambda t, i=i: t.chunk(2, dim)[i]) for i in (0, 1)]
    ops = "gated" if state.scale is Scale.PRODUCTS else "gate", "gate"
    notes.multiply(tuple(notes.use(half, op) for half, op in zip(halves, ops, strict=True)))
    notes.note(call.out, Followed(tuple(s for half in halves for s in half.strands)))


def _spread(notes: Notes, call: Call, operand: torch.Tensor, state: Followed, operands: Sequence[Operand]) -> Followed:
    """The state of an operand as one of the result; a parameter becomes a bias or a gain, of activations or of a larger parameter."""
    shape = call.out.shape
    spread = replace(state, score=None).mapped(lambda t: t.expand(shape) if t.ndim <= len(shape) else t.reshape(shape))
    active = [t for t, other in operands if not other.is_parameter]
    is_of_larger = not active and operand.numel() < shape.numel() and any(t.shape == shape for t, _ in operands)
    if not state.is_parameter or not active and not is_of_larger:
        return spread
    kind = "bias" if call.name in SUMS else "gain"
    if kind == "gain" and active and _is_outer(operand, active):
        return spread
    # a number made from all of a parameter, its norm or its mean, is no gain
    own = {s.name for s in state.strands if s.axes or not notes.shapes[s.name] or kind == "bias" and active}
    notes.meet(replace(state, strands=tuple(s for s in state.strands if s.name in own)), Meeting(kind))
    strands = (replace(s, kind=kind) if s.kind == "itself" else s for s in spread.strands if s.name in own)
    return replace(spread, strands=tuple(strands))


def _is_outer(parameter: torch.Tensor, active: Sequence[torch.Tensor]) -> bool:
    """Whether a product is one of each entry of a parameter with each activation: a token that a mask puts in places."""
    along = [d - parameter.ndim for d, size in enumerate(parameter.shape) if size > 1]
    return bool(along) and all(t.ndim < -d or t.shape[d] == 1 for t in active for d in along)


def weight_norm(notes: Notes, call: Call) -> None:
    """``g v / |v|`` by torch's own operation: entries are those of v, and g is a gain."""
    v, g = (call.state(t) for t in call.args[:2])
    if not all(state is not None and state.is_parameter for state in (v, g)):
        return mix(notes, call)
    assert v is not None and g is not None
    notes.meet(g, Meeting("gain"))
    spread = g.mapped(lambda t: t.expand(call.out[0].shape))
    gains = tuple(replace(s, kind="gain") if s.kind == "itself" else s for s in spread.strands)
    lengthless = v.with_strands(scales=False).strands
    notes.note(call.out[0], Followed((*lengthless, *gains), min(g.scale, Scale.GAINS), is_parameter=True))


def _scaled(call: Call, operands: Sequence[Operand], spread: list[Followed]) -> tuple[list[Followed], Scale]:
    """What the operands are in the result, and what multiplies that."""
    if call.name in SUMS:
        return _of_sum(call, operands, spread)
    if call.name in _PRODUCTS:
        return _of_product(call, operands, spread)
    if call.name in _LINEAR:
        times = -1.0 if call.name == "neg" else 1.0
        return [_times(of, times) for of in spread], operands[0][1].scale
    if call.name in _OF_TEMPERATURES and operands[0][1].is_parameter and len(operands) == len(call.tensors) == 1:
        return _of_temperature(call, operands[0][1], spread[0])
    return spread, Scale.NOTHING


def _times(of: Followed, times: float) -> Followed:
    return replace(of, strands=tuple(replace(s, multiple=s.multiple * times) for s in of.strands))


def _of_temperature(call: Call, state: Followed, spread: Followed) -> tuple[list[Followed], Scale]:
    """The exponential of a parameter, or one that is capped: by a number that is not negative, smaller multiples are below the cap as well."""
    terms = [s for s in state.strands for _ in s.labels]
    cap = None
    if call.name == "clamp_max":
        cap = call.args[1]
    elif call.name == "clamp":
        low, cap = (call.args[i] if i < len(call.args) else call.kwargs.get(name) for i, name in ((1, "min"), (2, "max")))
        if low is not None:
            return [spread], Scale.NOTHING
    is_known = state.scale is not Scale.NOTHING and len(terms) == 1 and terms[0].kind == "itself" and terms[0].multiple == 1
    if not is_known or terms[0].made.is_exponential:
        return [spread], Scale.NOTHING
    made = terms[0].made
    if call.name == "exp":
        return [spread.with_strands(made=replace(made, is_exponential=True))], state.scale
    if not isinstance(cap, int | float) or not 0 <= cap < math.inf:
        return [spread], Scale.NOTHING
    return [spread.with_strands(made=replace(made, cap=min(made.cap, float(cap))))], state.scale


def _of_sum(call: Call, operands: Sequence[Operand], spread: list[Followed]) -> tuple[list[Followed], Scale]:
    number = call.args[1] if len(operands) == 1 and call.name in ("add", "sub") and len(call.args) == 2 else None
    terms = [s for s in spread[0].strands for _ in s.labels] if operands[0][1].is_parameter else []
    if isinstance(number, int | float) and len(terms) == 1:  # a parameter and a number, as of gains that are started at 0
        (strand,) = terms
        more = number * call.kwargs.get("alpha", 1) * (1 if call.name == "add" else -1)
        made = replace(strand.made, offset=strand.made.offset + more / strand.multiple if strand.multiple else math.nan)
        is_known = made.is_sum and strand.made.is_sum
        return [spread[0].with_strands(made=made)], operands[0][1].scale if is_known else Scale.NOTHING
    floating = [t for t, _ in call.tensors if t.dtype != torch.bool]
    addends = len(call.args) if call.name in ("add", "sub", "rsub") else 3
    is_all = len(floating) == len(operands) == (addends - 1 if call.name == "where" else 2)
    return spread, min(state.scale for _, state in operands) if is_all else Scale.NOTHING


def _of_product(call: Call, operands: Sequence[Operand], spread: list[Followed]) -> tuple[list[Followed], Scale]:
    """Of a factor with gains: what multiplies the factor, or, if nothing does, the gains."""
    active = [i for i, (_, state) in enumerate(operands) if not state.is_parameter]
    active = [i for i in active if not operands[i][1].is_looked_up] or active  # sines and cosines from a table are numbers
    mains = active or [i for i, (t, _) in enumerate(operands) if t.shape == call.out.shape]
    if len(active) > 1 or not mains or call.name == "div" and operands[mains[0]][0] is not call.args[0]:
        return spread, Scale.NOTHING
    main, others = mains[0], [i for i in range(len(operands)) if i != mains[0]]
    if len(operands) == 1:
        number = call.args[1] if len(call.args) > 1 else None
        times = number if isinstance(number, int | float) and number else math.nan
        times = 1 / times if call.name == "div" else times
        return [_times(spread[0], times)], operands[0][1].scale
    names = {s.name for s in operands[main][1].strands}
    is_own = not any(s.name in names for i in others for s in operands[i][1].strands)  # not of the factor itself: its length
    scale = operands[main][1].scale if is_own else Scale.NOTHING
    gains = min(operands[i][1].scale if spread[i].strands else Scale.NOTHING for i in others)
    by_gains = scale is Scale.NOTHING and is_own and call.name == "mul" and gains is not Scale.NOTHING
    if not by_gains:
        return [s if i == main else s.with_strands(scales=False) for i, s in enumerate(spread)], scale
    return [s.with_strands(scales=False) if i == main else s for i, s in enumerate(spread)], Scale.GAINS


def _score(call: Call, active: list[Followed]) -> Score | None:
    """Scores remain scores, whatever constants or biases they meet; constant factors count, also around a soft cap."""
    scores = [state.score for state in active if state.score is not None]
    if not scores:
        return None
    score = scores[0]
    if score.problem:
        return score
    if len(scores) > 1:
        found = _sum(call, *scores) if len(scores) == 2 and call.name == "add" else None
        return found or replace(score, problem="products of queries and keys meet that were shifted, masked or mixed before")
    if score.raw.shape != call.out.shape:
        score = replace(score, **_expanded(score, call.out.shape))
    is_numerator = call.name != "div" or score is getattr(call.state(call.args[0]), "score", None)
    is_scaled = call.name in _PRODUCTS and len(active) == 1 and is_numerator or call.name in _LINEAR
    if not is_scaled:
        return replace(score, is_raw=False, is_stretched=score.is_stretched or call.name in _STRETCHING)
    return replace(_with_gains(call, score), raw=call.out if score.is_raw else _multiplied(call, score))


def _with_gains(call: Call, score: Score) -> Score:
    """Scores times gains of heads (temperatures): of queries and keys that nothing multiplies these are what multiplies the logits."""
    gains = [state for state in call.states if state.is_parameter and state.scale is not Scale.NOTHING]
    is_multiplied = any(side.scale is not Scale.NOTHING for p in score.products for side in (p.query, p.key))
    if call.name != "mul" or len(gains) != 1 or is_multiplied or any(p.is_of_keys for p in score.products):
        return score
    spread = gains[0].mapped(lambda t: t.expand(call.out.shape).flatten())
    products: list[Product] = []
    for product, ids in zip(score.products, score.ids, strict=True):
        at, is_there = ids.flatten().long().clamp(min=0), ids.flatten() >= 0

        def of_queries(t: torch.Tensor, at: torch.Tensor = at, shape: tuple[int, int, int] = product.shape) -> torch.Tensor:
            return t.new_zeros(shape[0] * shape[1]).scatter_(0, at, t).view(*shape[:2], 1).expand(shape)

        if any(
            (of_queries(t)[..., 0].flatten()[at] != t)[is_there].any()
            for s in spread.strands
            for of in s.labels
            for t in of.values()
        ):
            return score  # not the same for all logits of a query
        strands = tuple(replace(s.mapped(of_queries), kind="gain") for s in spread.strands)
        query = product.query.with_strands(scales=False)
        products.append(replace(product, query=replace(query, strands=(*query.strands, *strands), scale=Scale.GAINS)))
    return replace(score, products=tuple(products))


def _expanded(score: Score, shape: torch.Size) -> dict[str, Any]:
    """What of scores changes when they become larger: as many heads, or tokens, are made of one."""
    return {"raw": score.raw.expand(shape), "ids": tuple(ids.expand(shape) for ids in score.ids)}


def _sum(call: Call, one: Score, other: Score) -> Score | None:
    """The scores of one attention, in two terms."""
    is_plain = one.is_raw and other.is_raw and call.kwargs.get("alpha", 1) == 1
    if not is_plain or one.num_mixed or other.num_mixed:
        return None
    ids = (*_expanded(one, call.out.shape)["ids"], *_expanded(other, call.out.shape)["ids"])
    return replace(one, products=one.products + other.products, ids=ids, raw=call.out)


def _multiplied(call: Call, score: Score) -> torch.Tensor:
    """What is done to a tensor done to the products that it was made of."""
    raw = score.raw.clone() if call.func._schema.is_mutable else score.raw
    args = [raw if getattr(call.state(a), "score", None) is score else a for a in call.args]
    return call.func(*args, **call.kwargs)


def normalize(notes: Notes, call: Call) -> None:
    """A normalization: a use of what it takes, whose entries stay where they are."""
    out = call.out[0] if isinstance(call.out, list | tuple) else call.out
    state = call.state(call.args[0])
    if state is None:
        return
    notes.use(state, "normalization")
    strands, scale = state.with_strands(scales=False).strands, Scale.NOTHING
    given = [t for t in call.args[1:] if t is None or isinstance(t, torch.Tensor)]
    for kind, t in zip(("gain", "bias"), given, strict=False):
        parameter = call.state(t)
        is_parameter = parameter is not None and parameter.is_parameter
        if t is not None:
            of_it = parameter.scale if is_parameter else Scale.NOTHING
            scale = min(of_it, Scale.GAINS if kind == "gain" else scale)
        if is_parameter:
            notes.meet(parameter, Meeting(kind))
            moved = parameter.mapped(lambda label: _along(call, label, out.shape))
            strands += tuple(replace(s, kind=kind) if s.kind == "itself" else s for s in moved.strands)
    notes.note(out, replace(state, strands=strands, scale=scale, score=None))


def _along(call: Call, label: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A label of a normalization's gain or bias as one of its result: of channels, which come second, or of the last dimensions."""
    is_last = call.name in _OVER_LAST
    return (label if is_last else label.view(-1, *[1] * (len(shape) - 2))).expand(shape)


def softmax(notes: Notes, call: Call) -> None:
    """A softmax: of scores, it makes an attention; of others, entries stay where they are."""
    state = call.state(call.args[0])
    if state is None:
        return
    score, is_written_out = state.score, call.name == "exp"  # sums come later; along the last dimension, as far as is known
    dim = -1 if is_written_out else call.args[1]
    if score is not None and not _is_over_keys(score, call.args[0], dim):
        score = None
    if score is None:
        if is_written_out:
            return entry_by_entry(notes, replace(call, tensors=[(t, s and replace(s, score=None)) for t, s in call.tensors]))
        return notes.note(call.out, replace(state, scale=Scale.NOTHING, score=None))
    gains = {s.name for product in score.products for s in product.query.strands if s.kind == "gain"}
    of_others = tuple(s for s in state.strands if s.kind != "gain" or s.name not in gains)
    notes.use(replace(state, strands=of_others), "softmax")  # what was added to the scores, or stands beside them (sinks)
    score = by_queries(score, dim)
    attention = Attention.of(score, call.args[0], is_shifted=is_written_out)
    number = len(notes.attentions)
    notes.attentions.append(attention)
    for product in score.products:
        for uses, op, side in zip(product.uses, ("query", "key"), (attention.query, attention.key), strict=True):
            for use in uses:
                use.op = op
                use.heads = None if attention.problem else _heads(side, use, notes.shapes[use.name])
    notes.note(call.out, Followed(score=replace(score, is_raw=False, attention=number)))


def _is_over_keys(score: Score, t: torch.Tensor, dim: int) -> bool:
    """Whether a softmax along a dimension may be one over keys.

    It is not over heads that a matrix has mixed, and where rows of one side that have nothing in common each meet one row alone: sums of
    experts by weights, which are products of activations as well.
    """
    if score.num_mixed and not score.problem and not is_constant_along(score.ids[0], dim):
        return False
    sides = [(p, p.key if p.is_of_keys else p.query) for p in score.products if p.others == 1 < p.shape[1]]
    is_sum = len(sides) == len(score.products) and all(connected(side, p.shape[0]) is not None for p, side in sides)
    return not is_sum or t.shape[dim] == 1


def exponential(notes: Notes, call: Call) -> None:
    """An exponential: of scores that of a softmax which is written out, whose sums are divided by later, perhaps after the values."""
    state = call.state(call.args[0])
    is_of_scores = state is not None and state.score is not None and not state.score.is_probability
    (softmax if is_of_scores else entry_by_entry)(notes, call)


def _heads(side: Side, use: Use, shape: Sequence[int]) -> torch.Tensor | None:
    """The heads of queries or keys that a use has, by the one axis of a parameter that has more than one index."""
    parts = [p for p in side.parts if p.name == use.name and p.kind == use.kind]
    along = [[i for i, axis in enumerate(p.axes) if shape[axis] != 1] for p in parts]
    if not all(len(i) == 1 for i in along):
        return None
    found = head_rows([p.at[..., i] for p, (i,) in zip(parts, along, strict=True)])
    axes = {p.axes[i] for p, (i,) in zip(parts, along, strict=True)}
    if found is None or len(axes) != 1:
        return found
    is_own = use.rows[axes.pop()][found].all(1)  # the scores of others may stand beside those of this product's heads
    return found[is_own] if is_own.any() else found


def lose(notes: Notes, call: Call) -> None:
    """A loss takes the program's results."""
    for state in call.states:
        notes.use(state, "loss")
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    notes.note(out, Followed(reduced=reduced(call.states)))


HANDLERS: dict[str, Callable[[Notes, Call], Any]] = {
    **dict.fromkeys(_NORMALIZATIONS, normalize),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax"), softmax),  # the last two with out=
    **dict.fromkeys(_LOSSES, lose),
    "_weight_norm_interface": weight_norm,
    "glu": glu,
    "exp": exponential,
}
