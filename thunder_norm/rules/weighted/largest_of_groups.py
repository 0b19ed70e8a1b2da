"""The largest entries of groups that an index assigns, as a softmax over the edges at each node subtracts them.

    largest = torch.zeros(n).scatter_reduce(0, node, scores, "amax", include_self=False)
    weights = (scores - largest.index_select(0, node)).exp()

No entry of `scores` exceeds the number of its own group, which the index chooses again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core.ranges import OfEntries
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.rules._facts import Alternatives, Source, every_fact
from thunder_norm.rules._shared import argument, negative
from thunder_norm.rules.weighted.weighted_places import rows_of
from thunder_norm.rules.written_out.written_out_exponentials import Bounding, sources_of


@dataclass(frozen=True, eq=False)
class LargestAt(OfEntries):
    """A fact: along `dim`, at the places that some rows of an index name, no entry of a tensor is larger than this one's: the tensor, and what it was detached from."""

    of: tuple[Source, ...]
    rows: Hashable
    index: torch.Tensor  # kept alive, so that what `rows` says stays its own
    dim: int


def _reduced(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    dim, index = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
    source = argument(args, kwargs, 3, "src", "source")
    if argument(args, kwargs, 4, "reduce") != "amax" or not isinstance(source, NormedTensor) or not out.ndim:
        return out._facts
    along = negative(dim, out.ndim)
    rows = rows_of(index, along, out.ndim)
    if rows is None or index.ndim > 1 and index.shape != source.shape:
        return out._facts
    return Alternatives((*every_fact(out), LargestAt(tuple(sources_of(source)), rows[0], index, along)))


for _op in (torch.scatter_reduce, torch.index_reduce):
    normed_op(_op).register_fact(_reduced)


def chosen(x: NormedTensor, dim: int, index: torch.Tensor, out: NormedTensor) -> Any:
    """The facts about entries of x along one dimension, at the places that an index names."""
    known = [f for f in every_fact(x) if isinstance(f, LargestAt) and f.of[0].backing.shape == out.shape]
    rows = rows_of(index, along := negative(dim, x.ndim), x.ndim) if known else None
    found = [f for f in known if rows is not None and (f.rows, f.dim) == (rows[0], along)]
    return Alternatives((*every_fact(out), *(Bounding(x, (), False) for f in found for x in f.of))) if found else out._facts


def _chosen(args: tuple, kwargs: dict[str, Any], out: NormedTensor) -> Any:
    x, dim, index = (
        argument(args, kwargs, 0, "input", "self"),
        argument(args, kwargs, 1, "dim"),
        argument(args, kwargs, 2, "index"),
    )
    return chosen(x, dim, index, out) if isinstance(dim, int) and isinstance(x, NormedTensor) and x.ndim else out._facts


for _op in (torch.index_select, torch.gather):
    normed_op(_op).register_fact(_chosen)
