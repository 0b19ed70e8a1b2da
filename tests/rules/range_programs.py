"""Random programs of single operations on normed tensors, for tests of what is known of entries."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from thunder_norm import RMSTensor
from thunder_norm.errors import NormMismatchError


def random_results(
    pick: random.Random,
    found: list,
    unary: Mapping[str, Callable],
    binary: Mapping[str, Callable],
    most: tuple[int, int],
    share: float,
) -> Iterator[tuple[str, RMSTensor]]:
    """The names of operations, and what they make of tensors in `found`, which gets the results; what is refused is left out.

    Args:
        pick: draws the program.
        most: the fewest and the most operations.
        share: of those on one tensor.
    """
    for _ in range(pick.randint(*most)):
        is_unary = pick.random() < share
        name = pick.choice(sorted(unary if is_unary else binary))
        try:
            y = unary[name](pick.choice(found)) if is_unary else binary[name](*pick.choices(found, k=2))
        except (NormMismatchError, RuntimeError, IndexError):
            continue
        if isinstance(y, RMSTensor) and y.backing.numel():
            yield name, y
            found.append(y)
