"""What the arguments of a norm rule accept, as its annotations say."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.core import conversions
from thunder_norm.core.context import norm_counts
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.trees import flat_tensors


@functools.cache
def _code(annotation: str) -> types.CodeType:
    return compile(annotation, "<annotation>", "eval")


def hints_of(rule: Callable) -> dict[str, Any]:
    """The annotations of a rule, as ``typing.get_type_hints`` gives them.

    Of the library's own, which are texts, each text is compiled once: a thousand rules share a few, and compiling takes longest.
    """
    own = getattr(rule, "__annotations__", {})
    is_of_library = (getattr(rule, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]
    if not is_of_library or not all(type(text) is str for text in own.values()):
        return typing.get_type_hints(rule)
    names = inspect.unwrap(rule).__globals__  # type: ignore[attr-defined]
    found = {name: eval(_code(text), names) for name, text in own.items()}  # noqa: S307 - as typing does
    return {name: type(None) if hint is None else hint for name, hint in found.items()}


@dataclass(frozen=True)
class Slot:
    """What one argument of a rule accepts, read from its annotation."""

    kinds: tuple[type[NormedTensor], ...] = ()
    is_list: bool = False
    is_optional: bool = False
    accepts_plain: bool = False  # annotated torch.Tensor: taken as it is, see `takes_as_it_is`
    accepts_moving: bool = True  # so are parameters
    accepts_number: bool = False
    is_unconstrained: bool = False  # no annotation of ours: any non-tensor

    @staticmethod
    def of(annotation: Any) -> Slot:
        """Parse an annotation."""
        if annotation is inspect.Parameter.empty or annotation is Any:
            return Slot(is_unconstrained=True)
        members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
        kinds, found = [], {"is_list": False, "is_optional": False, "accepts_plain": False, "accepts_number": False}
        is_ours = has_other = False
        for member in members:
            origin = typing.get_origin(member)
            if member is type(None):
                found["is_optional"] = True
            elif isinstance(member, type) and issubclass(member, NormedTensor):
                kinds.append(member)
                is_ours = True
            elif member is torch.Tensor:
                found["accepts_plain"] = is_ours = True
            elif member in (int, float, bool):
                found["accepts_number"] = is_ours = True
            elif isinstance(origin, type) and issubclass(origin, Sequence) and typing.get_args(member):
                inner = Slot.of(typing.get_args(member)[0])
                if inner.kinds or inner.accepts_plain:
                    kinds.extend(inner.kinds)
                    found["is_list"] = is_ours = True
                    found["accepts_plain"] |= inner.accepts_plain
                else:
                    has_other = True
            else:
                has_other = True
        return Slot(tuple(kinds), is_unconstrained=has_other or not is_ours, **found)

    def takes_as_it_is(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is passed as it is: where only constants are, none of which the norm counts, unless any tensor will do."""
        return self.accepts_plain and (self.accepts_moving or NormedTensor in self.kinds or not norm_counts(t))

    def takes_constant(self, t: NormedTensor) -> bool:
        """Whether a normed tensor is passed as the plain one that it is whatever its inputs are: labels by ``torch.ones_like(x)``."""
        entries = t._range
        return self.accepts_plain and not self.kinds and entries is not None and entries.low == entries.high

    def fits(self, value: Any, *, converting: bool) -> bool:
        """Whether `value` may be passed, as it is or (if `converting`) after a sound conversion or a lift."""
        if isinstance(value, NormedTensor):
            if isinstance(value, self.kinds) or (converting and self.takes_constant(value)):
                return True
            return converting and any(conversions.can_convert(value, kind) for kind in self.kinds)
        if value is None:
            return self.is_optional or self.is_unconstrained
        if isinstance(value, list | tuple) and flat_tensors(value):
            # a list that may hold plain tensors holds indices: numbers, slices and None go along
            element = Slot(
                self.kinds,
                accepts_plain=self.accepts_plain,
                accepts_moving=self.accepts_moving,
                accepts_number=self.accepts_number,
                is_unconstrained=self.accepts_plain,
            )
            return self.is_list and all(element.fits(v, converting=converting) for v in value)
        if isinstance(value, torch.Tensor):
            return self.takes_as_it_is(value) or (bool(self.kinds) and has_norm(value))
        if isinstance(value, bool | int | float):
            return self.accepts_number or self.is_unconstrained
        return self.is_unconstrained


def _is_union(annotation: Any) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
