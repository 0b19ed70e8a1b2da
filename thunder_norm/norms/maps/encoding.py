"""Norm maps as data: the programs that were acquired, for which arguments, and the tensors they read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import NormMapKeyError, NormMismatchError, SavedFileError, ThunderNormError, with_details
from thunder_norm.norms.autocast import keeping_autocast
from thunder_norm.norms.higher_order import Replay
from thunder_norm.norms.lifts.parameters import tensor_names
from thunder_norm.norms.maps.conditions import Conditions
from thunder_norm.norms.maps.norm_map_trace import OutputShape, Plan
from thunder_norm.norms.maps.outputs import NormOutput, PlainOutput, SavedEpilogue, described
from thunder_norm.norms.maps.scalars import Scalars
from thunder_norm.norms.maps.sources import OfArgument, OfAttribute, OfModel, Source, plain_attributes, type_of
from thunder_norm.norms.saving import programs, values

Tensors = Mapping[str, torch.Tensor]


class WithoutModel:
    """Stands for the model of a norm map that was loaded without one: it cannot be run."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """There is nothing to call.

        Raises:
            NormMismatchError: always.
        """
        raise NormMismatchError("this norm map was loaded without its model: thunder_norm.load_norm_map(path, model)")


# -- programs -----------------------------------------------------------------------------------------------------------


@dataclass
class SavedEntry:
    """What Thunder's cache entry is for a program that was acquired: the functions that run, and their traces."""

    computation_traces: list[Any]
    backward_traces: list[Any]
    epilogue_fn: Callable

    @functools.cached_property
    def computation_fn(self) -> Callable:
        """The computation."""
        return keeping_autocast(self.computation_traces[-1].python_callable())

    @functools.cached_property
    def backward_fn(self) -> Callable | None:
        """Its backward, if it has one."""
        return keeping_autocast(self.backward_traces[-1].python_callable()) if self.backward_traces else None


def encode_program(entry: Any, plan: Plan, static: tuple) -> dict:
    """A program as JSON.

    Raises:
        SavedFileError: it has what cannot be saved.
    """
    tree = described(functools.partial(entry.epilogue_fn, *static), plan.outputs, plan.num_results)
    return {
        "sources": [_source(s) for s in plan.sources],
        "conditions": None if plan.conditions is None else _conditions(plan.conditions),
        "moves": list(plan.moves),
        "moved": list(plan.moved),
        "shapes": [
            {"shape": list(o.shape), "dtype": values.encode(o.dtype), "follows": [[d, *f] for d, f in o.follows.items()]}
            for o in plan.outputs
        ],
        "returned": _within("what the model returns", lambda: values.encode(tree, _output)),
        "computation": programs.encode(entry.computation_traces[-1], runs=True),
        "backward": None if entry.backward_fn is None else programs.encode(entry.backward_traces[-1], runs=True),
        "acquired": programs.encode(plan.replay.trace, runs=False),
    }


def decode_program(data: dict, tensors: Tensors, model: Callable) -> tuple[SavedEntry, Plan, Scalars | None]:
    """The program that `encode_program` made this JSON of, on these tensors.

    Raises:
        SavedFileError: it is none that can run here.
    """
    shapes = [
        OutputShape(tuple(o["shape"]), values.decode(o["dtype"]), {d: (n, f, c) for d, n, f, c in o["follows"]})
        for o in data["shapes"]
    ]
    sources = [_decoded_source(s, tensors, model) for s in data["sources"]]
    acquired = programs.decode(data["acquired"], runs=False)
    results = programs.returned(acquired)
    plan = Plan(sources, data["moves"], data["moved"], shapes, "", Replay(acquired, results), len(results))
    if data.get("conditions") is not None:
        plan = replace(plan, conditions=_decoded_conditions(data["conditions"], tensors, model))
    if not len(sources) == len(plan.moves) == len(acquired.args) or len(plan.moved) != len(results):
        raise SavedFileError("the file has a program whose inputs do not fit it")
    backward = [] if data["backward"] is None else [programs.decode(data["backward"], runs=True)]
    epilogue = SavedEpilogue(values.decode(data["returned"], _decoded_output), shapes)
    entry = SavedEntry([programs.decode(data["computation"], runs=True)], backward, epilogue)
    return entry, plan, Scalars.of(entry)


