"""`as_strided` where what it reads is windows, slices or repetitions of the dimensions of its input: written as those."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor

from thunder_norm.core.programs import written_as
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMismatchError, with_details


@dataclass
class _Line:
    """Dimensions of the input that lie in memory as one, and the dimensions of the result that run along it.

    Attributes:
        dims: of the input, outermost first.
        extent: the number of its entries.
        stride: from one to the next, in memory.
        read: dimensions of the result with their steps along the line, longest step first.
    """

    dims: tuple[int, ...]
    extent: int
    stride: int
    read: list[tuple[int, int]] = field(default_factory=list)


@written_as(torch.as_strided, torch.Tensor.as_strided)
def as_strided(
    input: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Views of `input` that read the same entries; overlapping windows are `unfold`.

    Raises:
        NormMismatchError: it reads entries in another way, of which no norm is known.
    """
    memory = input.backing if isinstance(input, NormedTensor) else input
    lines = None
    is_at_input = storage_offset is None or (not isinstance(memory, FakeTensor) and storage_offset == memory.storage_offset())
    if is_at_input and 0 not in size:
        lines = next(_found(memory, size, stride), None)
    if lines is None:
        raise NormMismatchError(
            with_details(
                f"as_strided with sizes {tuple(size)} and strides {tuple(stride)}",
                why="it reads entries in a way of which no norm of the result is known",
                instead="use slices, unfold or reshape",
            )
        )
    return _read(input, lines, size, stride)


def _found(input: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> Iterator[list[_Line]]:
    """Lines of the input along which all dimensions of the result run; as many as can be are dimensions as they are."""
    dims = [d for d in range(input.ndim) if input.shape[d] > 1]
    wanted = [i for i, n in enumerate(size) if n > 1 and stride[i] != 0]
    kept: dict[int, int] = {}
    for i in wanted:
        same = (d for d in dims if (input.shape[d], input.stride(d)) == (size[i], stride[i]) and d not in kept)
        d = next(same, None)
        if d is not None:
            kept[d] = i
    for count in range(len(kept), -1, -1):
        for chosen in itertools.combinations(kept, count):
            own = [_Line((d,), input.shape[d], input.stride(d), [(kept[d], 1)]) for d in chosen]
            merged = _lines(input, [d for d in dims if d not in chosen])
            rest = [i for i in wanted if i not in {kept[d] for d in chosen}]
            if _placed(rest, merged, size, stride):
                yield own + merged


def _lines(input: torch.Tensor, dims: list[int]) -> list[_Line]:
    lines: list[_Line] = []
    for d in sorted(dims, key=input.stride, reverse=True):
        n, step = input.shape[d], input.stride(d)
        if lines and lines[-1].stride == n * step:
            last = lines.pop()
            lines.append(_Line((*last.dims, d), last.extent * n, step))
        else:
            lines.append(_Line((d,), n, step))
    return lines


def _placed(wanted: list[int], lines: list[_Line], size: Sequence[int], stride: Sequence[int]) -> bool:
    for i in sorted(wanted, key=lambda i: stride[i], reverse=True):
        line = next((line for line in lines if line.stride > 0 and stride[i] % line.stride == 0), None)
        if line is None:
            return False
        line.read.append((i, stride[i] // line.stride))
    return all(sum((size[i] - 1) * step for i, step in line.read) < line.extent for line in lines)


def _read(input: torch.Tensor, lines: list[_Line], size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    ones = [d for d in range(input.ndim) if input.shape[d] == 1]
    y = input.permute(*ones, *[d for line in lines for d in line.dims]).reshape([line.extent for line in lines])
    order: list[int] = []
    for line in lines:  # each takes the first dimension away and adds those of the result at the end
        y = y.movedim(0, -1)
        for k, (i, step) in enumerate(line.read):
            rest = line.read[k + 1 :]
            if rest:
                y = y.unfold(-1, 1 + sum((size[j] - 1) * s for j, s in rest), step).narrow(-2, 0, size[i])
            else:
                y = y[..., : (size[i] - 1) * step + 1 : step]
            order.append(i)
        if not line.read:
            y = y.select(-1, 0)
    y = y.permute([order.index(i) for i in sorted(order)])
    for i in range(len(size)):
        if i not in order:
            y = y.unsqueeze(i)
    return y.expand(tuple(size))
