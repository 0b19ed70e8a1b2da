"""Sensitivities: how far the output can move when a leaf does, and derivatives of norms of any order.

Values travel in `norm_size`, perturbations in `perturbation_size`, linearly: ``d_out = sum_i L_i(n) d_i``.  So the sensitivity
of an output to a leaf is the derivative of one perturbation_size by another, and itself a function of all norm sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.core.context import perturbations_recorded
from thunder_norm.core.nonfinite import bounded, settled
from thunder_norm.core.perturbations import refuse_jumps
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.norm_vector import NormVector, is_entry
from thunder_norm.scalars import is_number
from thunder_norm.trees import leaves_of_results


def sensitivities(outputs: Any, leaves: Any) -> Any:
    """``S_k = d perturbation_size(outputs) / d perturbation_size(leaf k)``, differentiable in every norm size.

    To first order, moving each leaf k by ``||Delta_k|| <= d_k`` moves the output by at most ``sum_k S_k d_k``, in the output's
    norm (Theorem 1: induction over the graph with the mean value inequality).  For several outputs it is the sum of their norms.

    Args:
        outputs: a NormedTensor, or any nested structure of them, dataclasses too.
        leaves: the NormedTensors to differentiate by, in any nested structure; each must carry a perturbation_size that
            requires grad.  A `NormVector` with perturbation_sizes that require grad is one of them.

    Returns:
        The structure of `leaves` with a 0-dim tensor for each, of a NormVector one with an entry for each name; 0 for a leaf the outputs do not depend on, NaN where the norm of
        an output is NaN, infinite where no constant is known.

    Raises:
        NormMismatchError: a leaf carries no perturbation_size that requires grad, or there is no NormedTensor in `outputs`.
        JumpError: an output jumps, as a sign does.
    """
    flat_leaves, structure = tree_flatten(leaves)
    sizes = [_perturbation_of(i, leaf) for i, leaf in enumerate(flat_leaves)]
    normed = [y for y in leaves_of_results(outputs) if isinstance(y, NormedTensor)]
    if not normed:
        raise NormMismatchError("sensitivities needs a NormedTensor among the outputs")
    refuse_jumps(normed)
    with perturbations_recorded():
        perturbed = [movement(y) for y in normed if y.perturbation_size is not None and y.perturbation_size.requires_grad]
        if not perturbed or not sizes:
            return tree_unflatten([torch.zeros_like(d) for d in sizes], structure)
        grads = torch.autograd.grad(sum(perturbed), sizes, create_graph=True, allow_unused=True, materialize_grads=True)
        grads = [settled(g, (y.norm_size for y in normed)) for g in grads]
    return tree_unflatten(grads, structure)


def _perturbation_of(i: int, leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, NormedTensor | NormVector):
        raise NormMismatchError(f"leaf {i} of sensitivities must be a NormedTensor, got {type(leaf).__name__}")
    size = leaf.perturbation_sizes if isinstance(leaf, NormVector) else leaf.perturbation_size
    if size is None or not size.requires_grad:
        raise NormMismatchError(
            f"leaf {i} of sensitivities carries no perturbation_size that requires grad: construct it with "
            "perturbation_size=torch.zeros((), dtype=torch.float64, requires_grad=True), or use with_perturbation"
        )
    if is_entry(size):
        raise NormMismatchError(
            f"leaf {i} of sensitivities is an entry of a NormVector, and outputs depend on the vector: give that, and take its entry"
        )
    return size


def movement(y: NormedTensor) -> torch.Tensor:
    """y's perturbation_size, NaN if its norm is: what is not a number moves by no number."""
    assert y.perturbation_size is not None
    return y.perturbation_size * bounded(1.0, y.norm_size)


def with_perturbation(x: NormedTensor, radius: float = 0.0) -> NormedTensor:
    """`x` carrying a perturbation_size that requires grad: a leaf for `sensitivities`.

    Args:
        x: any NormedTensor; inside ``norm_sensitivity("within")`` its norm_size must bound what it may become, too.
        radius: the perturbation_size, in x's own norm.  It matters inside ``norm_sensitivity("within")``.

    Raises:
        NormMismatchError: x is not a NormedTensor, or carries a perturbation already; a negative radius.
    """
    if not isinstance(x, NormedTensor):
        raise NormMismatchError(f"with_perturbation needs a NormedTensor, got {type(x).__name__}")
    if not is_number(radius) or not radius >= 0:
        raise NormMismatchError(f"with_perturbation: radius must be a size >= 0, got {radius!r}")
    if x.perturbation_size is not None:
        raise NormMismatchError("with_perturbation: the tensor carries a perturbation_size already")
    with perturbations_recorded():
        size = torch.full((), radius, dtype=x.norm_size.dtype, device=x.norm_size.device, requires_grad=True)
    out = type(x)._wrap(x.backing, x.norm_size, size, x.elem_dims)
    out._is_leaf_value = True
    return out
