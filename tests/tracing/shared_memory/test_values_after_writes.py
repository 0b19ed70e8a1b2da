"""Values that a program asks for after it has written into plain tensors: drawn programs of views, writes and questions, against eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.seeds import LONG, crossed, seeded
from thunder_norm.errors import DataDependentError, UnsupportedOpError
from thunder_norm.transforms import NormTransform, SubclassTransform
import thunder

VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t.reshape(-1),
    lambda t: t.transpose(0, -1),
    lambda t: t.unsqueeze(0),
    lambda t: t.to(t.dtype),
    lambda t: t.flatten(),
    lambda t: t.detach(),
    lambda t: t[0],
    lambda t: t.diagonal() if t.dim() > 1 else t[1:],
]
COMPUTED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t * 2 - 1,
    lambda t: t.clone(),
    lambda t: t.cumsum(-1),
    lambda t: torch.empty_like(t).fill_(0.5),
    lambda t: torch.zeros(3, 4),
    lambda t: t.contiguous(),
]
WRITES: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.add_(1.5),
    lambda t: t.mul_(-1),
    lambda t: t.fill_(0.25),
    lambda t: t.copy_(t * t - 2),
    lambda t: t.clamp_(-1, 1),
    lambda t: t.__setitem__(0, -3.0),
    lambda t: t.__setitem__(t > 0, 0.5),
    lambda t: t.zero_(),
]
QUESTIONS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: bool(t.sum() > 0),
    lambda t: int((t > 0).sum()),
    lambda t: len(t[t > 0.3]),
    lambda t: t.nonzero().shape[0],
    lambda t: t.max().item() > 1,
]


def drawn(seed: int) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """A program of two inputs that asks three times or more; the answers decide nothing, but are in its result."""
    draw = random.Random(seeded(seed))
    kinds = draw.choices((VIEWS, COMPUTED, WRITES, QUESTIONS), (3, 2, 4, 3), k=14) + [QUESTIONS] * 2
    steps = [(kind, draw.choice(kind), draw.random()) for kind in kinds]

    def program(x, y):
        held, answers = [x, y], []
        for kind, step, which in steps:
            t = held[int(which * len(held))]
            if kind is QUESTIONS:
                answers.append(step(t))
            elif t.dim() > 0 and t.numel() > 0:
                found = step(t)
                if kind is not WRITES:
                    held.append(found)
        return answers, [t * 2 for t in held]

    return program


@pytest.mark.parametrize(("transform", "seeds"), [(NormTransform, slice(0, None, 2)), (SubclassTransform, slice(1, None, 2))])
def test_values_after_writes_are_eagers(transform, seeds):
    """Of programs that are drawn, by turns."""
    right, programs = 0, range(30) if LONG else range(10)[seeds]
    for seed in programs:
        program = drawn(seed)
        jf = thunder.jit(program, transforms=[transform()])
        for call in range(3):
            torch.manual_seed(seeded(call))
            x, y = torch.randn(3, 4), torch.randn(2, 3)
            given, expected = (x.clone(), y.clone()), (x.clone(), y.clone())
            try:
                found = jf(*given)
            except (DataDependentError, UnsupportedOpError):
                continue
            wanted = program(*expected)
            assert found[0] == wanted[0]
            torch.testing.assert_close((found[1], given), (wanted[1], expected))
            right += 1
    assert right > 1.5 * len(programs)  # some are refused


@pytest.mark.parametrize("transform", [NormTransform, SubclassTransform])
def test_masks_that_a_program_fills_decide(transform):
    """The patches of UDOP: a mask filled at places that are computed, rows of which select; strides of detectors made by ``empty().fill_``."""

    def program(x, places):
        mask = torch.full((2, 4), True)
        stride = torch.empty((), dtype=torch.int64).fill_(2)
        mask[places[0], places[1]] = False
        boxes = torch.zeros(2, 4, 2)
        for i, row in enumerate(boxes):
            row.copy_(x[i] * stride)
        return [row[m] for row, m in zip(boxes, mask, strict=True)], boxes[torch.where(boxes.sum(-1) > 0)]

    jf = thunder.jit(program, transforms=[transform()])
    torch.manual_seed(seeded(0))
    for places in ([[0, 1], [2, 2]], [[0, 0], [1, 3]], [[1, 1], [0, 0]]):
        x = torch.randn(2, 4, 2)
        torch.testing.assert_close(jf(x, torch.tensor(places)), program(x, torch.tensor(places)))


VIEWS_OF_MATRICES = {
    "diagonal": lambda t: t.diagonal(1),
    "diagonal of a view": lambda t: t.view(3, 2, 2).diagonal(dim1=0, dim2=2),
    "windows": lambda t: t.unfold(1, 2, 2),
    "strides": lambda t: t.as_strided((2, 2), (4, 1)),
    "parts": lambda t: t.hsplit(2)[1],
    "rows": lambda t: t.unbind(0)[2],
    "adjoint": lambda t: t.adjoint()[1],
    "other dimensions": lambda t: t.unflatten(1, (2, 2)).movedim(0, 2)[0],
    "complex numbers": lambda t: torch.view_as_complex(t.view(3, 2, 2)).imag,
}


@pytest.mark.parametrize(("name", "make"), crossed(VIEWS_OF_MATRICES, [lambda x: x * 1, lambda x: torch.zeros(3, 4)]))
def test_what_is_written_through_a_view_decides_and_what_a_view_reads(name, make):
    def program(x):
        through, under = make(x), make(x)
        view, read = VIEWS_OF_MATRICES[name](through), VIEWS_OF_MATRICES[name](under)
        view.copy_(x.sum().expand(view.shape) * 5)
        under.copy_(x.sum().expand(3, 4))
        return bool(through.sum() > 0), bool(read.sum() > 0)

    jf = thunder.jit(program, transforms=[SubclassTransform()])
    torch.manual_seed(seeded(0))
    x = torch.randn(3, 4).abs() + 1
    for given in (x, -x, x * 2):
        assert jf(given) == program(given)


PIECES: list[Any] = [
    0,
    1,
    -1,
    (0, 0),
    (1, -1),
    slice(1),
    slice(1, None),
    (slice(None), 0),
    (..., slice(1, None)),
    (None, 1),
    ([0, 1], [0, 1]),
    True,
]


@pytest.mark.parametrize("seed", range(12))
def test_memory_that_is_written_piece_by_piece_decides_once_all_of_it_is(seed):
    """Which tensors of sizes of levels are made of in detectors (D-FINE): `torch.empty`, and a number at each of its places."""
    draw = random.Random(seeded(seed))
    pieces = draw.sample(PIECES, 3)
    written = torch.zeros(2, 2, dtype=torch.bool)
    for piece in pieces:
        written[piece] = True

    def program(x):
        sizes = torch.empty(2, 2)
        for number, piece in enumerate(pieces):
            sizes[piece] = number + x[0, 0]
        return x * 2 if sizes.sum() > 0 else x[:1]

    jf = thunder.jit(program, transforms=[NormTransform()])
    x = torch.ones(2, 2)
    if written.all():
        for given in (x, -4 * x):
            assert torch.equal(jf(given), program(given))
    else:
        with pytest.raises(DataDependentError, match="nothing was written"):
            jf(x)


def read_between(x):
    s = torch.empty(2)
    s[0] = 1.0
    read = s.sum()
    s[1] = 1.0
    return read


def written_with_itself(x):
    s = torch.empty(2)
    s[0] = 1.0
    s[1] = s[1] * 0
    return s


def written_back(x):
    s = torch.empty(2)
    before = s.clone()
    s[:] = 1.0
    s.copy_(before)
    return s


def written_where_values_say(x):
    s = torch.empty(2)
    s[x > 0] = 1.0
    return s


@pytest.mark.parametrize("make", [read_between, written_with_itself, written_back, written_where_values_say])
def test_memory_that_is_read_before_it_is_written_is_refused(make):
    with pytest.raises(DataDependentError, match="nothing was written"):
        thunder.jit(lambda x: x if make(x).sum() > 0 else -x, transforms=[NormTransform()])(torch.ones(2))
