"""What users say about the norms of parameters: `annotate` for one module, `norm_annotations` in a class for all of its instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, with_details
from thunder_norm.scalars import is_number

# Of a module class: parameter name -> kind, or (kind, elem_dims).
CLASS_ATTRIBUTE = "norm_annotations"
_INSTANCE_ATTRIBUTE = "_thunder_norm_annotations"


@dataclass(frozen=True)
class Annotation:
    """What a user said about one parameter: its kind and its elem_dims."""

    kind: type[NormedTensor] | None = None
    elem_dims: tuple[int, ...] | None = None


@dataclass
class Annotations:
    """All that was said about the parameters of one module."""

    kinds: dict[str, Annotation] = field(default_factory=dict)
    mass: float | None = None


def annotate(
    module: torch.nn.Module,
    *,
    mass: float | None = None,
    elem_dims: Mapping[str, tuple[int, ...]] | None = None,
    **kinds: type[NormedTensor],
) -> torch.nn.Module:
    """State the norm kinds of a module's own parameters, overriding what rules would infer; returns the module.

    A class does it for all of its instances with the attribute `norm_annotations`, a mapping from names to kinds or to pairs
    (kind, elem_dims); what is said of an instance goes before what its class says.

    >>> class Table(torch.nn.Embedding):
    ...     norm_annotations = {"weight": RMSTensor}

    Such a mapping adds to those of base classes (None takes a name back) and may name parameters of submodules with dots; then
    it goes before what the submodule's own class says.

    Args:
        module: the module that holds the parameters.
        mass: share of the modular norm the module's parameters get together, >= 0.
        elem_dims: parameter name -> dimensions the norm runs over, for parameters named in `kinds`.
        **kinds: parameter name -> kind, for instance ``weight=RMSToRMSTensor``.

    Raises:
        NormMapKeyError: the module has no parameter or buffer of that name.
        NormMismatchError: no module, a kind that is not a NormedTensor class, a mass that is no number >= 0, or elem_dims that are
            not a mapping to tuples of numbers.
    """
    if not isinstance(module, torch.nn.Module):
        raise NormMismatchError(f"annotate needs a torch.nn.Module, got {module!r}")
    if elem_dims is not None and not isinstance(elem_dims, Mapping):
        raise NormMismatchError(f"elem_dims must be a mapping from parameter names to dimensions, got {elem_dims!r}")
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    dims = elem_dims or {}
    said: dict[str, Annotation] = {}
    for name, kind in kinds.items():
        if name not in own:
            raise NormMapKeyError(f"{type(module).__name__} has no parameter or buffer {name!r} of its own; it has {sorted(own)}")
        said[name] = _annotation(name, (kind, dims.get(name)), "annotate")
    if mass is not None and not (is_number(mass) and mass >= 0):
        raise NormMismatchError(f"mass must be a number >= 0, got {mass!r}")
    unknown = set(dims) - set(kinds)
    if unknown:
        raise NormMapKeyError(f"elem_dims given for {sorted(unknown, key=str)}, which have no kind in this call")
    found = annotations_of(module)
    found.kinds.update(said)
    found.mass = found.mass if mass is None else mass
    module.__dict__[_INSTANCE_ATTRIBUTE] = found
    return module


def annotations_of(module: torch.nn.Module) -> Annotations:
    """What `annotate` was told about a module itself (not about its children)."""
    return module.__dict__.get(_INSTANCE_ATTRIBUTE) or Annotations()


def class_annotations(module: torch.nn.Module) -> dict[str, Annotation]:
    """What the class of a module and its base classes say, by name relative to the module.

    Raises:
        NormMapKeyError: a name the module has no parameter or buffer for (one that is None there is fine: a bias left out).
        NormMismatchError: the attribute is not a mapping, or a value in it no kind.
    """
    found: dict[str, Annotation] = {}
    for cls in (*reversed(type(module).__mro__), module):
        said = vars(cls).get(CLASS_ATTRIBUTE)
        if said is None:
            continue
        where = f"{(cls if isinstance(cls, type) else type(cls)).__name__}.{CLASS_ATTRIBUTE}"
        if not isinstance(said, Mapping):
            raise NormMismatchError(f"{where} must be a mapping from parameter names to kinds, got {said!r}")
        for name, value in said.items():
            _check_name(module, name, where)
            if value is None:
                found.pop(name, None)
            else:
                found[name] = _annotation(name, value, where)
    return found


def _annotation(name: str, value: Any, where: str) -> Annotation:
    kind, dims = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    _check_kind(name, kind, f"{where}: ")
    if dims is None:
        return Annotation(kind)
    if not isinstance(dims, tuple | list) or not all(type(d) is int for d in dims):
        raise NormMismatchError(f"{where}: the elem_dims of {name!r} must be a tuple of numbers, got {dims!r}")
    return Annotation(kind, tuple(dims))


def _check_kind(name: str, kind: Any, where: str = "") -> None:
    if not (isinstance(kind, type) and issubclass(kind, NormedTensor)) or kind is NormedTensor:
        raise NormMismatchError(f"{where}the kind of {name!r} must be a kind of NormedTensor, got {kind!r}")


def _check_name(module: torch.nn.Module, name: Any, where: str) -> None:
    path, _, last = name.rpartition(".") if isinstance(name, str) else ("", "", name)
    try:
        holder = module.get_submodule(path)
    except AttributeError:
        raise NormMapKeyError(f"{where} names {name!r}, but {type(module).__name__} has no submodule {path!r}") from None
    own = {**holder._parameters, **holder._buffers}
    if last not in own:
        raise NormMapKeyError(
            f"{where} names {name!r}, but {type(holder).__name__} has no parameter or buffer {last!r} of its own; "
            f"it has {sorted(own)}"
        )


@dataclass(frozen=True)
class _Statement:
    """One annotation of one tensor, who made it, and how much it counts."""

    name: str
    annotation: Annotation
    by: str
    weight: float


def named_annotations(model: torch.nn.Module) -> dict[str, Annotation]:
    """Annotations of all parameters and buffers of a model, by every dotted name: a tied tensor has them under all of its names.

    Raises:
        NormMapKeyError: a class annotates a name its instance does not have.
        NormMismatchError: a tensor with several names is annotated differently under them.
    """
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    said: dict[int, list[_Statement]] = {}
    for statement in _statements(model):
        if statement.name in tensors:
            said.setdefault(id(tensors[statement.name]), []).append(statement)
    decided = {key: _decide(statements) for key, statements in said.items()}
    return {name: decided[id(t)] for name, t in tensors.items() if id(t) in decided}


def _statements(model: torch.nn.Module) -> Iterator[_Statement]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, annotation in annotations_of(module).kinds.items():
            yield _Statement(prefix + name, annotation, f"annotate on {path or 'the model'}", float("inf"))
        for name, annotation in class_annotations(module).items():
            # a module further out knows more about the use of a parameter
            yield _Statement(prefix + name, annotation, f"{type(module).__name__}.{CLASS_ATTRIBUTE}", name.count("."))


def _decide(statements: list[_Statement]) -> Annotation:
    strongest = max(s.weight for s in statements)
    counting = [s for s in statements if s.weight == strongest]
    if len({s.annotation for s in counting}) > 1:
        raise NormMismatchError(
            with_details(
                f"the same tensor is annotated differently under its names {', '.join(sorted({repr(s.name) for s in counting}))}",
                annotations="\n".join(
                    f"{s.name}: {s.annotation.kind.__name__}"  # type: ignore[union-attr]
                    + ("" if s.annotation.elem_dims is None else f" over dims {s.annotation.elem_dims}")
                    + f", by {s.by}"
                    for s in counting
                ),
                instead="annotate(module, name=Kind) on one of the modules decides",
            )
        )
    return counting[0].annotation
