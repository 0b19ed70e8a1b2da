"""Random programs on DTensors: operations one after the other, on tensors of random placements, each on what one of those before gave."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.seeds import seeded
from tests.subclass.dtensor_programs import Program, outcome, runs

SHAPES = (4, 6), (5, 3), (4, 4), (2, 4, 6)


class Draw:
    """Choices of one operation, the same in each run of its program: numbers from 0 to 1, which a trace takes as they are."""

    def __init__(self, random_numbers: random.Random):
        self._numbers = [random_numbers.random() for _ in range(8)]

    def started(self) -> Draw:
        """The choices, from the first on."""
        self._next = 0
        return self

    def choice(self, values: Sequence[Any]) -> Any:
        self._next += 1
        return values[int(self._numbers[self._next - 1] * len(values))]

    def dim(self, x: torch.Tensor) -> int:
        return self.choice(range(x.ndim))

    def placements(self, ndim: int, mesh: DeviceMesh) -> list[Any]:
        return [self.choice([Replicate(), *[Shard(d) for d in range(ndim)]]) for _ in range(mesh.ndim)]


def _from_local(x: DTensor, local: torch.Tensor, placements: Any) -> DTensor:
    return DTensor.from_local(local, x.device_mesh, placements)


def _with_a_row(x: DTensor) -> DTensor:
    z = x.clone()
    z[0] = 1.0
    return z


def _by_placement(x: DTensor) -> DTensor:
    return x * x.device_mesh.size() if x.placements[0].is_shard() else x - len(x.placements)


Operation = Callable[[Draw, Any, Any], Any]
OPERATIONS: tuple[Operation, ...] = (
    *(
        lambda d, x, y, f=f: f(x)
        for f in (torch.relu, F.gelu, torch.tanh, torch.neg, torch.exp, torch.abs, torch.clone, torch.square)
    ),
    *(lambda d, x, y, f=f: f(x, y) for f in (torch.add, torch.sub, torch.mul, torch.maximum, F.linear)),
    *(
        lambda d, x, y, f=f: f(x, d.dim(x))
        for f in (torch.softmax, torch.cumsum, torch.logsumexp, torch.prod, torch.std, torch.unsqueeze)
    ),
    *(
        lambda d, x, y, f=f: f(x, d.dim(x), keepdim=d.choice((False, True)))
        for f in (torch.sum, torch.mean, torch.amax, torch.var)
    ),
    *(lambda d, x, y, f=f: f([x, y], d.dim(x)) for f in (torch.cat, torch.stack)),
    *(lambda d, x, y, f=f: f(x, (x.shape[-1],)) for f in (F.layer_norm, F.rms_norm)),
    *(lambda d, x, y: x.redistribute(placements=d.placements(x.ndim, x.device_mesh)),) * 5,
    lambda d, x, y: _from_local(x, x.to_local() * 2, x.placements),
    lambda d, x, y: _from_local(x, x.to_local().relu(), [Partial()] * x.device_mesh.ndim),
    lambda d, x, y: _from_local(x, x.full_tensor(), [Replicate()] * x.device_mesh.ndim),
    lambda d, x, y: _by_placement(x),
    lambda d, x, y: x * x.to_local().shape[0],
    lambda d, x, y: x @ y.mT,
    lambda d, x, y: x.mT.contiguous(),
    lambda d, x, y: x.flatten(),
    lambda d, x, y: x.unflatten(-1, (1, -1)),
    lambda d, x, y: x.movedim(0, -1),
    lambda d, x, y: d.choice(x.chunk(2, d.dim(x))),
    lambda d, x, y: d.choice(x.split([1, x.shape[0] - 1])),
    lambda d, x, y: x.select(d.dim(x), 0),
    lambda d, x, y: x.narrow(d.dim(x), 1, 1),
    lambda d, x, y: x.unsqueeze(0).expand(2, *x.shape),
    lambda d, x, y: x.roll(1, d.dim(x)),
    lambda d, x, y: x.sort(d.dim(x)).values,
    lambda d, x, y: x.topk(1, d.dim(x)).values,
    lambda d, x, y: F.pad(x, (0, 1)),
    lambda d, x, y: torch.where(x > 0, x, y),
    lambda d, x, y: x.masked_fill(x > 0, 0.0).tril(),
    lambda d, x, y: x * (x.argmax(d.dim(x), keepdim=True) == 0),
    lambda d, x, y: x / (1 + x.abs().sum(-1, keepdim=True)),
    lambda d, x, y: torch.einsum("...i,...i->...", x, y),
    lambda d, x, y: torch.ones_like(x) * x.mean(),
    lambda d, x, y: x.detach() * x.double(),
    lambda d, x, y: (x + 1).add_(y).relu_(),
    lambda d, x, y: _with_a_row(x),
    lambda d, x, y: F.scaled_dot_product_attention(*[x.reshape(1, 1, -1, x.shape[-1])] * 3, is_causal=d.choice((False, True))),
)
ENDS: tuple[Callable[[Any], torch.Tensor], ...] = (
    *(lambda z: z,) * 3,
    DTensor.full_tensor,
    DTensor.to_local,
    DTensor.sum,
    lambda z: z.mean().full_tensor(),
)


def drawn(number: int, mesh: DeviceMesh) -> Program:
    """The program of a number, on one or two tensors of one shape."""
    numbers = random.Random(seeded(number))
    shape, count = numbers.choice(SHAPES), numbers.choice((1, 2))
    given = [(Draw(numbers).started().placements(len(shape), mesh), numbers.random() < 0.7) for _ in range(count)]
    steps = [
        (numbers.choice(OPERATIONS), numbers.random(), numbers.random(), Draw(numbers)) for _ in range(numbers.randrange(2, 6))
    ]
    end = numbers.choice(ENDS)

    def program(*inputs: DTensor) -> torch.Tensor:
        values = list(inputs)
        for operation, first, second, draw in steps:
            x, y = (values[int(u * len(values))] for u in (first, second))
            values.append(operation(draw.started(), x, y))
        return end(values[-1])

    def inputs() -> tuple[DTensor, ...]:
        made = [distribute_tensor(torch.randn(shape), mesh, placements).detach() for placements, _ in given]
        return tuple(x.requires_grad_(requires_grad) for x, (_, requires_grad) in zip(made, given, strict=True))

    return program, inputs


def compare_drawn(numbers: range, mesh_shape: tuple[int, ...]) -> dict[int, Any]:
    """Of each of these programs that eager mode runs how often it was traced and served from the cache, or what went wrong."""
    mesh = init_device_mesh("cpu", mesh_shape)
    found: dict[int, Any] = {}
    for number in numbers:
        program = drawn(number, mesh)
        if runs(program):
            found[number] = outcome(program)
    return found
