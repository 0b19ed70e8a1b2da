"""Classes of Python's standard library that are given tensors hold them in traces as in eager mode."""

import collections
import collections.abc
import functools
import itertools
import operator

import pytest
import torch

from thunder_norm.transforms import SubclassTransform, grad, vmap
import thunder


def deque(x):
    d = collections.deque([x], maxlen=2)
    d.append(x * 2)
    d.appendleft(x * 3)
    return d[0] + d[-1] + len(d)


def generic_alias(x):
    def called(f: collections.abc.Callable[[torch.Tensor], torch.Tensor], t: list[int]) -> collections.abc.Callable[[int], str]:
        return f(x) * t[0]

    return called(torch.sin, [2])


PROGRAMS = {
    "generic alias": generic_alias,
    "deque": deque,
    "partial": lambda x: (
        functools.partial(torch.mul, x)(x.cos()) + functools.partial(functools.partial(torch.add, x, alpha=2), x)()
    ),
    "chain": lambda x: sum(itertools.chain([x], [x * 2])),
    "product": lambda x: sum(a * b for a, b in itertools.product([x, x + 1], [1, 2])),
    "map and filter": lambda x: sum(map(lambda a: a * 2, [x, x])) + list(filter(lambda a: True, [x]))[0],
    "itemgetter": lambda x: operator.itemgetter(1)([1, x]) * 2,
    "accumulate": lambda x: list(itertools.islice(itertools.count(1), 3))[2] * x + list(itertools.accumulate([x, x * x]))[-1],
    "counter": lambda x: x * collections.Counter("aab")["a"] + collections.OrderedDict(a=x)["a"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_standard_library_as_in_eager_mode(name):
    f, x = PROGRAMS[name], torch.tensor([1.0, -2.0])
    torch.testing.assert_close(thunder.jit(f, transforms=[SubclassTransform()])(x), f(x))
    torch.testing.assert_close(grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: f(x).sum())(x))
    torch.testing.assert_close(vmap(f)(x), torch.func.vmap(f)(x))
