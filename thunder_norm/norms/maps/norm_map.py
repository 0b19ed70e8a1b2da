"""Norm maps: (norms of inputs, norms of parameters) -> norms of outputs, as a function of scalars.

A norm map is the normed program of a model with everything but the norms cut away.  It is acquired once per kinds of its
arguments, through the same interpreter and rules as ``thunder.jit(model, transforms=[NormTransform()])``, needs no data and no
weights, and a call costs little more than the scalar arithmetic it is.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thunder_norm.core.context import Mode, check_mode, current_sensitivity, not_composed
from thunder_norm.core.tensors import NormedTensor, describe
from thunder_norm.errors import NormMismatchError, SavedFileError, with_details
from thunder_norm.model_state.shards import whole_data
from thunder_norm.norms.lifts.annotations import named_annotations
from thunder_norm.norms.lifts.parameters import Policy, check_names, check_policy, tensor_names
from thunder_norm.norms.maps import encoding, norm_map_trace, refused_maps
from thunder_norm.norms.maps.acquiring import Acquiring
from thunder_norm.norms.maps.dynamic_shapes import DynamicDims, check_hashable, parse_dynamic_shapes
from thunder_norm.norms.maps.norm_map_program import Program
from thunder_norm.norms.maps.sources import ModelTensors
from thunder_norm.norms.norm_vector import sizes_of
from thunder_norm.norms.overflow import refuse_overflowed
from thunder_norm.norms.saving import files, values
from thunder_norm.norms.sizes import Sizes
from thunder_norm.tracing.guarding.guards import MAX_TRACES


def build_norm_map(
    model: torch.nn.Module,
    *example_args: Any,
    dynamic_shapes: Any = None,
    parameters: Policy | None = None,
    mode: Mode = "bound",
    **example_kwargs: Any,
) -> NormMap:
    """The norm map of a model: ``norm_map(*normed_args, normed_state_dict=None, **normed_kwargs) -> normed outputs``.

    Args:
        model: any module (or function) that Thunder can trace.  Parameters may be sharded (`fully_shard`, or any DTensors): norms are
            those of the whole ones.  Calls that acquire a program or measure parameters are collective then, and so is `save`.
        *example_args: arguments that say shapes and dtypes; tensors may live on the meta device, no weights are touched then.  Plain
            ones whose values the program asks for (``sizes.tolist()``, ``if ids[0] == 0``, ``x[mask]``) need data, in each call; one with
            other answers acquires a program of its own.
        dynamic_shapes: dimensions that may change between calls without a new acquisition, as for ``torch.export``: one
            entry for each argument (a tuple or list in order, or a dict by name), each a dict from dimension to a name or
            `torch.export.Dim`, or None.
        parameters: sizes of parameters `normed_state_dict` does not name: "measured" (exact norm of the actual parameter),
            "unit", or a mapping.  If None they are measured when no normed_state_dict is given, and required when it is.
        mode: "bound", "typical" or "modula".
        **example_kwargs: as `example_args`, by name.

    Returns:
        A `NormMap`.  Its outputs have meta backings; norm sizes are differentiable through torch.autograd, to any order.  Plain
        outputs of the model, such as masks, are meta tensors: there is no data.

    Raises:
        NormMismatchError: what cannot be called, dynamic_shapes that do not fit the arguments, or an unknown mode or policy.
        NormMapKeyError: `parameters` or an annotation names a parameter the model does not have.
    """
    if not callable(model):
        raise NormMismatchError(f"build_norm_map needs a module or function, got {describe(model)}")
    leaves, spec = tree_flatten((example_args, example_kwargs))
    if isinstance(model, torch.nn.Module):
        named_annotations(model)  # mistakes in them are errors now
    dims = parse_dynamic_shapes(model, example_args, example_kwargs, dynamic_shapes, leaves)
    policy = None if parameters is None else check_policy(parameters)
    if isinstance(policy, Mapping):
        check_names(policy, model, "build_norm_map(parameters=...)")
    return NormMap(model, leaves, spec, dims, policy, check_mode(mode))


@dataclass
class NormMap:
    """See `build_norm_map`."""

    model: Callable
    example_leaves: list[Any]
    example_spec: TreeSpec
    dynamic_dims: DynamicDims
    parameters: Policy | None
    mode: Mode
    made_with: Mapping[str, str] = field(default_factory=dict)  # the versions that a loaded one was saved with
    _programs: dict[Any, Program] = field(default_factory=dict, repr=False)
    _last: Program | None = field(default=None, repr=False)
    _last_key: Any = field(default=None, repr=False)
    _last_call: tuple[list[Any], Mapping[str, Any] | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Remember which tensors the model has."""
        self._model_tensors = ModelTensors(self.model)

    def __call__(self, *normed_args: Any, normed_state_dict: Mapping[str, Any] | None = None, **normed_kwargs: Any) -> Any:
        """Map norms of inputs and parameters to norms of outputs.

        Args:
            *normed_args: in the structure of the example arguments; a NormedTensor (unfinalized or not) for each floating
                tensor.  A plain tensor stands for itself: its exact norm is taken.
            normed_state_dict: parameter or buffer name -> NormedTensor, number or 0-dim tensor.  A `NormVector`, whose sizes are one
                tensor, costs a fraction of a dict of many.
            **normed_kwargs: as `normed_args`, by name.

        Raises:
            NormMismatchError: arguments differ from the example in structure or shape; inside `norm_sensitivity("composed")`; a norm is not
                a number because one before it is larger than the largest float64.
            NormMapKeyError: normed_state_dict names an unknown parameter, or misses one that is needed.
        """
        not_composed(current_sensitivity(), "a norm map")
        leaves = self._flattened(normed_args, normed_kwargs)
        sizes = self.dynamic_dims.sizes(leaves, self.example_leaves)
        norms = self._norms_in_call(normed_state_dict)
        given = sizes_of(norms)
        key = (
            tuple(map(self._signature, range(len(leaves)), leaves)),
            (normed_state_dict is None, tuple(norms), given.signature),
        )
        last = self._last if key == self._last_key else None
        if last is not None and last.reads_model and not self._reads_current_tensors():
            last = None
        if last is None or not last.serves(leaves):
            check_hashable(leaves)
            last = self._last = self._program(key, leaves, normed_state_dict)
            self._last_key = key
        self._last_call = leaves, normed_state_dict
        return refuse_overflowed(last(leaves, given, sizes), (leaves, norms), self.model, has_data=False)

    def _program(self, key: Any, leaves: list[Any], normed_state_dict: Mapping[str, Any] | None) -> Program:
        self._reads_current_tensors()
        if (found := self._programs.get(key)) is not None:
            return found
        number = 1  # of those that ask for values
        while (found := self._programs.get((*key, number))) is not None:
            if found.serves(leaves):
                return found
            number += 1
        if number > MAX_TRACES:
            refused_maps.warn_of_many(MAX_TRACES)
        made = self._acquire(leaves, normed_state_dict)
        self._programs[key if made.plan.conditions is None else (*key, min(number, MAX_TRACES))] = made
        return made

    def _reads_current_tensors(self) -> bool:
        """Have all programs read the model's tensors of now; where these are of other shapes or dtypes, forget them, and say so."""
        now = self._model_tensors.current(s for p in self._programs.values() for s in p.plan.all_sources)
        if now is None:
            self._programs.clear()
        self._model_tensors = ModelTensors(self.model) if now is None else now
        return now is not None

    def _flattened(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        if len(args) == self._tensors_alone[0] and tuple(kwargs) == self._tensors_alone[1]:
            leaves = [*args, *kwargs.values()]
            if all(
                [isinstance(x, torch.Tensor) for x in leaves]
            ):  # flat: pytree takes longer to see it than the norms to compute
                return leaves
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self.example_spec:
            raise NormMismatchError(
                with_details("arguments differ in structure from the example arguments", expected=self.example_spec, got=spec)
            )
        return leaves

    @functools.cached_property
    def _tensors_alone(self) -> tuple[int, tuple[str, ...]]:
        """How many arguments there are by position, and the names of the others, if none of them holds others; -1 if one does."""
        args, kwargs = tree_unflatten(list(range(len(self.example_leaves))), self.example_spec)
        is_flat = all([type(i) is int for i in (*args, *kwargs.values())])
        return len(args) if is_flat else -1, tuple(kwargs)

    def sizes_given(self, normed_state_dict: Mapping[str, Any] | None) -> Sizes:
        """The sizes of the norms given for parameters, in this call and when the norm map was built."""
        return sizes_of(self._norms_in_call(normed_state_dict))

    def _norms_in_call(self, normed_state_dict: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The norms given for parameters, in this call and when the norm map was built."""
        given = {} if normed_state_dict is None else normed_state_dict
        if type(given) is not dict and not isinstance(given, Mapping):
            raise NormMismatchError(
                f"normed_state_dict must be a mapping from names of parameters to norms, got {describe(given)}"
            )
        return {**self.parameters, **given} if isinstance(self.parameters, Mapping) else given

    def _signature(self, position: int, value: Any) -> Any:
        """What a program relies on about one argument, besides its norm."""
        if isinstance(value, NormedTensor):
            d = value.perturbation_size
            dims = value.elem_dims
            if not value.finalized and isinstance(example := self.example_leaves[position], torch.Tensor):
                dims = value._canonical(value.default_elem_dims(example.ndim) if dims is None else dims, example.ndim)
            return (
                type(value),
                dims,
                value.norm_size.requires_grad,
                value.norm_size.device,
                None if d is None else d.requires_grad,
            )
        if isinstance(value, torch.Tensor):
            shape = self.dynamic_dims.without(position, value)
            return ("plain", value.dtype, value.requires_grad, value.device, shape)
        return type(value), value

    @property
    def last_trace(self) -> Any:
        """The execution trace of the last call's program: readable Python on scalars."""
        return self.last_program.trace

    @property
    def last_program(self) -> Program:
        """The program of the last call.

        Raises:
            NormMismatchError: the norm map has not been called yet.
        """
        if self._last is None:
            raise NormMismatchError("this norm map has not been called yet")
        return self._last

    @property
    def last_call(self) -> tuple[list[Any], Mapping[str, Any] | None]:
        """The flattened arguments and the normed_state_dict of the last call.

        Raises:
            NormMismatchError: the norm map has not been called yet.
        """
        if self._last_call is None:
            raise NormMismatchError("this norm map has not been called yet")
        return self._last_call

    def placeholders(self, leaves: list[Any]) -> list[Any]:
        """The arguments over backings without memory, on the device of the model's parameters."""
        return self._acquiring.placeholders(leaves)

    # -- copies, pickles and files ------------------------------------------------------------------------------------

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that its programs read, by name: of a loaded one those that were saved, or its model's."""
        return encoding.tensors_read([p.plan for p in self._programs.values()])

    def save(self, path: str | os.PathLike) -> None:
        """Write what was acquired to a file, for `load_norm_map`: the programs of all calls so far, and the tensors that they read.

        Raises:
            SavedFileError: nothing was acquired yet, or there is something that cannot be saved; the file stays as it was.
            OSError: the file cannot be written.
        """
        if not self._programs:
            raise SavedFileError("this norm map has not been called yet: there is nothing to save")
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(t), name) for name, t in self.tensors.items()}
        data = {
            "examples": encoding.encode_examples(self.example_leaves, self.example_spec),
            "dynamic": [[i, list(dims.items())] for i, dims in self.dynamic_dims.by_leaf.items()],
            "parameters": encoding.encode_parameters(self.parameters),
            "mode": self.mode,
            "names": names,
            "programs": [[values.encode(key), program.encoded()] for key, program in self._programs.items()],
        }
        files.write(path, _KIND, data, {name: whole_data(t) for name, t in self.tensors.items() if names[name] == name})

    def __getstate__(self) -> dict[str, Any]:
        """All but the programs, and those of them that can be saved: the others are acquired again."""
        own = encoding.tensors_of(self.model)
        kept = {k: p.encoded_for(own) for k, p in self._programs.items()}
        return {**_without_calls(self), "_programs": {k: p for k, p in kept.items() if p is not None}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the programs again, on the tensors of the model as it is now."""
        self.__dict__.update(_without_calls(self), **state)
        own = encoding.tensors_of(self.model)
        self._programs = {key: Program.decoded(data, own, self.model) for key, data in state["_programs"].items()}
        self._model_tensors = ModelTensors(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> NormMap:
        """A norm map of a copy of the model, that has what was acquired."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(_without_calls(self), memo))
        new._programs = {key: program.copied(memo) for key, program in self._programs.items()}
        new._model_tensors = ModelTensors(new.model)
        return new

    def __copy__(self) -> NormMap:
        """A norm map of the same model, that has what was acquired."""
        new = object.__new__(type(self))
        new.__dict__.update(_without_calls(self), _programs=dict(self._programs), _model_tensors=self._model_tensors)
        return new

    # -- acquisition --------------------------------------------------------------------------------------------------

    def _acquire(self, leaves: list[Any], normed_state_dict: Mapping[str, Any] | None) -> Program:
        if isinstance(self.model, encoding.WithoutModel):
            raise NormMismatchError(
                with_details(
                    "this norm map was loaded without its model, and has no program for norms such as these",
                    has=f"{len(self._programs)} programs, for other kinds or dims, or names in normed_state_dict, or other values of arguments that the model reads",
                    instead="call it so before it is saved; or thunder_norm.load_norm_map(path, model), which acquires one",
                )
            )
        return self._acquiring.program(leaves, self.given(normed_state_dict))

    @property
    def _acquiring(self) -> Acquiring:
        return Acquiring(self.model, self.example_leaves, self.example_spec, self.dynamic_dims, self.mode)

    def given(self, normed_state_dict: Mapping[str, Any] | None) -> norm_map_trace.Given:
        """The norms given for parameters in a call, and what holds for the others.

        Raises:
            NormMapKeyError: a name the model does not have.
            NormMismatchError: a norm of another shape than the parameter.
        """
        norms = dict(self._norms_in_call(normed_state_dict))
        if normed_state_dict is not None:
            check_names(normed_state_dict, self.model, "normed_state_dict")
        names = tensor_names(self.model) if isinstance(self.model, torch.nn.Module) else {}
        for name, value in norms.items():
            if isinstance(value, NormedTensor) and value.finalized and value.shape != names[name].shape:
                raise NormMismatchError(
                    f"normed_state_dict[{name!r}] has shape {list(value.shape)}, the model's has {list(names[name].shape)}"
                )
        policy = self.parameters
        otherwise = policy if isinstance(policy, str) else "required" if normed_state_dict is not None else "measured"
        return norm_map_trace.Given(norms, otherwise, tuple(norms))


_KIND = "norm map"


def load_norm_map(path: str | os.PathLike, model: Callable | None = None) -> NormMap:
    """The norm map that `NormMap.save` wrote to a file: the same results, without an acquisition.

    Nothing in the file is run: programs are built again from operations that are known by name.

    Args:
        path: of the file.
        model: the model that the norm map is of, with weights of its own.  Without, parameters and buffers are those that were saved
            (`NormMap.tensors`), and there are no other programs than those acquired before.

    Raises:
        SavedFileError: no such file, a damaged one, or one of a newer format; or it names what is not known here.
        NormMapKeyError: the model lacks a parameter that the file has.
        NormMismatchError: the model's is of another shape, dtype or device.
        OSError: the file cannot be read.
    """
    with torch.inference_mode(False), torch.enable_grad():  # its tensors are for any context
        found = files.read(path, _KIND)
        return files.reading(path, lambda: _loaded(found, model))


def _loaded(found: files.Contents, model: Callable | None) -> NormMap:
    data = found.data
    tensors = {name: found.tensors[first] for name, first in data["names"].items()}
    if model is None:
        model = encoding.WithoutModel(tensors)
    else:
        tensors = encoding.fitting(encoding.tensors_of(model), tensors)
    leaves, spec = encoding.decode_examples(data["examples"])
    dims = DynamicDims({i: dict(map(tuple, items)) for i, items in data["dynamic"]})
    policy = None if data["parameters"] is None else check_policy(encoding.decode_parameters(data["parameters"]))
    programs = {values.decode(key): Program.decoded(p, tensors, model) for key, p in data["programs"]}
    return NormMap(model, leaves, spec, dims, policy, check_mode(data["mode"]), found.made_with, programs)


def _without_calls(norm_map: NormMap) -> dict[str, Any]:
    """The state of a norm map that has not been called."""
    calls = {"_programs": {}, "_last": None, "_last_key": None, "_last_call": None}
    return {**norm_map.__dict__, **calls, "_model_tensors": None}