def _source(source: Source) -> Any:
    if isinstance(source, OfArgument):
        return {"argument": source.position, "attribute": source.attribute}
    if isinstance(source, OfAttribute):
        if not source.name:
            raise SavedFileError("the program reads a tensor from a closure or a global variable")
        return {"elsewhere": source.name}
    return {"tensor": source.name} if isinstance(source, OfModel) else source


def _decoded_source(data: Any, tensors: Tensors, model: Callable) -> Source:
    if type(data) is int:
        return data
    if "elsewhere" in data:
        name = data["elsewhere"]
        return OfAttribute(name, tensors[name], model if isinstance(model, torch.nn.Module) else None)
    if "tensor" in data:
        return OfModel(data["tensor"], tensors[data["tensor"]])
    if data["attribute"] not in (None, "norm_size", "perturbation_size"):
        raise SavedFileError(f"the file has a program that reads {data['attribute']!r} of an argument")
    return OfArgument(data["argument"], data["attribute"])


def _conditions(conditions: Conditions) -> list:
    return [
        [_source(source), values.encode(t.dtype), list(t.shape), values.encode(t.flatten().tolist())]
        for source, t in zip(conditions.sources, conditions.acquired, strict=True)
    ]


def _decoded_conditions(data: list, tensors: Tensors, model: Callable) -> Conditions:
    """What was asked is not in the file: the values that were asked for have to be the same."""
    sources = [_decoded_source(s, tensors, model) for s, *_ in data]
    acquired = [torch.tensor(values.decode(v), dtype=values.decode(dtype)).reshape(shape) for _, dtype, shape, v in data]
    return Conditions(sources, acquired, None)


