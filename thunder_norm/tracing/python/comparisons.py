"""Comparisons: by methods that the program's classes have for it, and of objects that a proxy stands for.

Thunder compares what it has natively: ``==`` of a class that the user wrote is not interpreted, so that nothing guards what it reads; and
two proxies are two objects, also where they stand for one tensor.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from thunder_norm.tracing.guarding import guards
from thunder_norm.tracing.guarding.classes import LIBRARIES, in_classes
from thunder_norm.tracing.guarding.value_kinds import is_number_of_tensors
from thunder_norm.tracing.python.identities import is_one
from thunder_norm.tracing.replacement import Replacement
from thunder_norm.tracing.torch_functions.known_values import is_replaced
from thunder_norm.tracing.torch_functions.tensor_classes import is_asked_first, may_have_operators, of_class, own_operator
from thunder_norm.tracing.torch_functions.torch_arguments import as_pythons, holds_number
from thunder.core import dtypes
from thunder.core import interpreter as thunders
from thunder.core.interpreter import InterpreterStack, ProvenanceRecord, PseudoInst, WrappedValue, do_raise, wrap, wrap_const
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy

_handlers = thunders._default_opcode_handler_map
_thunders_compare_op = _handlers["COMPARE_OP"]
_METHODS = {
    "<": ("__lt__", "__gt__"),
    "<=": ("__le__", "__ge__"),
    "==": ("__eq__", "__eq__"),
    "!=": ("__ne__", "__ne__"),
    ">": ("__gt__", "__lt__"),
    ">=": ("__ge__", "__le__"),
}
COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
_FUNCTIONS = {
    "==": (torch.eq, torch.eq),
    "!=": (torch.ne, torch.ne),
    "<": (torch.lt, torch.gt),
    "<=": (torch.le, torch.ge),
    ">": (torch.gt, torch.lt),
    ">=": (torch.ge, torch.le),
}
_ORDERS = _FUNCTIONS.keys() - {"==", "!="}
_OPERATION_BITS = 5 if sys.version_info >= (3, 13) else 4 if sys.version_info >= (3, 12) else 0  # beside the operation's number
_WANTS_BOOL = 16  # from Python 3.13 on
_EXCEPTION_RAISED = thunders.INTERPRETER_SIGNALS.EXCEPTION_RAISED
_NO_OPERANDS = (type(None), str, bytes, list, tuple, dict, set, frozenset)
_COMPARE_NATIVELY = LIBRARIES | {"numpy"}


def _compare_op(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
    b, a = stack.getitem_wrapped(-1), stack.getitem_wrapped(-2)
    guards.look_whole((b, a))
    assert inst.arg is not None
    operation = dis.cmp_op[inst.arg >> _OPERATION_BITS]
    meets_number = _is_tensor_and_number(a, b) or _is_tensor_and_number(b, a)
    if operation in _ORDERS and (known := guards.known_numbers()) is not None and _is_beside_unknown(a, b):
        stack.pop_wrapped()
        stack.pop_wrapped()
        return do_raise(_without_order(operation, known(a.value), known(b.value)))
    if operation in COMPARISONS and _meets_unknown(a, b):
        stack.pop_wrapped()
        stack.pop_wrapped()
        return _of_tensors(stack, operation, a, b)
    if operation in COMPARISONS and (meets_number or _is_of_unknown(a, b)):  # Thunder would make a known outcome of the latter
        stack.pop_wrapped()
        stack.pop_wrapped()
        a, b = as_pythons(a), as_pythons(b)
        result = thunders._interpret_call(COMPARISONS[operation], a, b)
        return result if result is _EXCEPTION_RAISED else stack.append(result)
    is_of_class = of_class(a) or of_class(b)
    has_own = any(own_operator(x, name) is not None for x in (a, b) if may_have_operators(x) for name in _METHODS[operation])
    if not has_own and operation in ("==", "!=") and (_is_no_operand(a, b) or _is_no_operand(b, a)):
        stack.pop_wrapped()
        stack.pop_wrapped()
        return stack.append(_wrapped(operation == "!=", a, b))
    if is_of_class or has_own:
        stack.pop_wrapped()
        stack.pop_wrapped()
        return _taken(_of_classes(a, b, operation), inst, stack)
    # torch's function refuses as torch does, and is asked for what a tensor is since it was written into
    if (operation in _ORDERS and _are_complex(a, b)) or is_replaced(a.value) or is_replaced(b.value):
        stack.pop_wrapped()
        stack.pop_wrapped()
        return _of_tensors(stack, operation, a, b)
    if not _has_own(a, operation) and not _has_own(b, operation):
        height, scopes = len(stack._stack), get_jit_ctx().computation_trace.scopes
        depth = len(scopes)
        try:
            return _thunders_compare_op(inst, stack=stack, **state)
        except (TypeError, ValueError, RuntimeError) as e:
            if operation in COMPARISONS and (isinstance(a.value, TensorProxy) or isinstance(b.value, TensorProxy)):
                del stack._stack[height - 2 :], scopes[depth:]  # the symbol leaves its own behind
                return _of_tensors(
                    stack, operation, a, b
                )  # which says what torch does of shapes that do not fit, and of no numbers
            if not isinstance(e, TypeError) or isinstance(a.value, Proxy) or isinstance(b.value, Proxy):
                raise
            return do_raise(e)  # of objects that have no order
    stack.pop_wrapped()
    stack.pop_wrapped()
    return _taken(_compared(a, b, operation), inst, stack)


def _taken(result: Any, inst: dis.Instruction, stack: InterpreterStack) -> Any:
    """Put the result of a comparison on the stack."""
    assert inst.arg is not None
    if result is not _EXCEPTION_RAISED and sys.version_info >= (3, 13) and inst.arg & _WANTS_BOOL:
        result = thunders._interpret_call(bool, result)
    return result if result is _EXCEPTION_RAISED else stack.append(result)


def _of_classes(a: WrappedValue, b: WrappedValue, operation: str) -> Any:
    """The same for tensors of classes that may say it themselves."""
    name, reflected = _METHODS[operation]
    asked = [(a, b, name), (b, a, reflected)]
    if may_have_operators(b) and is_asked_first(b, a, reflected):
        asked.reverse()
    for left, right, method in asked:
        if isinstance(left.value, TensorProxy):
            of_torch = getattr(torch.Tensor, method)
            result = thunders._interpret_call(wrap_const(own_operator(left, method) or of_torch), left, right)
        elif _has_own(left, operation):
            result = _asked(left, right, method)
        else:
            continue
        if result is _EXCEPTION_RAISED or result.value is not NotImplemented:
            return result
    if operation in ("==", "!="):
        return _wrapped(is_one(a, b) is (operation == "=="), a, b)
    return do_raise(_without_order(operation, a.value, b.value))


def _of_tensors(stack: InterpreterStack, operation: str, a: WrappedValue, b: WrappedValue) -> Any:
    """What torch's function says of two operands that were taken from the stack, one of which is a tensor."""
    function, reflected = _FUNCTIONS[operation]
    of_tensor = (function, a, b) if isinstance(a.value, TensorProxy) else (reflected, b, a)
    result = thunders._interpret_call(*of_tensor)
    return result if result is _EXCEPTION_RAISED else stack.append(result)


