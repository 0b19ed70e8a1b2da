"""Dicts of a traced program keep the first of equal keys, as Python's do."""

from __future__ import annotations

import collections

import pytest
import torch

from thunder_norm.transforms import NormTransform
import thunder


class Named:
    def __init__(self, name, value):
        self.name, self.value = name, value

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


def set_later(x):
    made = {1: "a"}
    made[True] = "b"
    made[1.0] = x
    return list(made), list(made.items())


def put_together(x):
    made = {1: "a"}
    made.update({True: "b"})
    made |= {1.0: "c"}
    made.setdefault(True, 5)
    return list(made), list({**made, True: x}), list(dict([(1, 2), (True, 3)]))


def comprehended(x):
    return list({k: x for k in (1, True, 2)}), list({0: 1, **{False: 2}}), list(dict.fromkeys([1, True, 2, 2.0]))


def of_other_classes(x):
    ordered, missing = collections.OrderedDict([(1, 2)]), collections.defaultdict(list)
    ordered[True] = x
    for key in (1, True, 1.0):
        missing[key].append(x)
    return list(ordered), list(missing), list(collections.Counter([1, True, 1.0]))


def of_what_the_program_makes(x):
    made = {Named("a", 1): x}
    made[Named("a", 2)] = x * 2
    return [key.value for key in made], [(key.value, value) for key, value in made.items()]


def taken_out_between(x):
    made = {1: x}
    del made[1]
    made[True] = x * 2
    return list(made)


@pytest.mark.parametrize(
    "function", [set_later, put_together, comprehended, of_other_classes, of_what_the_program_makes, taken_out_between]
)
def test_the_first_of_equal_keys_is_kept(function):
    x = torch.tensor([1.0, 2.0])
    assert repr(thunder.jit(function, transforms=[NormTransform()])(x)) == repr(function(x))