def _output(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise SavedFileError("the model returns a plain tensor")
    if isinstance(value, PlainOutput):
        return {"plain": value.shape}
    if not isinstance(value, NormOutput):
        return None
    fields = [value.elem_dims, value.shape, value.size, value.perturbation, value.number]
    return {"norm": [values.encode(f) for f in (value.kind, *fields)]}


def _decoded_output(data: dict) -> Any:
    if "plain" in data:
        return PlainOutput(data["plain"])
    return NormOutput(*map(values.decode, data["norm"])) if "norm" in data else None


def _within(what: str, encode: Callable[[], Any]) -> Any:
    try:
        return encode()
    except SavedFileError as e:
        raise SavedFileError(f"{what}: {e}") from e


# -- arguments ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """Stands for an argument in the structure of all."""

    position: int


def encode_examples(leaves: list[Any], spec: Any) -> dict:
    """The example arguments as JSON: of tensors their shapes.

    Raises:
        SavedFileError: an argument that has no name, or a structure that has none.
    """
    structure = tree_unflatten(list(map(_Leaf, range(len(leaves)))), spec)
    return {
        "structure": values.encode(structure, lambda v: {"leaf": v.position} if isinstance(v, _Leaf) else None),
        "leaves": [_within(f"argument {i}", lambda leaf=leaf: values.encode(leaf, _example)) for i, leaf in enumerate(leaves)],
    }


def decode_examples(data: dict) -> tuple[list[Any], Any]:
    """The example arguments and their structure; tensors without memory."""
    structure = values.decode(data["structure"], lambda v: _Leaf(v["leaf"]) if "leaf" in v else None)
    flat, spec = tree_flatten(structure)
    leaves = [values.decode(leaf, _decoded_example) for leaf in data["leaves"]]
    if [leaf.position for leaf in flat] != list(range(len(leaves))):
        raise SavedFileError("the file has example arguments that do not fit their structure")
    return leaves, spec


def _example(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return {"tensor": [list(value.shape), values.encode(value.dtype), str(value.device)]}


def _decoded_example(data: dict) -> Any:
    if "tensor" not in data:
        return None
    shape, dtype, device = data["tensor"]
    on = torch.device(device)
    on = on if on.type in ("cpu", "meta") else torch.device("meta")  # its shape is all that is asked for
    return torch.zeros((), dtype=values.decode(dtype), device=on).expand(shape)


def encode_parameters(policy: Any) -> Any:
    """Norms given for parameters, or a word, as JSON; sizes are numbers."""
    if not isinstance(policy, Mapping):
        return policy
    return {"given": [[name, _within(f"the norm of {name!r}", lambda v=v: _given(v))] for name, v in policy.items()]}


def decode_parameters(data: Any) -> Any:
    """The norms given for parameters."""
    return {name: _decoded_given(v) for name, v in data["given"]} if isinstance(data, dict) else data


def _given(value: Any) -> Any:
    if isinstance(value, NormedTensor):
        sizes = [None if t is None else _given(t) for t in (value.norm_size, value.perturbation_size)]
        backing = None if value.backing is None else _example(value.backing)
        return {"norm": values.encode(type(value)), "dims": values.encode(value.elem_dims), "sizes": sizes, "like": backing}
    if isinstance(value, torch.Tensor):
        number = values.encode(value.detach().item())
        return {"size": number, "dtype": values.encode(value.dtype), "requires_grad": value.requires_grad}
    return {"number": values.encode(value)}


def _decoded_given(data: dict) -> Any:
    if "number" in data:
        return values.decode(data["number"])
    if "size" in data:
        return torch.tensor(values.decode(data["size"]), dtype=values.decode(data["dtype"])).requires_grad_(data["requires_grad"])
    size, perturbation = [None if s is None else _decoded_given(s) for s in data["sizes"]]
    backing = None if data["like"] is None else _decoded_example(data["like"])
    return values.decode(data["norm"])._wrap(backing, size, perturbation, values.decode(data["dims"]))


# -- tensors ------------------------------------------------------------------------------------------------------------


def tensors_of(model: Callable) -> dict[str, torch.Tensor]:
    """The tensors of a model, also what is no parameter and no buffer, or those that were saved for one that is not there, by name."""
    if isinstance(model, WithoutModel):
        return model.tensors
    return {**plain_attributes(model), **tensor_names(model)} if isinstance(model, torch.nn.Module) else {}


def tensors_read(plans: list[Plan]) -> dict[str, torch.Tensor]:
    """The tensors of a model that programs read, by name.

    Raises:
        SavedFileError: two programs were acquired with two tensors of one name.
    """
    found: dict[str, torch.Tensor] = {}
    for source in (s for plan in plans for s in plan.all_sources):
        if isinstance(source, OfModel) or isinstance(source, OfAttribute) and source.name:
            tensor = source.tensor if isinstance(source, OfModel) else source(())
            if found.setdefault(source.name, tensor) is not tensor:
                raise SavedFileError(f"the model has had two tensors called {source.name!r}, and there are programs for both")
    return found


def fitting(own: Tensors, wanted: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of a model in place of those in a file.

    Raises:
        NormMapKeyError: the model has none of that name.
        NormMismatchError: it is of another shape or dtype.
    """
    for name, t in wanted.items():
        if name not in own:
            raise NormMapKeyError(f"the norm map was saved with {name!r}, which the model does not have")
        mine = own[name]
        if _described(mine) != _described(t):
            raise NormMismatchError(
                with_details(
                    f"{name!r} is other than in the model that the norm map was saved with",
                    saved=_described(t),
                    model=_described(mine),
                )
            )
    return {name: own[name] for name in wanted}


def _described(t: torch.Tensor) -> str:
    return type_of(t) + (", requires_grad" if t.requires_grad else "")


def or_none(encode: Callable[[], dict]) -> dict | None:
    """What `encode` makes, None if that cannot be saved."""
    try:
        return encode()
    except ThunderNormError:
        return None
