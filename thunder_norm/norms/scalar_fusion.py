"""Fusion of norm arithmetic: 0-dim float64 operations on CPU become one Python function on floats.

A norm is a scalar, and a kernel launch per scalar operation would cost a hundred times the arithmetic.  Python floats are IEEE
doubles, so ``+ - * /``, comparisons, maximum and minimum give bit for bit what torch gives, and ``sqrt`` the correctly rounded
root, from which torch's is one unit in the last place away on some processors; other functions are called in torch.  On
CUDA the scalars stay tensors and nvFuser fuses them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_norm.tracing.shared_memory.freed_inputs import deleting_again
from thunder.core import dtypes, prims
from thunder.core.devices import DeviceType
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.extend import OperatorExecutor

scalar_executor = OperatorExecutor("thunder_norm_scalars", version="1")
_counter = itertools.count()


def maximum(a: float, b: float) -> float:
    """torch.maximum on floats: NaN wins."""
    return a + b if a != a or b != b else (a if a >= b else b)


def minimum(a: float, b: float) -> float:
    """torch.minimum on floats: NaN wins."""
    return a + b if a != a or b != b else (a if a <= b else b)


def divide(a: float, b: float) -> float:
    """IEEE division: by zero it is an infinity or NaN, where Python raises."""
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def square_root(a: float) -> float:
    """torch.sqrt on floats: NaN for a negative number."""
    return math.sqrt(a) if a >= 0 else math.nan


def power(a: float, exponent: float) -> float:
    """torch.pow by a number, which is rounded differently from that by a tensor."""
    return torch.tensor(a, dtype=torch.float64).pow(exponent).item()


def in_torch(function: Callable) -> Callable[..., float]:
    """A function whose last bit is the library's own, called in torch."""

    def call(*args: float) -> float:
        return function(*(torch.tensor(float(a), dtype=torch.float64) for a in args)).item()

    return call


