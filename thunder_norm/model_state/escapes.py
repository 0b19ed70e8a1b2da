"""What must not leave: tensors without data that stand for others while a program is analysed, traced or differentiated.

A fake tensor, a proxy or a meta tensor that a caller gets hold of fails much later and elsewhere, or gives numbers that are none.
Where values leave us (results, gradients, attributes of the user's modules) they are looked at, types only, which costs little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_norm.errors import EscapeError, with_details
from thunder_norm.model_state.reachable import ATOMS
from thunder_norm.wrapper_classes import flattened, inner_tensors, is_wrapper
from thunder.core.baseutils import ProxyInterface

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_ATOMS = frozenset(ATOMS)

# Whether a stand-in may leave: one that came in from the caller, or a meta tensor that the program asks for.
Allowed = Callable[[Any], bool]


def stand_in(value: Any) -> str | None:
    """What kind of stand-in a value is, "fake tensor", "proxy" or "meta tensor"; of a wrapper, what it holds; None if it is none."""
    if isinstance(value, ProxyInterface):
        return "proxy"
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, FakeTensor):
        return "fake tensor"
    if is_wrapper(value):
        found = (stand_in(t) for t in flattened(value)[0].values())
        return next((f for f in found if f is not None), None)
    return "meta tensor" if value.is_meta else None


def stand_ins(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """``(path, kind, stand-in)`` of each stand-in in nested lists, tuples, dicts, sets and dataclasses."""
    kind = type(value)
    if kind in _ATOMS:
        return
    if isinstance(value, torch.Tensor | ProxyInterface):
        found = stand_in(value)
        if found is not None:
            yield path, found, value
    elif isinstance(value, list | tuple | set | frozenset):
        fields = getattr(kind, "_fields", None)
        for i, v in enumerate(value):
            yield from stand_ins(v, f"{path}[{i}]" if fields is None else f"{path}.{fields[i]}")
    elif isinstance(value, dict):
        for key, v in value.items():
            yield from stand_ins(v, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from stand_ins(getattr(value, field.name, None), f"{path}.{field.name}")


def check_nothing_escapes(value: Any, what: str, *, allowed: Allowed = lambda v: False) -> None:
    """Refuse to hand out stand-ins.

    Args:
        value: what is to leave, in any nested structure.
        what: how the caller knows it: "the result", "the gradient of 'fc.weight'".
        allowed: whether a stand-in may leave, because it came in.

    Raises:
        EscapeError: there is one; says where.
    """
    for path, kind, found in stand_ins(value):
        if not allowed(found):
            raise escape(f"{what}{path}", kind, found)


def tracing_mode(kind: type[FakeTensorMode] = FakeTensorMode) -> FakeTensorMode:
    """A mode for the fakes of a trace, which are known by it: they may not leave, those of a caller may."""
    mode = kind(allow_non_fake_inputs=True)
    setattr(mode, _IS_OURS, True)
    return mode


_IS_OURS = "_thunder_norm_is_ours"


def _may_leave(value: Any) -> bool:
    """Whether a result of a compiled program may be this stand-in: what the computation made of fake or meta inputs."""
    if isinstance(value, FakeTensor):
        return not getattr(value.fake_mode, _IS_OURS, False)
    return isinstance(value, torch.Tensor) and stand_in(value) == "meta tensor"


def check_inner(wrapper: torch.Tensor, names: Sequence[str], *what: str) -> None:
    """Refuse to hand out a wrapper with a fake tensor inside, by its inner tensors' types: cheap enough for every call.

    Raises:
        EscapeError: the class put one there itself (what Thunder computes is real): a tensor that it keeps since a trace was acquired.
            `what` it is, in parts, is put together only then.
    """
    found = inner_tensors(wrapper, names)
    for t in found:
        if type(t) not in _PLAIN:
            break
    else:
        return
    for name, inner in zip(names, found, strict=True):
        check_nothing_escapes(inner, f"{''.join(what)}.{name}", allowed=_may_leave)


def check_results(*tensors: Any) -> None:
    """Refuse to hand out stand-ins as results of a compiled program, by their types: cheap enough for every call.

    Raises:
        EscapeError: one of them is a proxy, or a fake tensor of ours.
    """
    if not _PLAIN.issuperset(map(type, tensors)):
        for position, t in enumerate(tensors):
            check_nothing_escapes(t, f"tensor {position} of the result", allowed=_may_leave)


def escape(where: str, kind: str, found: Any, at: str | None = None) -> EscapeError:
    """The error for one stand-in."""
    return EscapeError(
        with_details(
            f"{where} would have been a {kind}: it has no data",
            found=f"{type(found).__name__} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__,
            at=at,
            why="it stands for a tensor while a program is analysed or traced, and means nothing afterwards",
        )
    )
