"""Plain tensors of a length that is a symbol, in the hands of a program: what it may do with them and stay one for all lengths.

Thunder's proxies have numbers for sizes.  So operations on such a tensor are run on its fake, where torch sees the symbol; of all else that
is done with it nobody knows what it does by its size, and the program is for the length at hand.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.op_names import op_key
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.arguments import value_of
from thunder_norm.subclass.interpreting.jagged_makers import MAKERS
from thunder_norm.subclass.interpreting.operations import torch_callable
from thunder_norm.subclass.recording.trace import FLATTEN, REBIND, UNFLATTEN, OperationId
from thunder.core import prims
from thunder.core.interpreter import WrappedValue
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from thunder.core.utils import is_hashable

# Operations that are run on fakes, whatever they are given.
_RUN_ON_FAKES = frozenset(
    (
        "abs neg exp expm1 log log1p log2 sqrt rsqrt sin cos tan tanh sigmoid relu gelu silu elu leaky_relu softplus logsigmoid mish "
        "square reciprocal erf sign clamp add sub rsub mul div rdiv pow rpow matmul rmatmul mm linear embedding layer_norm rms_norm softmax "
        "log_softmax dropout mean sum amax amin var std norm logsumexp cumsum eq ne lt le gt ge where masked_fill lerp addcmul "
        "mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits "
        "reshape view transpose t permute unsqueeze squeeze flatten unflatten cat stack to float double half bfloat16 type_as detach clone contiguous "
        "zeros_like ones_like full_like"
    ).split()
)
_READ = frozenset("dtype device ndim requires_grad is_cuda is_cpu is_nested layout is_sparse is_meta itemsize T mT H mH".split())
_SIZES = frozenset("size stride numel nelement storage_offset is_contiguous data_ptr untyped_storage storage".split())
_PLACES = {int, slice, type(None), type(Ellipsis)}  # what indexes of parts are made of
_OF_PYTHON = frozenset(map(id, (isinstance, type, id, hasattr)))


def note(acquisition: Acquisition, fn: Callable, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> None:
    """Called for each call of a program in which total lengths are symbols."""
    if any(_hangs_on_length(acquisition, p) for p in _proxies([*map(value_of, args), *map(value_of, kwargs.values())])):
        if not _is_for_all(fn, args):
            acquisition.lengths.be_one()


def _is_for_all(fn: Callable, args: tuple[WrappedValue, ...]) -> bool:
    """Whether a call does the same for all sizes of the tensors that it is given, or what it calls is seen as well."""
    if fn is getattr or fn is TensorProxy.__getattr__:
        name = value_of(args[1])
        if name == "__dict__" and len(args) == 3:  # how the interpreter looks all attributes up
            return True
        found = getattr(torch.Tensor, name, None)
        return name in _READ or (name not in _SIZES and isinstance(found, types.MethodDescriptorType | types.FunctionType))
    if id(fn) in _OF_PYTHON:
        return True
    if is_hashable(fn) and fn in MAKERS:
        return True
    torch_fn = torch_callable(fn)
    if torch_fn is torch.Tensor.__getitem__:
        return {type(v) for v in tree_leaves(value_of(args[1]))} <= _PLACES
    if torch_fn is not None:
        return op_key(torch_fn) in _RUN_ON_FAKES
    if isinstance(fn, torch.nn.Module):
        return True
    module = getattr(fn, "__module__", None) or ""
    is_interpreted = type(fn) is types.FunctionType and module.partition(".")[0] not in ("torch", "thunder", "thunder_norm")
    return is_interpreted or (type(fn) is types.FunctionType and module.startswith("torch.nn.modules."))


def _proxies(value: Any) -> Iterator[TensorProxy]:
    if type(value) is TensorProxy:
        yield value
    elif type(value) in (list, tuple):
        for v in value:
            yield from _proxies(value_of(v))
    elif isinstance(value, dict):
        yield from _proxies(list(value.values()))


def _hangs_on_length(acquisition: Acquisition, proxy: TensorProxy) -> bool:
    return acquisition.lengths.is_symbol_in(acquisition.fakes.known(proxy))


def check(acquisition: Acquisition, trace: TraceCtx) -> None:
    """Let a program be for the length at hand if Thunder has computed with a tensor of a length that is a symbol."""
    fakes = acquisition.fakes.by_name()
    for bsym in trace.bound_symbols:
        if isinstance(bsym.sym.id, OperationId) or bsym.sym.id in _NO_OPERATIONS:
            continue
        if any(acquisition.lengths.is_symbol_in(fakes.get(p.name)) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)):
            return acquisition.lengths.be_one()
    return None


_NO_OPERATIONS = frozenset(
    {FLATTEN.id, UNFLATTEN.id, REBIND.id, prims.PrimIDs.RETURN, prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL}
)
