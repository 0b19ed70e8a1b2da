"""Which operations of an execution trace may be part of a region, and which of them make nothing new."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_norm.executors.graphs import is_compilable
from thunder_norm.functions.writes.functionalization import is_of_written_view
from thunder_norm.subclass.acquiring.fallback import made_for
from thunder_norm.subclass.acquiring.sized import Sized
from thunder_norm.tracing.shared_memory.views import RETURNING_SELF, may_share_by_name
from thunder_norm.tracing.tags import has_any_tag
from thunder_norm.tracing.torch_functions import random_numbers
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.distributed import prims as dist_prims
from thunder.executors.torchex import ex as torch_ex

# Executors that run an operation by calling torch: Thunder's, ours for what Thunder has no symbol for, and those of gradients.
_RUN_BY_TORCH = ("torch", "thunder_norm_aten", "thunder_norm_gradients", "thunder_norm_kernels")
_RUN_BY_TORCH_FUNC = "thunder_norm_opaque"  # transforms of what Thunder has no rule for: of these gradients may be in a region
_GRADIENT = "vjp_"

# They change an argument, ask for a value, draw numbers, are not determined, or give the same object where others change it; of dropout
# its arguments say whether it draws.
_NEVER = frozenset(
    "copy_ item update_aliases shape uniform uniform_philox multinomial_helper feature_dropout empty empty_like get_and_update_rng_state_impl as_strided "
    "tensor_from_sequence instance_norm nonzero unique masked_select native_batch_norm cudnn_batch_norm "
    "_native_batch_norm_legit is_nonzero torch_compile bitcast".split()
) | (random_numbers.NAMES - {"dropout"})
_OF_INTEGERS = ("bitwise_", "aten_bitwise_")  # torch refuses others, inductor does not
_OF_FLOATS = ("hypot", "aten_hypot_", "nextafter", "aten_nextafter_")  # torch has no kernel for others, inductor computes them
_CHANGING = frozenset({OpTags.DONT_DCE, OpTags.IN_PLACE})
_ANY = ("any", "aten_any_")  # of bytes inductor returns bools
_TAGS = {OpTags.RANDOM_OP, OpTags.DONT_DCE, OpTags.IN_PLACE, OpTags.DEVICE_SYNC_OP, OpTags.CTX_MANAGER_ENTER_EXIT_OP}

# What executors call those of Thunder's prims that give a view; of others `views` knows the name.
_VIEWS_OF_PRIMS = frozenset("shallow_copy torch_prims_reshape_impl torch_slice_prim_impl".split())
_CONVERSIONS = RETURNING_SELF - set("conj contiguous dropout real resolve_conj resolve_neg".split())  # or they compute
_CONSTANTS = frozenset(
    "arange full full_like ones ones_like zeros zeros_like".split()
)  # may go where there is no tensor to begin with

# Each entry of the result comes of one entry of each argument, in a few instructions.
_ENTRYWISE = frozenset(
    "abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or "
    "bitwise_right_shift bitwise_xor ceil celu clamp clone copysign cos cosh div torch_div_prim_impl elu eq erf erfc exp exp2 expm1 floor "
    "floor_divide fmod ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside isfinite isinf isnan le leaky_relu lerp log log10 "
    "log1p log2 logical_and logical_or logical_xor logsigmoid lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu relu6 "
    "remainder rsqrt selu sign signbit silu sin sinh softplus softshrink softsign sqrt square sub tan tanh tanhshrink threshold to "
    "torch_abs torch_round true_divide trunc where written".split()
)

_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_DEVICES = ("cpu", "cuda")


def _of_processes() -> Iterator[str]:
    """The names of the operations by which processes talk to each other, as torch runs them."""
    for symbol in vars(dist_prims).values():
        found = torch_ex.implmap.get(getattr(symbol, "id", None))
        if found is not None and found.symbol is not None:
            yield found.symbol.name


_COLLECTIVES = frozenset(_of_processes())


def _once(question: Callable[[BoundSymbol], bool]) -> Callable[[BoundSymbol], bool]:
    """The same question, whose answer is noted at the operation: each pass over the operations asks it again."""
    name = f"_thunder_norm_{question.__name__}"

    @functools.wraps(question)
    def asked(bsym: BoundSymbol) -> bool:
        known = vars(bsym)
        if name not in known:
            known[name] = question(bsym)
        return known[name]

    return asked


@_once
def may_be_in_region(bsym: BoundSymbol) -> bool:
    """Whether inductor may compile this operation together with others, and give what torch gives."""
    symbol = bsym.sym
    if symbol.executor is None or symbol.executor.name not in (*_RUN_BY_TORCH, _RUN_BY_TORCH_FUNC) or symbol.is_fusion:
        return False
    name = symbol.name
    is_opaque = symbol.executor.name == _RUN_BY_TORCH_FUNC and not is_of_written_view(symbol)
    if (is_opaque and not name.startswith(_GRADIENT)) or _has_sizes_that_are_values(symbol):
        return False
    if name in _NEVER or name in _COLLECTIVES or _draws_or_updates(bsym) or _is_never_of_aten(name) or has_any_tag(bsym, _TAGS):
        return False
    are_inexact = [dtypes.is_inexact_dtype(p.dtype) for p in bsym.flat_proxy_args if isinstance(p, TensorProxy)]
    # `i ^ 2.5` takes integers alone, and is floating
    makes_inexact = any(isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype) for p in bsym.flat_proxy_outs)
    if (name.startswith(_OF_INTEGERS) and (makes_inexact or any(are_inexact))) or (
        name.startswith(_OF_FLOATS) and not any(are_inexact)
    ):
        return False
    if name.startswith(_ANY) and any(p.dtype is dtypes.uint8 for p in bsym.flat_proxy_outs if isinstance(p, TensorProxy)):
        return False
    outs = [p for p in bsym.flat_outs if p is not None]
    if not outs or any(type(p) is not TensorProxy for p in (*outs, *bsym.flat_proxy_args)):
        return False
    tensors = [*outs, *bsym.flat_proxy_args]
    if not bsym.flat_proxy_args and name not in _CONSTANTS:
        return False
    if not all(map(_is_usual, tensors)) or _device_of(tensors) is None:
        return False
    return not is_opaque or _is_compilable(bsym)


def _has_sizes_that_are_values(symbol: Symbol) -> bool:
    """Whether an operation computes from values what its results' sizes are: of tensors without data it gives such sizes, and no values."""
    made = made_for(symbol)
    return made is not None and isinstance(made.function, Sized)