def _meets_unknown(a: WrappedValue, b: WrappedValue) -> bool:
    """Whether a tensor is compared with a number that is made of the values of tensors: Python's operators know no such number."""
    values = (a.value, b.value)
    return any(map(is_number_of_tensors, values)) and any(type(v) is TensorProxy for v in values)


def _is_beside_unknown(a: WrappedValue, b: WrappedValue) -> bool:
    """Whether a number that is made of the values of tensors is compared with something of Python's that has no order with numbers."""
    values = (a.value, b.value)
    return any(map(is_number_of_tensors, values)) and any(isinstance(v, _NO_OPERANDS) for v in values)


def _without_order(operation: str, a: Any, b: Any) -> TypeError:
    return TypeError(f"{operation!r} not supported between instances of {type(a).__name__!r} and {type(b).__name__!r}")


def _is_of_unknown(a: WrappedValue, b: WrappedValue) -> bool:
    """Whether two numbers are compared of which one is made of the values of tensors."""
    values = (a.value, b.value)
    return any(map(is_number_of_tensors, values)) and all(isinstance(v, NumberProxy | int | float | complex) for v in values)


def _is_tensor_and_number(tensor: WrappedValue, x: WrappedValue) -> bool:
    """Whether a tensor is compared with a number of NumPy, which torch takes for one of Python, on both sides."""
    return isinstance(tensor.value, TensorProxy) and not isinstance(x.value, tuple | list | slice) and holds_number(x)


