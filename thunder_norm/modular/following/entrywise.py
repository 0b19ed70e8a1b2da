"""Attentions by products entry by entry that are summed: ``(q[..., None, :] * k).sum(-1)``, where each query has keys of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.modular.following.attentions import connected
from thunder_norm.modular.following.moves import reduce
from thunder_norm.modular.following.notes import Call, Notes
from thunder_norm.modular.following.products import heads_of_values
from thunder_norm.modular.following.sides import sum_over_keys
from thunder_norm.modular.following.strands import Followed, Pair, Product, Score


def add_up(notes: Notes, call: Call) -> None:
    """A sum along a dimension of a product entry by entry: scores, or what an attention returns; of others as `reduce` says."""
    state = call.state(call.args[0])
    pair = None if state is None else state.pair
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    dims = given if isinstance(given, list | tuple) else [given]
    if pair is None or len(dims) != 1 or dims[0] is None:
        return reduce(notes, call)
    shape = call.args[0].shape
    dim = dims[0] % len(shape)
    of_values = _attended(notes, pair, shape, dim)
    score = None if of_values else _score(call, pair, shape, dim)
    if not of_values and score is None:
        return reduce(notes, call)
    notes.note(call.out, Followed(score=score, is_attended=of_values))


def _score(call: Call, pair: Pair, shape: torch.Size, dim: int) -> Score | None:
    """Scores of the first factor as queries and the second as keys, which are of one batch where both vary.

    None where they do everywhere (each row meets one other alone), or where they do not along the dimension of the sum.
    """
    others = [d for d in range(len(shape)) if d != dim]
    own = [[d for d in others if pair.varies[i][d] and not pair.varies[1 - i][d]] for i in (0, 1)]
    is_sum_of_both = all(varies[dim] for varies in pair.varies)
    if not is_sum_of_both or not any(own) or any(state.score is not None for state in pair.states):
        return None
    batch = [d for d in others if d not in (*own[0], *own[1])]
    query, key = (state.mapped(_in_rows(shape, batch, some, [dim])) for state, some in zip(pair.states, own, strict=True))
    n = _count(shape, batch)
    is_of_keys = connected(query, n) is None and connected(key, n) is not None
    rows = own[is_of_keys]
    ids = torch.arange(n * _count(shape, rows), dtype=torch.int32).view([shape[d] for d in (*batch, *rows)])
    order = [*batch, *rows, *own[not is_of_keys]]
    ids = ids[(..., *[None] * len(own[not is_of_keys]))].expand([shape[d] for d in order])
    ids = ids.permute([order.index(d) for d in others])
    size = n, _count(shape, rows), shape[dim]
    product = Product(query, key, pair.uses, size, is_of_keys, _count(shape, own[not is_of_keys]))
    return Score((product,), (ids.unsqueeze(dim) if call.out.ndim == len(shape) else ids,), call.out)


def _attended(notes: Notes, pair: Pair, shape: torch.Size, dim: int) -> bool:
    """Whether probabilities of an attention are summed over keys, times values; which are then known as these."""
    for i, state in enumerate(pair.states):
        score = state.score
        at = dim - len(shape) if score is None or score.problem else dim - len(shape) + score.ids[0].ndim
        if score is None or not score.is_probability or score.problem or at < 0 or not pair.varies[i][dim]:
            continue
        sum_over_keys(notes, score, at)
        values, uses = pair.states[1 - i], pair.uses[1 - i]
        batch = [d for d in range(len(shape)) if d != dim and pair.varies[i][d]]
        rest = [d for d in range(len(shape)) if d != dim and d not in batch]
        moved = values.mapped(_in_rows(shape, batch, [dim], rest))
        size = (_count(shape, batch), shape[dim], _count(shape, rest))
        for use, strand in zip(uses, moved.strands, strict=True):
            use.op, use.heads = "value", heads_of_values(strand, size, notes.shapes[strand.name], True)
        return True
    return False


def _in_rows(
    shape: torch.Size, batch: Sequence[int], tokens: Sequence[int], entries: Sequence[int]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A label of a factor as one of [n, tokens, d]; along other dimensions it does not vary."""
    kept = [*batch, *tokens, *entries]

    def moved(label: torch.Tensor) -> torch.Tensor:
        label = label.expand(shape)
        for d in range(len(shape)):
            label = label if d in kept else label.narrow(d, 0, 1)
        rest = [d for d in range(len(shape)) if d not in kept]
        sizes = (_count(shape, some) for some in (batch, tokens, entries))
        return label.permute([*rest, *kept]).reshape(*sizes)

    return moved


def _count(shape: torch.Size, dims: Sequence[int]) -> int:
    return torch.Size([shape[d] for d in dims]).numel()


HANDLERS: dict[str, Callable[[Notes, Call], Any]] = {"sum": add_up}
