"""Running a program and following its parameters: the dispatch mode, and what surrounds it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DispatchKey
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.core.bodies import python_body
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.higher_order_operators import written_out
from thunder_norm.model_state.shards import is_spread, without_hooks
from thunder_norm.modular.following import entries, entrywise, moves, products
from thunder_norm.modular.following.notes import Call, Notes
from thunder_norm.modular.following.strands import Followed, Scale
from thunder_norm.norms.eager import no_values
from thunder_norm.norms.lifts.parameters import as_parameter, call_with, detached, tensor_names
from thunder_norm.norms.undisturbed import undisturbed
from thunder_norm.trees import leaves_of_results

_RECURRENT = {getattr(torch, name + of) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for of in ("", "_cell")}
_HANDLERS = {**moves.HANDLERS, **products.HANDLERS, **entries.HANDLERS, **entrywise.HANDLERS}

# operations of several, as what they consist of: what is added there is a bias, and what multiplies a gain
_CONSIST_OF: dict[str, Callable[..., torch.Tensor]] = {
    "addcmul": lambda input, a, b, *, value=1: input + a * b * value,
    "addcdiv": lambda input, a, b, *, value=1: input + a / b * value,
    "lerp": lambda input, end, weight: input + weight * (end - input),
    "addr": lambda input, a, b, *, beta=1, alpha=1: input * beta + a.unsqueeze(-1) * b * alpha,
    "addbmm": lambda input, a, b, *, beta=1, alpha=1: input * beta + (a @ b).sum(0) * alpha,
}


class Following(TorchDispatchMode):
    """Tells `notes` of every operation that runs inside and takes something known."""

    supports_higher_order_operators = True

    def __init__(self, notes: Notes):
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then say what its results are."""
        kwargs = kwargs or {}
        if (body := written_out(func) or _taken_apart(func)) is not None:
            with self:
                return body(*args, **kwargs)
        parts = _CONSIST_OF.get(_name(func))
        if parts is not None and "out" not in kwargs:
            with self:
                found = parts(*args, **kwargs)
                return args[0].copy_(found) if func._schema.is_mutable else found
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_in_place = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and bool(given)
        before = self.notes.before_change(given[0]) if is_in_place else None
        tensors = self.notes.operands(given)
        out = func(*args, **kwargs)
        if before is not None and before is not given[0] and args and args[0] is given[0]:
            args, tensors[0] = (before, *args[1:]), (before, tensors[0][1])
        self.notes.depend((*tree_leaves(out), *(given[:1] if is_in_place else ())), given)
        if any(state is not None for _, state in tensors):
            call = Call(_name(func), func, args, kwargs, tensors, out)
            self._handler(call)(self.notes, call)
        if is_in_place and tensors[0][1] is not None:
            state = self.notes.state(given[0] if func.__name__ != "copy_" else given[-1])
            self.notes.after_change(given[0], Scale.NOTHING if state is None else state.scale)
        return out

    @staticmethod
    def _handler(call: Call) -> Any:
        handler = _HANDLERS.get(call.name)
        if handler is not None:
            return handler
        if not isinstance(call.func, torch._ops.OpOverload):  # of higher order: what it does inside is not looked into
            return moves.mix
        in_place = call.func._schema.is_mutable and len(call.tensors) == 1
        is_pointwise = torch.Tag.pointwise in call.func.tags or call.name in entries.SUMS or in_place
        return entries.entry_by_entry if is_pointwise else moves.mix


@functools.cache
def _taken_apart(func: Any) -> Callable | None:
    """What an operation of several others does, if it arrives as one: those that are called below autograd are not taken apart there."""
    key = DispatchKey.CompositeImplicitAutograd
    if not isinstance(func, torch._ops.OpOverload):
        return None
    is_of_several = key in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return func.decompose if is_of_several else None


def _name(func: Any) -> str:
    """The operation's name, the same in place."""
    if not isinstance(func, torch._ops.OpOverload):
        return func.name()
    name = func._schema.name.split("::")[1]
    return name.removesuffix("_") if func._schema.is_mutable else name


