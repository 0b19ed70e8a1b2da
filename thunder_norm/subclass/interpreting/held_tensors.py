"""Tensors of the program that a `torch.autograd.Function` is given inside of others: what a function closes over, a ``partial`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.subclass.backward.recipes import Call, NotMakeableError, Step, holds_proxies
from thunder_norm.subclass.backward.tensor_hooks import FunctionRecipe
from thunder_norm.tracing.locations import location_of_user
from thunder.core.proxies import Proxy


@dataclass(frozen=True)
class Held:
    """What some arguments hold, and how to make others of them that hold something in its place.

    Attributes:
        proxies: what stands for the tensors and numbers.
    """

    proxies: Sequence[Proxy]
    _positions: Sequence[int]  # of the arguments that hold them, among all leaves
    _made: Step

    def apply(self, function: type[torch.autograd.Function], args: tuple, kwargs: dict, values: Sequence[Any]) -> Any:
        """``function.apply`` of these arguments, that hold these values.

        Raises:
            UnsupportedOpError: it changes a variable or an object that the program has made, of which they hold another.
        """
        leaves, spec = tree_flatten((args, kwargs))
        call = Call(dict(zip((p.name for p in self.proxies), values, strict=True)))
        made = self._made(call)
        for position, value in zip(self._positions, made, strict=True):
            leaves[position] = value
        own = set(map(id, call.made.values()))
        places = [p for p in Reachable((made,)).places if (id(p.owner) if p.cell is None else id(p.cell)) in own]
        args, kwargs = tree_unflatten(leaves, spec)
        result = function.apply(*args, **kwargs)
        if changed := [p for p in places if p.is_changed]:
            raise UnsupportedOpError(
                with_details(
                    f"{function.__name__}.apply is given an object that changes a {type(changed[0].owner).__name__} of the program's",
                    at=location_of_user(),
                    why="torch runs it as a whole, beside the program, and not in each call",
                    instead="let it return what it computes",
                )
            )
        return result


def held_by(function: type[torch.autograd.Function], arguments: Any) -> Held | None:
    """What the arguments of an autograd function hold; None if they hold nothing of the trace.

    Raises:
        UnsupportedOpError: in an object that nobody knows how to make.
    """
    leaves = tree_flatten(arguments)[0]
    positions = [i for i, v in enumerate(leaves) if not isinstance(v, Proxy) and holds_proxies(v)]
    if not positions:
        return None
    recipe = FunctionRecipe(shares=False)
    try:
        step = recipe.of(tuple(leaves[i] for i in positions))
    except NotMakeableError as e:
        raise refused(function, e.value) from None
    return Held(list(recipe.arguments.values()), positions, step)


def refused(function: type[torch.autograd.Function], holder: Any) -> UnsupportedOpError:
    """The error for what holds tensors of the trace where torch would not see them."""
    name = getattr(holder, "__qualname__", None)
    return UnsupportedOpError(
        with_details(
            f"{function.__name__}.apply is given an object that holds tensors of the traced program",
            object=f"a {type(holder).__name__}" + (f", {name}" if name else ""),
            at=location_of_user(),
            why="torch runs the function as a whole, and knows the tensors among its arguments alone",
            instead="give it the tensors as arguments, or call it outside of the jitted function",
        )
    )
