"""One name for one operation: torch function, tensor method, operator and aten overload.

``F.relu``, ``torch.relu``, ``Tensor.relu`` and ``aten.relu.default`` are all "relu", ``x + y`` is "add".
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_ALIASES = {
    "absolute": "abs", "concat": "cat", "concatenate": "cat", "multiply": "mul", "subtract": "sub", "divide": "div",
    "true_divide": "div", "negative": "neg", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "special_expit": "sigmoid", "special_erf": "erf", "special_softmax": "softmax", "clip": "clamp", "greater": "gt",
    "less": "lt", "_unsafe_view": "view", "_sparse_mm": "mm", "_reshape_alias": "reshape", "fix": "trunc", "arctan": "atan",
    "arcsin": "asin", "arccos": "acos", "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "arctan2": "atan2",
    "special_digamma": "digamma", "special_psi": "digamma", "special_gammaln": "lgamma", "special_multigammaln": "mvlgamma",
    "special_gammainc": "igamma", "special_gammaincc": "igammac", "special_polygamma": "polygamma", "special_i0": "i0",
    "special_erfc": "erfc", "special_erfinv": "erfinv", "special_exp2": "exp2", "special_expm1": "expm1", "special_sinc": "sinc",
    "special_log1p": "log1p", "special_logit": "logit", "special_xlogy": "xlogy", "special_round": "round",
    "special_logsumexp": "logsumexp", "special_log_softmax": "log_softmax", "__mod__": "remainder", "__floordiv__": "floor_divide",
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__isub__": "sub_", "__rsub__": "rsub",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__truediv__": "div", "__div__": "div", "__itruediv__": "div_",
    "__idiv__": "div_", "__rtruediv__": "rdiv", "__rdiv__": "rdiv", "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__neg__": "neg", "__pow__": "pow", "__rpow__": "rpow", "__ipow__": "pow_", "__abs__": "abs", "__getitem__": "getitem",
    "__setitem__": "setitem_", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__eq__": "eq", "__ne__": "ne",
}  # fmt: skip

# Operations of libraries that are torch's.
_OF_LIBRARIES = {"transformers::grouped_mm_fallback": "_grouped_mm"}

# Functions that share their name with another operation.
_RENAMED = {torch.nn.functional.unfold: "im2col", torch.nn.functional.fold: "col2im"}

METADATA = frozenset(
    "size shape ndim dim ndimension numel nelement dtype device layout requires_grad is_cuda is_cpu is_meta is_floating_point "
    "is_complex is_contiguous stride storage_offset is_leaf grad_fn grad __len__ __hash__ __repr__ __str__ element_size "
    "itemsize nbytes is_nested is_sparse is_quantized get_device _backward_hooks names data_ptr is_inference __format__ "
    "is_same_size is_mkldnn is_conj is_neg is_signed is_shared retains_grad output_nr _is_view is_distributed".split()
)


def op_key(func: Callable) -> Any:
    """The registry key of an operation: its canonical name for torch's own, the function itself for others.

    >>> op_key(torch.nn.functional.relu), op_key(torch.ops.aten.relu.default), op_key(torch.Tensor.__add__)
    ('relu', 'relu', 'add')
    """
    return _key_of_torchs(func) if type(func) in _OF_TORCH or _is_tensors_attribute(func) else _key(func)


def _is_tensors_attribute(func: Callable) -> bool:
    """Whether it reads or sets an attribute that every tensor has: torch makes such a function anew for each access."""
    if type(func) is not types.MethodWrapperType or type(func.__self__) is not types.GetSetDescriptorType:
        return False
    return func.__self__.__objclass__ is torch._C.TensorBase


def _key(func: Callable) -> Any:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
        namespace, name = packet._qualified_op_name.split("::")
        return (
            _ALIASES.get(name, name)
            if namespace in ("aten", "prims")
            else _OF_LIBRARIES.get(packet._qualified_op_name, packet._qualified_op_name)
        )
    if isinstance(func, types.FunctionType) and func in _RENAMED:
        return _RENAMED[func]
    name = getattr(func, "__name__", None)
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):  # a property of torch.Tensor: x.T
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else f"{func.__self__.__name__}_"
    module = getattr(func, "__module__", None) or getattr(getattr(func, "__objclass__", None), "__module__", None) or ""
    if name is None or not (module.startswith("torch") or isinstance(func, _BUILTIN_TYPES)):
        return func
    return _ALIASES.get(name, name)


_BUILTIN_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MethodWrapperType,
)

# What there is a fixed number of, as of the attributes of tensors, so that names found once can be kept.
_OF_TORCH = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.MethodDescriptorType, types.WrapperDescriptorType)
_key_of_torchs = functools.cache(_key)


def _accesses() -> Iterator[Callable]:
    """What ``x.shape`` and ``x.dim()`` call, of all that a tensor has."""
    for member in vars(torch._C.TensorBase).values():
        if isinstance(member, types.GetSetDescriptorType):
            yield member.__get__
        elif isinstance(member, _OF_TORCH):
            yield member


# Most of what asks: torch's accesses of `METADATA`, which need no key.
METADATA_ACCESSES = frozenset(access for access in _accesses() if op_key(access) in METADATA)


def op_name(func: Callable) -> str:
    """Readable name of an operation for messages and traces."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{func}"
    key = op_key(func)
    if not isinstance(key, str):
        return getattr(func, "__qualname__", repr(func))
    own = (func.__self__ if func.__name__ in ("__get__", "__set__") else func).__name__
    module = getattr(func, "__module__", None) or ""
    if module.startswith("torch.nn.functional") or module == "torch._C._nn":
        public = next((name for name in (key, own) if hasattr(torch.nn.functional, name)), None)
        return f"torch.nn.functional.{public}" if public else f"{module}.{own}"
    family, _, rest = key.partition("_")  # torch.linalg.svd calls itself linalg_svd
    if family in ("linalg", "special", "fft") and hasattr(getattr(torch, family), rest):
        return f"torch.{family}.{rest}"
    return f"torch.Tensor.{own}" if not hasattr(torch, key) and hasattr(torch.Tensor, own) else f"torch.{key}"


def identifier(name: Any) -> str:
    """The name of an operation, or an operator itself, as what it is called in traces: ``aten::add.Tensor`` is ``aten_add_Tensor``."""
    return str(name).replace("::", "_").replace(".", "_")


def is_in_place(key: str) -> bool:
    """Whether a canonical name is that of an in-place operation, by torch's naming rule."""
    return key.endswith("_") and not key.endswith("__")


# as torch reads Python's types, whatever its default dtype
PYTHONS_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def torch_dtype(dtype: Any) -> Any:
    """The dtype that torch takes a type of Python for: ``x.to(float)``; all else as it is."""
    return PYTHONS_DTYPES.get(dtype, dtype) if isinstance(dtype, type) else dtype
