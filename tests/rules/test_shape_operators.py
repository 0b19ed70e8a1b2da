"""Operators that only move entries, on all of torch's own samples and with every choice of elem_dims.

What such an operator can do to a norm is known exactly: each entry of the output is one of the input, and a group of the output
holds the most when each group of the input puts all it has into the entry that occurs there most often.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from thunder_norm import LinfTensor, NormedTensor, RMSTensor
from thunder_norm.audit import norm
from thunder_norm.errors import MissingNormRuleError, NormMismatchError, UnsupportedOpError

D = torch.float64
# Attained for every sample and every elem_dims.
EXACT = (
    "view view_as view_copy reshape reshape_as flatten unflatten ravel permute permute_copy transpose transpose_copy t t_copy T mT "
    "movedim swapaxes squeeze squeeze_copy unsqueeze unsqueeze_copy expand expand_as expand_copy broadcast_to broadcast_tensors "
    "repeat tile repeat_interleave flip fliplr flipud rot90 roll chunk unsafe_chunk split split_with_sizes split_with_sizes_copy "
    "unsafe_split tensor_split hsplit vsplit dsplit unbind unbind_copy narrow narrow_copy select diagonal diagonal_copy stack cat "
    "hstack vstack dstack column_stack atleast_1d atleast_2d atleast_3d meshgrid contiguous clone unfold unfold_copy "
    "__getitem__ index_select gather take_along_dim pixel_shuffle pixel_unshuffle"
).split()  # fmt: skip
# The positions that are taken along a dimension are data, which the rule does not look at.
LOOSE = ("gather", "take_along_dim")
OPS = [op for op in op_db if op.name in EXACT and op.supports_dtype(D, "cpu")]
_MOST = 3000  # entries of a sample


def subsets(ndim: int):
    dims = range(-ndim, 0)
    return itertools.chain.from_iterable(itertools.combinations(dims, k) for k in range(ndim + 1))


def groups(shape: tuple[int, ...], dims: tuple[int, ...]) -> list[int]:
    """For each entry, flattened, the number of its group: which maximum the norm takes it to."""
    inside = {d % len(shape) for d in dims}
    t = torch.zeros(shape, dtype=torch.long)
    for d, n in enumerate(shape):
        if d not in inside:
            t = t * n + torch.arange(n).reshape(n, *[1] * (len(shape) - d - 1))
    return t.reshape(-1).tolist()


def attained(source: torch.Tensor, in_shape: tuple[int, ...], in_dims: tuple, out_dims: tuple) -> float:
    """The largest ``rms_out(f(x)) / rms_in(x)`` for the f whose output entries are the input's at `source` (-1: no entry of it)."""
    of_input, of_output = groups(in_shape, in_dims), groups(tuple(source.shape), out_dims)
    occurrences: dict[int, Counter] = defaultdict(Counter)
    for group, entry in zip(of_output, source.reshape(-1).long().tolist(), strict=True):
        if entry >= 0:
            occurrences[group][entry] += 1
    n_in, n_out = len(of_input) / max(len(set(of_input)), 1), len(of_output) / max(len(set(of_output)), 1)
    largest = 0.0
    for counts in occurrences.values():
        most: dict[int, int] = defaultdict(int)
        for entry, count in counts.items():
            most[of_input[entry]] = max(most[of_input[entry]], count)
        largest = max(largest, sum(most.values()) * n_in / n_out)
    return largest**0.5


def call(op: Any, sample: Any, arguments: list) -> Any:
    """The sample's call with its tensors replaced."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    replaced = iter(arguments)
    leaves = [next(replaced) if is_real(v) else v for v in leaves]
    given, args, kwargs = tree_unflatten(leaves, structure)
    return op.op(given, *args, **kwargs)


def is_real(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.is_floating_point()


def check_slot(op: Any, sample: Any, tensors: list, slot: int, dims: tuple) -> float:
    """The value and sensitivity claimed for one tensor of a sample (the others 0); attained / claimed at the least."""
    numbered = torch.arange(tensors[slot].numel(), dtype=D).reshape(tensors[slot].shape)
    arguments = []
    for i, t in enumerate(tensors):
        over = dims if i == slot else tuple(d for d in dims if -d <= t.ndim)
        backing = numbered if i == slot else torch.full(t.shape, -1.0, dtype=D)
        size = float(i == slot and t.numel() > 0)
        arguments.append(RMSTensor(size, backing=backing, elem_dims=over, perturbation_size=size))
    lowest = 1.0
    for out in tree_leaves(call(op, sample, arguments)):
        if not isinstance(out, NormedTensor) or not out.numel():
            continue
        assert isinstance(out, RMSTensor | LinfTensor)
        most = attained(out.backing, tuple(numbered.shape), dims, out.elem_dims)
        for claimed in (out.norm_size.item(), out.perturbation_size.item()):
            assert most <= claimed * (1 + 1e-12), (sample, dims, out)
            if claimed:
                lowest = min(lowest, most / claimed)
    return lowest


def check_sample(op: Any, sample: Any, tensors: list, dims: tuple) -> None:
    """The claim for the sample itself."""
    normed = [RMSTensor.of(t.detach(), tuple(d for d in dims if -d <= t.ndim)) for t in tensors]
    for out, real in zip(tree_leaves(call(op, sample, normed)), tree_leaves(call(op, sample, tensors)), strict=True):
        if isinstance(out, NormedTensor) and out.numel():
            assert torch.equal(out.backing, real)
            assert norm(type(out), real, out.elem_dims) <= out.norm_size * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}.{op.variant_test_name}".strip("."))
def test_claims_are_what_is_attained(op):
    lowest, checked = 1.0, 0
    for sample in op.sample_inputs("cpu", D):
        tensors = [v for v in tree_leaves((sample.input, sample.args, sample.kwargs)) if is_real(v)]
        if not tensors or max(t.numel() for t in tensors) > _MOST:
            continue
        for dims in subsets(max(t.ndim for t in tensors)):
            for slot, t in enumerate(tensors):
                if any(-d > t.ndim for d in dims):
                    continue
                try:
                    lowest = min(lowest, check_slot(op, sample, tensors, slot, dims))
                    checked += 1
                except (MissingNormRuleError, NormMismatchError, UnsupportedOpError):
                    continue
            try:
                check_sample(op, sample, tensors, dims)
            except (MissingNormRuleError, NormMismatchError, UnsupportedOpError):
                continue
    assert checked
    if op.name not in LOOSE:
        assert lowest > 1 - 1e-9, lowest


def test_the_witness_of_a_slice_is_its_factor():
    source = torch.tensor([[0, 1], [4, 5]])
    assert attained(source, (2, 4), (-1,), (-1,)) == pytest.approx(2**0.5)
    assert attained(source, (2, 4), (), ()) == 1.0
    assert attained(source, (2, 4), (-1,), ()) == 2.0