class _Functions(TorchFunctionMode):
    """What functions say that the operations inside of them do not.

    Lists of integers as indices have values, also where tensors have not: as tensors on the CPU.  The input of `F.linear` is an
    activation, also if it was made from parameters (learned queries) or constants: of the two factors of a product no one could tell.
    So are the input and the states of recurrent layers and cells, which begin as zeros.
    """

    def __init__(self, notes: Notes):
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(map(_as_tensor, index)) if any(map(_is_indices, index)) else args[1])
        elif func is F.multi_head_attention_forward:
            body = python_body(func)
            assert body is not None
            with self:  # its own calls of F.linear
                return body(*args, **kwargs)
        elif func is F.linear:
            input, *others = args or (kwargs.pop("input"),)
            args = (self._as_activation(input), *others)
        elif func in _RECURRENT:
            args = (*tree_map(self._as_activation, args[:2]), *args[2:])
        return func(*args, **kwargs)

    def _as_activation(self, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or is_functorch_wrapped_tensor(t):  # of these the operations below the transform say
            return t
        state = self.notes.state(t)
        if state is not None and not state.is_parameter:
            return t
        copy = t.clone()  # the parameter itself stays what it is elsewhere
        self.notes.note(copy, Followed() if state is None else replace(state, is_parameter=False))
        return copy


def _is_indices(i: Any) -> bool:
    return isinstance(i, list) and bool(i) and all(type(n) is int for n in i)


def _as_tensor(i: Any) -> Any:
    return torch.tensor(i, device="cpu") if _is_indices(i) else i


def follow(model: torch.nn.Module, args: tuple, kwargs: dict) -> Notes:
    """Run a model once, without data unless the program asks for values, and follow its parameters; all stays as it is.

    Args:
        model: the model.
        args: its arguments; of NormedTensors what they stand for.
        kwargs: and by name.

    Raises:
        Exception: whatever the program raises.
    """
    args, kwargs = tree_map(lambda x: x.backing if isinstance(x, NormedTensor) else x, (args, kwargs))
    names = tensor_names(model)
    on_meta = {
        id(t): as_parameter(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), t) for t in names.values()
    }
    try:
        without_data = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs))
        return _followed(model, *without_data, {name: on_meta[id(t)] for name, t in names.items()})
    except Exception:  # noqa: BLE001 - a program that needs values: the run with them says what is wrong, if anything is
        if any(t.is_meta or is_spread(t) for t in names.values()):
            raise
    return follow_with_data(model, args, kwargs)


def follow_with_data(model: torch.nn.Module, args: tuple, kwargs: dict) -> Notes:
    """The same with the model's own data, on which it runs: the largest logits of attentions are known.

    Raises:
        Exception: whatever the program raises.
    """
    buffers = {id(b) for b in model.buffers()}
    names = tensor_names(model)
    copies = {id(t): t.detach().clone() if id(t) in buffers else detached(t) for t in names.values()}
    return _followed(model, args, kwargs, {name: copies[id(t)] for name, t in names.items()})


def _followed(model: torch.nn.Module, args: tuple, kwargs: dict, tensors: Mapping[str, torch.Tensor]) -> Notes:
    parameters = {name: tensors[name] for name, _ in model.named_parameters()}
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    is_meta = any(t.is_meta for t in (*leaves, *tensors.values()))
    notes = Notes(parameters, leaves)
    with undisturbed(model, args, kwargs), _decomposed(), without_hooks(model), torch.inference_mode(False), torch.no_grad():
        with no_values() if is_meta else contextlib.nullcontext(), Following(notes), _Functions(notes):
            outputs = call_with(model, tensors, args, kwargs)
        notes.finish(_tensors(outputs))
    return notes


@contextlib.contextmanager
def _decomposed() -> Iterator[None]:
    """Attentions and recurrent layers as the operations that they consist of."""
    was_fast, had_onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would ask for a GPU's settings too
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
        torch._C._set_mkldnn_enabled(had_onednn)


def _tensors(outputs: Any) -> Sequence[Any]:
    return [x for x in leaves_of_results(outputs) if isinstance(x, torch.Tensor)]