def _is_compilable(bsym: BoundSymbol) -> bool:
    """Whether a gradient by ``torch.func``, which runs torch's autograd in each call, leaves operations that can be compiled."""
    (run,) = (bsym._call_ctx or {}).values()
    leaves, spec = tree_flatten((bsym.args, bsym.kwargs))
    places = [i for i, v in enumerate(leaves) if isinstance(v, TensorProxy)]

    def function(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for i, t in zip(places, tensors, strict=True):
            given[i] = t
        args, kwargs = tree_unflatten(given, spec)
        return run(*args, **kwargs)

    proxies = [leaves[i] for i in places]
    like = [(p.shape, dtypes.to_torch_dtype(p.dtype), devices.to_torch_device(p.device)) for p in proxies]
    return is_compilable(function, like)


def _is_never_of_aten(name: str) -> bool:
    """Whether a symbol of ours stands for an operation of aten that is to stay as it is: ``aten_<name>_<overload>``."""
    return name.startswith("aten_") and any(name.startswith(f"aten_{never}_") for never in _NEVER)


def _draws_or_updates(bsym: BoundSymbol) -> bool:
    """Whether these arguments have an operation draw numbers, or update statistics."""
    arguments = dict(zip(_PARAMETERS.get(bsym.sym.name, ()), bsym.args, strict=False)) | bsym.kwargs
    if bsym.sym.name == "dropout":
        return arguments.get("p", 0.5) != 0.0 and arguments.get("training", True) is not False
    if bsym.sym.name == "batch_norm":
        return arguments.get("training", True) is not False
    return bool(arguments.get("dropout_p", 0.0))


_PARAMETERS = {
    "dropout": ("input", "p", "training"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p"),
}


def _is_usual(p: TensorProxy) -> bool:
    """Whether inductor has code for such a tensor; for the mean of nothing it is another than torch's."""
    has_entries = all(type(n) is int and n > 0 for n in p.shape)
    return has_entries and dtypes.to_torch_dtype(p.dtype) in _DTYPES and device_name(p).partition(":")[0] in _DEVICES


def device_name(p: TensorProxy) -> str:
    """The device of a tensor, as a word."""
    return _name_of(p.device)


@functools.cache
def _name_of(device: devices.Device) -> str:
    return str(devices.to_torch_device(device))


def _device_of(tensors: list[TensorProxy]) -> str | None:
    """The one device of an operation; scalars may come from the CPU."""
    found = {device_name(p) for p in tensors if p.ndim or not device_name(p).startswith("cpu")} or {device_name(tensors[0])}
    return found.pop() if len(found) == 1 else None


def region_device(bsym: BoundSymbol) -> str:
    """Where an operation of a region runs."""
    device = _device_of([p for p in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args) if isinstance(p, TensorProxy)])
    assert device is not None
    return device


def is_view(bsym: BoundSymbol) -> bool:
    """Whether an operation that may be in a region computes nothing, or copies at most: then each that needs it does it again."""
    return len(bsym.flat_proxy_args) == 1 and may_share_memory(bsym) and bsym.sym.name not in _CONVERSIONS


def may_share_memory(bsym: BoundSymbol) -> bool:
    """Whether what an operation gives, one that may be in a region, may be an argument of it, or a part of one."""
    return _is_view_by_name(bsym.sym.name)


@functools.cache
def _is_view_by_name(name: str) -> bool:
    if name.startswith("aten_"):  # and the overload after the name: both may have several words
        words = name.split("_")[1:]
        names = ["_".join(words[:n]) for n in range(1, len(words))]
        return "_unsafe_view" in names or any(map(may_share_by_name, names))
    return name in _VIEWS_OF_PRIMS or may_share_by_name(name)


def is_entrywise(bsym: BoundSymbol) -> bool:
    """Whether an operation, one that may be in a region, computes each entry of its one result of one entry of each argument."""
    return bsym.sym.name in _ENTRYWISE and isinstance(bsym.output, TensorProxy)


def is_constant(bsym: BoundSymbol) -> bool:
    """Whether an operation makes a tensor out of numbers alone."""
    return not bsym.flat_proxy_args


@_once
def changes_memory(bsym: BoundSymbol) -> bool:
    """Whether an operation has to stay in its place among all that come before it: others may see what it does."""
    return not has_any_tag(bsym, random_numbers.RANDOM) and (has_any_tag(bsym, _CHANGING) or bsym.sym.name == "copy_")


def target_of(bsym: BoundSymbol) -> Any:
    """The tensor that an operation writes into."""
    return bsym.args[1] if bsym.sym.name == "copy_" and len(bsym.args) > 1 else None
