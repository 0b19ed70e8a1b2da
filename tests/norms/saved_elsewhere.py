"""What a norm map gives, to the last bit, here and in another process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from tests.ranks import run_ranks
from thunder_norm import NormedTensor, load_norm_map
from thunder_norm.norms.maps.norm_map import NormMap


def is_normed(x: Any) -> bool:
    return isinstance(x, NormedTensor)


def sizes_in(tree: Any) -> list[torch.Tensor]:
    """Norm sizes and perturbation sizes, in order."""
    leaves = [x for x in tree_flatten(tree, is_leaf=is_normed)[0] if is_normed(x)]
    return [t for x in leaves for t in (x.norm_size, x.perturbation_size) if t is not None]


def seen(norm_map: NormMap, args: Sequence[Any], state: Mapping[str, Any] | None) -> list[Any]:
    """All that a call gives: sizes, kinds, shapes, what is no norm, first and second derivatives with respect to everything."""
    result = norm_map(*args, normed_state_dict=state)
    flat, structure = tree_flatten(result, is_leaf=is_normed)
    found: list[Any] = [str(structure)]
    for x in flat:
        found.append((type(x).__name__, x.elem_dims, tuple(x.shape), str(x.dtype)) if is_normed(x) else repr(x))
    sizes = sizes_in(result)
    found += sizes
    inputs = [t for t in (*sizes_in((args, dict(state or {}))), *norm_map.tensors.values()) if t.requires_grad]
    outputs = [t for t in sizes if t.requires_grad]
    for order in (1, 2):
        if not outputs or not inputs:
            break
        grads = torch.autograd.grad(sum(outputs), inputs, create_graph=order == 1, allow_unused=True)
        found += [None if g is None else g.detach().clone() for g in grads]
        outputs = [g.sum() for g in grads if g is not None and g.requires_grad]
    return [bits(v.detach()) if isinstance(v, torch.Tensor) else v for v in found]


def bits(t: torch.Tensor) -> tuple:
    """A tensor to the last bit; one NaN is like the other."""
    return str(t.dtype), tuple(t.shape), [v.hex() if isinstance(v, float) else v for v in t.double().flatten().tolist()]


def elsewhere(calls: Sequence[tuple[Path, Sequence[Any], Mapping[str, Any] | None]], folder: Path) -> list[list[Any]]:
    """What saved norm maps give in another process."""
    (folder / "calls").write_bytes(pickle.dumps(list(calls)))
    run_ranks(1, _see, folder)
    return pickle.loads((folder / "results").read_bytes())


def _see(folder: Path) -> None:
    calls = pickle.loads((folder / "calls").read_bytes())
    (folder / "results").write_bytes(pickle.dumps([seen(load_norm_map(path), args, state) for path, args, state in calls]))
