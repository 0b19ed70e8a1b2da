"""Operations entry by entry, normalizations and softmaxes: labels stay, what is linear in parameters may not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_norm.modular.following.attentions import Attention, Side
from thunder_norm.modular.following.moves import mix
from thunder_norm.modular.following.notes import Call, Meeting, Notes
from thunder_norm.modular.following.strands import Followed, Score, Use, added, head_rows, used

Operand = tuple[torch.Tensor, Followed]

SUMS = frozenset(["add", "sub", "rsub", "where", "masked_fill"])
_PRODUCTS = frozenset(["mul", "div"])
_LINEAR = frozenset(["neg", "positive", "conj_physical", "real", "imag"])
_NORMALIZATIONS = (
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_fused_rms_norm",
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
    if call.name not in SUMS and len(active) > 1:
        for state, op in zip(active, _as_factors(notes, call, active), strict=True):
            notes.use(state, op)
    spread = [_spread(notes, call, t, state, operands) for t, state in operands]
    if call.name in SUMS or len(active) < 2:
        strands = added(spread)
    else:  # factors: each goes on as it is
        strands = tuple(s for state in spread for s in state.strands)
    is_attended = any(state.is_attended for state in active) and (call.name not in SUMS or len(active) == 1)
    is_homogeneous, score = _is_homogeneous(call, operands, active), _score(call, active)
    notes.note(call.out, Followed(strands, is_homogeneous, not active, score, is_attended))


def _as_factors(notes: Notes, call: Call, states: Sequence[Followed]) -> list[str]:
    """What each of several operands is: a gate, or gated by one, if the others are of other entries of parameters."""
    taken = [_taken(notes, state) for state in states]
    if not all(taken) or any(a == b for a, b in itertools.combinations(taken, 2)):
        return [call.name] * len(states)  # as a function of one tensor may be written out, or a normalization
    return ["gated" if state.is_homogeneous else "gate" for state in states]


def _taken(notes: Notes, state: Followed) -> frozenset[Any]:
    """Which entries of which parameters are in a tensor."""
    uses = used(state, "", notes.shapes)
    return frozenset((u.name, axis, tuple(rows.tolist())) for u in uses if u.kind != "gain" for axis, rows in u.rows.items())


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
    notes.note(call.out[0], Followed((*v.strands, *gains), is_parameter=True))


def _is_homogeneous(call: Call, operands: list[tuple[torch.Tensor, Followed]], active: list[Followed]) -> bool:
    if call.name in SUMS:
        floating = [t for t, _ in call.tensors if t.dtype != torch.bool]
        addends = len(call.args) if call.name in ("add", "sub", "rsub") else 3
        is_all = len(floating) == len(operands) == (addends - 1 if call.name == "where" else 2)
        return is_all and all(state.is_homogeneous for _, state in operands)
    if call.name in _PRODUCTS:
        factors = active or [state for _, state in operands]
        is_numerator = call.name == "mul" or factors[0] is call.state(call.args[0])
        return len(factors) == 1 and is_numerator and factors[0].is_homogeneous
    return call.name in _LINEAR and operands[0][1].is_homogeneous


def _score(call: Call, active: list[Followed]) -> Score | None:
    """Scores remain scores, whatever constants or biases they meet; constant factors count, also around a soft cap."""
    scores = [state.score for state in active if state.score is not None]
    if not scores:
        return None
    score = scores[0]
    if score.problem:
        return score
    if len(scores) > 1 or score.ids.shape != call.out.shape:
        found = _sum(call, *scores) if len(scores) == 2 and call.name == "add" else None
        return found or replace(score, problem="products of queries and keys of different layouts meet")
    is_numerator = call.name != "div" or score is getattr(call.state(call.args[0]), "score", None)
    is_scaled = call.name in _PRODUCTS and len(active) == 1 and is_numerator or call.name in _LINEAR
    if not is_scaled:
        return replace(score, is_raw=False)
    return replace(score, raw=call.out if score.is_raw else _multiplied(call, score))


def _sum(call: Call, one: Score, other: Score) -> Score | None:
    """The scores of one attention, in two terms."""
    is_plain = one.is_raw and other.is_raw and call.kwargs.get("alpha", 1) == 1
    if not is_plain or one.ids.shape != other.ids.shape or not torch.equal(one.ids, other.ids):
        return None
    return replace(one, products=one.products + other.products, raw=call.out)


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
    for t in call.args[1:]:
        parameter = call.state(t)
        if parameter is not None and parameter.is_parameter:
            is_first = next(x for x in call.args[1:] if isinstance(x, torch.Tensor)) is t
            notes.meet(parameter, Meeting("gain" if is_first else "bias"))
    notes.note(out, replace(state, is_homogeneous=False, score=None))


def softmax(notes: Notes, call: Call) -> None:
    """A softmax: of scores, it makes an attention; of others, entries stay where they are."""
    state = call.state(call.args[0])
    if state is None:
        return
    score = state.score
    if score is None:
        return notes.note(call.out, replace(state, is_homogeneous=False))
    attention = Attention.of(score, call.args[0])
    notes.attentions.append(attention)
    for product in score.products:
        for uses, op, side in zip(product.uses, ("query", "key"), (attention.query, attention.key), strict=True):
            for use in uses:
                use.op = op
                use.heads = None if attention.problem else _heads(side, use)
    notes.note(call.out, Followed(score=replace(score, is_raw=False, is_probability=True)))


def _heads(side: Side, use: Use) -> torch.Tensor | None:
    parts = [p for p in side.parts if p.name == use.name and p.kind == use.kind]
    return head_rows([p.at[..., 0] for p in parts]) if all(len(p.axes) == 1 for p in parts) else None


def lose(notes: Notes, call: Call) -> None:
    """A loss takes the program's results."""
    for state in call.states:
        notes.use(state, "loss")
    out = call.out[0] if isinstance(call.out, tuple) else call.out
    notes.note(out, Followed())


HANDLERS: dict[str, Callable[[Notes, Call], Any]] = {
    **dict.fromkeys(_NORMALIZATIONS, normalize),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), softmax),
    **dict.fromkeys(_LOSSES, lose),
    "_weight_norm_interface": weight_norm,
}
