"""Which factor of a product of activations are queries, and which are keys: what a softmax says, and then what values say."""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_norm.modular.following.notes import Notes
from thunder_norm.modular.following.strands import Product, Score


def by_queries(score: Score, dim: int) -> Score:
    """Scores whose softmax is along a dimension: what differs along it are keys, whichever factor of a product they were."""
    if score.problem or score.num_mixed:
        return score
    products = (
        replace(p, query=p.key, key=p.query, uses=(p.uses[1], p.uses[0]), is_of_keys=not p.is_of_keys)
        if _is_other_side(p, ids, dim)
        else p
        for p, ids in zip(score.products, score.ids, strict=True)
    )
    return replace(score, products=tuple(products))


def sum_over_keys(notes: Notes, score: Score, dim: int) -> None:
    """Probabilities are summed over along a dimension, times values: so keys are along it, also where queries compete (slot attention)."""
    if score.attention is None or score.problem or score.num_mixed:
        return
    if all(_is_other_side(p, ids, dim) for p, ids in zip(score.products, score.ids, strict=True)):
        attention = notes.attentions[score.attention]
        notes.attentions[score.attention] = replace(attention, query=attention.key, key=attention.query)
        for product in score.products:
            for uses, op in zip(product.uses, ("key", "query"), strict=True):
                for use in uses:
                    use.op = op


def _is_other_side(product: Product, ids: torch.Tensor, dim: int) -> bool:
    """Whether what was taken for queries is along a dimension of keys; of one row alone it is not said."""
    return product.shape[1] > 1 and _changes_along(ids, dim) is (not product.is_of_keys)


def _changes_along(ids: torch.Tensor, dim: int) -> bool | None:
    """Whether rows of a product are others at every step along a dimension (a relative shift brings some from elsewhere); None if it has no steps."""
    size = ids.shape[dim]
    if size < 2:
        return None
    if ids.stride(dim) == 0:
        return False
    one, other = ids.narrow(dim, 0, size - 1), ids.narrow(dim, 1, size - 1)
    is_there = (one >= 0) & (other >= 0)
    return bool((one != other)[is_there].all()) if is_there.any() else None