def _are_complex(*operands: WrappedValue) -> bool:
    """Whether a tensor is among them, and complex numbers are."""
    tensors = [x.value for x in operands if isinstance(x.value, TensorProxy)]
    return bool(tensors) and any(
        isinstance(x.value, complex) or (isinstance(x.value, TensorProxy) and dtypes.is_complex_dtype(x.value.dtype))
        for x in operands
    )


def _is_no_operand(x: WrappedValue, tensor: WrappedValue) -> bool:
    """Whether a tensor is equal to `x` for no values: torch's ``==`` leaves such objects to Python, which asks whether both are one."""
    kind = type(x.value)
    return type(tensor.value) is TensorProxy and (kind in _NO_OPERANDS or kind.__eq__ is object.__eq__)


def _has_own(x: WrappedValue, operation: str) -> bool:
    """Whether a class that a user wrote says what the operation is."""
    kind = type(x.value)
    if kind is not Compared and (isinstance(x.value, Proxy | type) or kind.__module__.partition(".")[0] in _COMPARE_NATIVELY):
        return False
    names = (*_METHODS[operation], "__eq__") if operation == "!=" else _METHODS[operation]
    return any(isinstance(in_classes(kind.__mro__, name, None), FunctionType) for name in names)


def _compared(a: WrappedValue, b: WrappedValue, operation: str) -> Any:
    """``a == b`` and the like: the method of the left, that of the right reflected, identity (Python's data model, 3.3.1)."""
    name, reflected = _METHODS[operation]
    asked = [(a, b, name), (b, a, reflected)]
    kind, base = type(b.value), type(a.value)
    if kind is not base and issubclass(kind, base):
        asked.reverse()
    for left, right, method in asked:
        result = _asked(left, right, method)
        if result is _EXCEPTION_RAISED or result.value is not NotImplemented:
            return result
    if operation in ("==", "!="):
        return _wrapped(is_one(a, b) is (operation == "=="), a, b)
    return do_raise(_without_order(operation, a.value, b.value))


def _asked(left: WrappedValue, right: WrappedValue, method: str) -> Any:
    found = in_classes(type(left.value).__mro__, method, None)
    if method == "__ne__" and found is object.__ne__:  # what == says, turned round
        result = _asked(left, right, "__eq__")
        if result is _EXCEPTION_RAISED or result.value is NotImplemented:
            return result
        return thunders._interpret_call(lambda x: not x, result)
    guards.note_attribute(left, method)
    return wrap_const(NotImplemented) if found is None else thunders._interpret_call(wrap_const(found), left, right)


def _is_op(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> None:
    b, a = stack.pop_wrapped(), stack.pop_wrapped()
    is_same = is_one(a, b)
    guards.note_identity(a, b, is_same)
    stack.append(is_same is not bool(inst.arg))


def _noting_none(opname: str) -> Any:
    """The handler of a jump that asks whether something is None, which is how ``is None`` is compiled."""
    jump = _handlers[opname]

    def handler(inst: dis.Instruction, /, stack: InterpreterStack, **state: Any) -> Any:
        guards.note_none(stack.getitem_wrapped(-1))
        return jump(inst, stack=stack, **state)

    return handler


def _wrapped(result: bool, *of: WrappedValue) -> WrappedValue:
    return wrap(result, provenance=ProvenanceRecord(PseudoInst.OPAQUE, inputs=[x.provenance for x in of]))


class Compared:
    """What stands for a value that a function of the program compares; of ``functools.cmp_to_key``."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, compare: Callable[[Any, Any], Any], obj: Any):
        self.compare = compare
        self.obj = obj

    def __lt__(self, other: Compared) -> Any:
        return self.compare(self.obj, other.obj) < 0

    def __gt__(self, other: Compared) -> Any:
        return self.compare(self.obj, other.obj) > 0

    def __eq__(self, other: object) -> Any:
        return self.compare(self.obj, other.obj) == 0  # type: ignore[attr-defined]

    def __le__(self, other: Compared) -> Any:
        return self.compare(self.obj, other.obj) <= 0

    def __ge__(self, other: Compared) -> Any:
        return self.compare(self.obj, other.obj) >= 0


REPLACEMENTS = (
    Replacement(_handlers, "COMPARE_OP", _compare_op, "_compare_op_handler, which compares values natively"),
    Replacement(_handlers, "IS_OP", _is_op, "_is_op_handler: a is b, of what stands for values"),
    *(
        Replacement(_handlers, name, _noting_none(name), "_pop_jump_forward_if_none_handler_3_11 and its likes: tos is None")
        for name in _handlers
        if name.endswith(("_IF_NONE", "_IF_NOT_NONE"))
    ),
)