_HELPERS = {"maximum": maximum, "minimum": minimum, "divide": divide, "square_root": square_root, "power": power}
_BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "true_divide": "divide({0}, {1})",
    "div": "divide({0}, {1})",
}
_BINARY |= {"gt": "{0} > {1}", "ge": "{0} >= {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}"}
_BINARY |= {"maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})"}
_BINARY |= {"clamp_min": _BINARY["maximum"], "clamp_max": _BINARY["minimum"]}
_UNARY = {"neg": "-{0}", "abs": "abs({0})", "sqrt": "square_root({0})", "reciprocal": "divide(1.0, {0})", "clone": "{0}"}
_UNARY |= {"shallow_copy": "{0}"}
_BINARY |= {"torch_div_prim_impl": _BINARY["div"]}  # Thunder's own: torch.div, except for integers
_POWERS = {1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", -1.0: "divide(1.0, {0})"}  # bit for bit torch's
_ARITHMETIC = ("add", "sub", "mul", "abs")  # which on flags are something else in torch than in Python
_CLAMPS = {  # by whether there is a least, and a largest number
    (True, False): "maximum({0}, {1})",
    (False, True): "minimum({0}, {1})",
    (True, True): "minimum(maximum({0}, {1}), {2})",
    (False, False): "{0}",
}
_CONSTANTS = {"ones": 1.0, "zeros": 0.0, "ones_like": 1.0, "zeros_like": 0.0}
_IN_TORCH = {
    name: in_torch(getattr(torch, name))
    for name in "exp exp2 expm1 log log1p log2 tanh sigmoid erf erfc sin cos tan atan sinh cosh rsqrt pow atan2".split()
}


def fuse_scalars(trace: TraceCtx) -> TraceCtx:
    """Group the scalar operations of an execution trace into few Python functions; the trace itself if there are none."""
    bsyms = [b for b in trace.bound_symbols if b.sym.id != prims.PrimIDs.DEL]
    if sum(map(_is_fused, bsyms)) < 2:
        return trace
    new = from_trace(trace)
    new.bound_symbols = []
    groups = _schedule(bsyms)
    last_use = {p.name: position for position, group in enumerate(groups) for b in group for p in b.flat_proxy_args}
    for position, group in enumerate(groups):
        if len(group) == 1 or not _is_fused(group[0]):
            new.bound_symbols.extend(group)
        else:
            new.bound_symbols.append(fused(new, group, [b.output for b in group if last_use.get(b.output.name, -1) > position]))
    new.set_provenance(TraceProvenance("Fusion of norm arithmetic"))
    return deleting_again(new, trace)


def _schedule(bsyms: Sequence[BoundSymbol]) -> list[list[BoundSymbol]]:
    """Reorder into alternating runs: everything else in its own order, then all scalar operations that are ready."""
    producer = {p.name: i for i, b in enumerate(bsyms) for p in b.flat_proxy_outs}
    awaited = [{producer[p.name] for p in b.flat_proxy_args if p.name in producer} - {i} for i, b in enumerate(bsyms)]
    readers: list[list[int]] = [[] for _ in bsyms]
    for i, producers in enumerate(awaited):
        for producing in producers:
            readers[producing].append(i)
    is_scalar = [_is_fused(b) for b in bsyms]
    ready = [i for i in range(len(bsyms)) if is_scalar[i] and not awaited[i]]  # scalar operations, as a heap: in their order

    def finish(done: int) -> None:
        for i in readers[done]:
            awaited[i].discard(done)
            if is_scalar[i] and not awaited[i]:
                heapq.heappush(ready, i)

    groups: list[list[BoundSymbol]] = []
    others = [i for i in range(len(bsyms)) if not is_scalar[i]]
    position = 0
    while ready or position < len(others):
        while position < len(others) and not awaited[others[position]]:
            groups.append([bsyms[others[position]]])
            finish(others[position])
            position += 1
        group = []
        while ready:
            group.append(bsyms[first := heapq.heappop(ready)])
            finish(first)
        if group:
            groups.append(group)
    return groups


def _is_fused(bsym: BoundSymbol) -> bool:
    """Whether an operation is arithmetic on the CPU; a GPU would be waited for."""
    proxies = (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)
    return _expression(bsym) is not None and all(p.device.devicetype is DeviceType.CPU for p in proxies)


def _is_scalar(value: Any) -> bool:
    return (
        isinstance(value, TensorProxy) and value.ndim == 0 and dtypes.to_torch_dtype(value.dtype) in (torch.float64, torch.bool)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, Proxy)


def _expression(bsym: BoundSymbol) -> str | None:
    """The operation as a Python expression with {0}, {1}, ... for its operands, or None if it is not one of ours."""
    if not _is_scalar(bsym.output) or BoundSymbolTag.BACKWARD in bsym.tags and bsym.sym.id == prims.PrimIDs.GET_GRAD:
        return None
    name = bsym.sym.name
    constant = _constant(bsym)
    if constant is not None:
        return _literal(constant)
    operands = [a for a in bsym.args if a is not None]
    if not all(_is_scalar(a) or _is_number(a) for a in operands):
        return None
    extra = {k: v for k, v in bsym.kwargs.items() if v is not None and not (k == "alpha" and v == 1)}
    if name == "where" and len(operands) == 3:
        return "{1} if {0} else {2}"
    if name == "clamp" and not extra and all(map(_is_number, operands[1:])):
        return _CLAMPS[tuple(a is not None for a in (*bsym.args[1:], None)[:2])]
    if extra or name in _ARITHMETIC and dtypes.to_torch_dtype(bsym.output.dtype) is torch.bool:
        return None
    if len(operands) == 2 and name in _BINARY:
        return _BINARY[name]
    if len(operands) == 1 and name in _UNARY:
        return _UNARY[name]
    if name == "pow" and len(operands) == 2 and _is_number(operands[1]):
        return _POWERS.get(operands[1], "power({0}, {1})")
    if name in _IN_TORCH and operands:
        return f"{name}({', '.join(f'{{{i}}}' for i in range(len(operands)))})"
    return None


def _constant(bsym: BoundSymbol) -> float | None:
    """The value of an operation that makes a constant scalar."""
    if dtypes.to_torch_dtype(bsym.output.dtype) is not torch.float64:
        return None
    if bsym.sym.name in ("full", "full_like"):
        value = bsym.args[1] if len(bsym.args) > 1 else bsym.kwargs.get("fill_value")
    else:
        value = _CONSTANTS.get(bsym.sym.name)
    return value if _is_number(value) else None


def fused(trace: TraceCtx, group: Sequence[BoundSymbol], outputs: Sequence[TensorProxy]) -> BoundSymbol:
    """One bound symbol for a group of scalar operations, some of whose results are used elsewhere."""
    made = {b.output.name for b in group}
    inputs = list({p.name: p for b in group for p in b.flat_proxy_args if p.name not in made}.values())
    name = f"NormFusion{next(_counter)}"
    source = _source(name, group, inputs, outputs)
    function = _compiled(name, source)

    def with_call_ctx(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: function}

    symbol = Symbol(name=name, id=name, is_prim=True, is_fusion=True, executor=scalar_executor, _bind_postprocess=with_call_ctx)
    with tracectx(trace):
        return symbol.bind(*inputs, output=tuple(outputs), subsymbols=tuple(group))


def _source(name: str, group: Sequence[BoundSymbol], inputs: Sequence[TensorProxy], outputs: Sequence[TensorProxy]) -> str:
    """Python source of a fused group: numbers out of tensors, plain arithmetic, numbers into tensors at once."""
    lines = [f"def {name}({', '.join(p.name for p in inputs)}):"]
    lines += [f"    {p.name} = {p.name}.item()" for p in inputs]
    lines += [_statement(b) for b in group]
    floats = [p for p in outputs if dtypes.to_torch_dtype(p.dtype) is torch.float64]
    flags = [p for p in outputs if dtypes.to_torch_dtype(p.dtype) is torch.bool]
    if floats:
        lines.append(
            f"    ({''.join(p.name + ', ' for p in floats)}) = tensor([{', '.join(p.name for p in floats)}], dtype=float64).unbind()"
        )
    lines += [f"    {p.name} = tensor({p.name})" for p in flags]
    lines.append(f"    return ({''.join(p.name + ', ' for p in outputs)})")
    return "\n".join(lines)


def as_function_of_floats(trace: TraceCtx) -> Callable | None:
    """The whole of an execution trace as a function of Python numbers, or None if it does anything but scalar arithmetic.

    Also of scalars on a GPU, where an operation is the launch of a kernel: waiting once for what they are takes less.  A tensor costs a microsecond to make and another to save for the backward pass; numbers between forward and backward cost
    nothing.  The function takes and returns what the trace does, except that collections are tuples.
    """
    lines, scalars = [], []
    for bsym in trace.bound_symbols:
        scalars.extend(bsym.subsymbols if bsym.sym.executor is scalar_executor else [bsym])
    for bsym in scalars:
        if bsym.sym.id in (prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.DEL) or bsym.sym.name == "clear_mutable_collection":
            continue
        if bsym.sym.id == prims.PrimIDs.UNPACK_SEQUENCE:
            lines.append(f"    {_targets(bsym.output)} = {bsym.args[0].name}")
        elif bsym.sym.id == prims.PrimIDs.RETURN:
            lines.append(f"    return {_names(bsym.args if len(bsym.args) > 1 else bsym.args[0])}")
        elif _expression(bsym) is not None:
            lines.append(_statement(bsym))
        else:
            return None
    arguments = [p for p in trace.bound_symbols if p.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    if not all(_is_scalar(b.output) or not isinstance(b.output, TensorProxy) for b in arguments):
        return None
    signature = trace.siginfo()
    name = f"{signature.name}_on_floats"
    # the signature has arguments that are not unpacked because nothing is in them: no value saved for the backward pass
    return _compiled(name, "\n".join([f"def {name}({', '.join(argument for argument, _ in signature.args)}):", *lines]))


def _names(tree: Any) -> str:
    """A nested structure of proxies and constants as Python source."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {_names(v)}" for k, v in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        return "(" + "".join(_names(v) + ", " for v in tree) + ")"
    return tree.name if isinstance(tree, Proxy) else repr(tree)


def _targets(tree: Any) -> str:
    """A nested structure of proxies as the left side of an assignment; what is not used there (None) goes nowhere."""
    if isinstance(tree, tuple | list):
        return "(" + "".join(_targets(v) + ", " for v in tree) + ")"
    return tree.name if isinstance(tree, Proxy) else "_"


def _statement(bsym: BoundSymbol) -> str:
    """One operation on numbers."""
    expression = _expression(bsym)
    operands = [a.name if isinstance(a, Proxy) else _literal(a) for a in bsym.args if isinstance(a, Proxy) or _is_number(a)]
    return f"    {bsym.output.name} = {expression.format(*operands)}"


def _compiled(name: str, source: str) -> Callable:
    namespace: dict[str, Any] = {
        **_HELPERS,
        **_IN_TORCH,
        "tensor": torch.tensor,
        "float64": torch.float64,
        "inf": math.inf,
        "nan": math.nan,
    }
    exec(compile(source, f"<{name}>", "exec"), namespace)  # noqa: S102 - our own source, built from names and numbers
    return namespace[name]


def _literal(value: float) -> str:
    return repr(float(value)) if not isinstance(value, bool) else repr(value)
