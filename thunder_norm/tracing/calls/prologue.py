"""A prologue with all of its checks, written as one function that calls little.

What it accepts Thunder's prologue accepts.  The other way round it may refuse what the prologue accepts (a tensor with other dispatch keys, a
state of the process that only Thunder's own call looks at): then the call goes Thunder's way.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder_norm.tracing.calls.module_attributes import ModuleAttributes, unchanged_of
from thunder_norm.tracing.calls.precision import precision_of_now
from thunder_norm.tracing.guarding.tensor_checks import check_like
from thunder_norm.tracing.guarding.written_code import code_of
from thunder.core.module import ThunderModule
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

Inputs = Callable[[tuple, dict], tuple | None]

# of ThunderModule: where what it hands out stands
_TABLES = {
    PrimIDs.UNPACK_PARAMETER: "_overrides_parameters",
    PrimIDs.UNPACK_BUFFER: "_overrides_buffers",
    PrimIDs.UNPACK_SUBMODULE: "_module_cache",
}
_GETTERS = {
    PrimIDs.UNPACK_PARAMETER: "get_parameter",
    PrimIDs.UNPACK_BUFFER: "get_buffer",
    PrimIDs.UNPACK_SUBMODULE: "get_submodule",
}
# What is asked of the state of the process, and what Thunder's own prologue knows it as.
_STATE = {"default_dtype": "get_default_dtype()", "is_grad_enabled": "is_grad_enabled()"}
_AS_IT_IS_HERE = {
    "default_device": torch.device("cpu"),  # without a mode that changes it
    "no_grad_sync": False,
}
# They only read: what is read may still be checked after them.
_READS = (PrimIDs.UNPACK_GETITEM, PrimIDs.UNPACK_ATTR, PrimIDs.UNPACK_FUNCTION_OBJ)
_IGNORED = ("alias_tensor_indices",)  # what of it matters is a guard of ours (`aliases`)


class _Unknown(Exception):
    """The prologue asks for something that cannot be asked here."""


class _Writer:
    """The lines of the function, and the constants that they name."""

    def __init__(self, trace: TraceCtx, module: ThunderModule | None):
        self.trace = trace
        self.module = module
        self.precision = precision_of_now()
        self.as_it_is_here = _AS_IT_IS_HERE | self.precision.in_thunder()
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.waiting: list[Proxy] = []  # tensors whose metadata is still to be checked
        self.shapes: list[tuple[int, ...]] = []
        self.groups: list[int] = []  # how many tensors are checked together
        self._of_state: dict[str, str] = {}  # by the name of what holds it
        self._checked: set[str] = set()
        self._fetched: set[Any] = set()
        self._roots: set[str] = set()
        self._functions: set[str] = set()
        self._jitted: set[str] = set()
        self._foreign: set[str] = set()  # modules that were not jitted
        self._attributes: dict[tuple[str, str], str] = {}  # of those, in which variable they are
        self.of_modules = self._module_attributes()
        self._seldom = frozenset(map(id, self.of_modules.bsyms)) if self.of_modules is not None else frozenset()

    def _module_attributes(self) -> ModuleAttributes | None:
        """What needs to run only if something in a module was set."""
        bsyms = self.trace.bound_symbols
        unchanged = unchanged_of(bsyms)
        functions = {b.output.name for b in bsyms if b.sym.id is PrimIDs.UNPACK_FUNCTION_OBJ}
        jitted = (b for b in bsyms if b.sym.id is PrimIDs.UNPACK_THUNDER_MODULE and b.args[0].name in functions)
        root = next((b.output.name for b in jitted), None)
        if unchanged is None or self.module is None or root is None:
            return None
        return ModuleAttributes(unchanged, bsyms, root, self.module._module_cache)

    def constant(self, value: Any) -> str:
        name = f"_constant{len(self.constants)}"
        self.constants[name] = value
        return name

    def refuse_if(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def write_all(self) -> None:
        for bsym in self.trace.bound_symbols:
            if bsym.sym.id is PrimIDs.RETURN:
                self.flush()
                self.write_seldom()
            if id(bsym) not in self._seldom:
                self.write(bsym)

    def write_seldom(self) -> None:
        """The lines of `of_modules`."""
        if self.of_modules is None or not self._seldom:
            return
        attributes, known = self.constant(self.of_modules), ", ".join(self.of_modules.modules)
        before, self.lines = self.lines, []
        for bsym in self.of_modules.bsyms:
            if bsym.sym.id is PrimIDs.UNPACK_SUBMODULE:
                self.lines.append(f"{bsym.output.name} = _held_modules[{bsym.args[1]!r}]")
            else:
                self.write(bsym)
        inside, self.lines = self.lines, before
        self.lines += [
            f"_held_modules = {self.of_modules.root}._module_cache",
            f"_state_of_modules = {attributes}.changed(_held_modules)",
            "if _state_of_modules is not None:",
            *(f"    {line}" for line in inside),
            f"    {attributes}.note(_state_of_modules, ({known},))",
        ]

    def write(self, bsym: BoundSymbol) -> None:
        writer = _WRITERS.get(bsym.sym.id if isinstance(bsym.sym.id, PrimIDs) else bsym.sym.name)
        if writer is None or not writer(self, bsym):
            if bsym.sym.id not in _READS:
                self.flush()
            self.as_it_is(bsym)

    def as_it_is(self, bsym: BoundSymbol) -> None:
        """The lines that Thunder writes."""
        self.lines.extend(line.removeprefix("  ") for line in bsym.python(indent=1, print_depth=1))

    def flush(self) -> None:
        """Check the tensors that wait for it."""
        if self.waiting:
            names = ", ".join(p.name for p in self.waiting)
            self.refuse_if(f"not _tensors{len(self.groups)}({names})")
            self.groups.append(len(self.waiting))
            self.waiting = []

    # -- of each kind of bound symbol; False if it is one that has to stay as it is -------------------------------------------

    def check_tensor(self, bsym: BoundSymbol) -> bool:
        t, shape = bsym.args[:2]
        if not all(type(n) is int for n in shape):
            return False
        self.waiting.append(t)
        self._checked.add(t.name)
        self.shapes.append(tuple(shape))
        return True

    def check_value(self, bsym: BoundSymbol) -> bool:
        p, expected = bsym.args
        if not isinstance(p, Proxy):
            return False
        if p.name in self._of_state:
            return self.check_state(self._of_state[p.name], expected)
        if expected is True or expected is False:
            self.refuse_if(f"{p.name} is not {expected}")
        elif type(expected) is int:
            self.refuse_if(f"{p.name} != {expected} or type({p.name}) is not int")
        elif type(expected) is float and expected == expected:  # of nan Thunder's own check knows
            self.refuse_if(f"{p.name} != {self.constant(expected)} or type({p.name}) is not float")
        elif type(expected) is str and bsym.sym.name == "check_string_value":
            self.refuse_if(f"{p.name} != {expected!r}")
        else:
            return False
        return True

    def check_literal(self, bsym: BoundSymbol) -> bool:
        p, expected = bsym.args
        return isinstance(p, Proxy) and p.name in self._of_state and self.check_state(self._of_state[p.name], expected)

    def check_state(self, key: str, expected: Any) -> bool:
        if key in _STATE:
            self.lines.insert(0, f"if {_STATE[key]} is not {self.constant(expected)}: return None")
        elif key not in _IGNORED and (key not in self.as_it_is_here or self.as_it_is_here[key] != expected):
            raise _Unknown(key)
        return True

    def check_type(self, bsym: BoundSymbol) -> bool:
        p, expected = bsym.args
        self.refuse_if(f"type({p.name}) is not {self.constant(expected)}")
        return True

    def check_none(self, bsym: BoundSymbol) -> bool:
        (p,) = bsym.args
        if not isinstance(p, Proxy):
            return False
        self.refuse_if(f"{p.name} is not None")
        return True

    def check_len(self, bsym: BoundSymbol) -> bool:
        p, length = bsym.args
        if not isinstance(p, Proxy) or type(length) is not int:
            return False
        self.refuse_if(f"len({p.name}) != {length}")
        return True

    def check_guarded(self, bsym: BoundSymbol) -> bool:
        """Whether these are tensors and no wrappers is what `check_like` says."""
        return all(p.name in self._checked for p in bsym.flat_proxy_args)

    def unpack_state(self, bsym: BoundSymbol) -> bool:
        self._roots.add(bsym.output.name)
        return True

    def unpack_item(self, bsym: BoundSymbol) -> bool:
        source, key = bsym.args[:2]
        if isinstance(source, Proxy) and source.name in self._roots:
            self._of_state[bsym.output.name] = key
            return True
        return False

    def unpack_function(self, bsym: BoundSymbol) -> bool:
        self._functions.add(bsym.output.name)
        return False

    def unpack_module(self, bsym: BoundSymbol) -> bool:
        """The module that was jitted; of one that the program has from elsewhere, what Thunder has for it."""
        (model,) = bsym.args
        if self.module is not None and model.name in self._functions:
            self._jitted.add(bsym.output.name)
            self.lines.append(f"{bsym.output.name} = {self.constant(weakref.ref(self.module))}()")
        else:
            if self.module is None:  # a function was jitted: Thunder has nothing else for any module
                self._foreign.add(bsym.output.name)
            self.lines.append(f"{bsym.output.name} = _thunder_module({model.name})")
        return True

    def unpack_of_module(self, bsym: BoundSymbol) -> bool:
        """All parameters of the module, or all buffers, or all modules in it, are fetched where the first of them is."""
        source, kind = bsym.args[0], bsym.sym.id
        if isinstance(source, Proxy) and source.name in self._foreign:
            self.lines.append(f"{bsym.output.name} = {self.attribute(source.name, bsym.args[1], kind)}")
            return True
        if not isinstance(source, Proxy) or source.name not in self._jitted:
            return False
        if (source.name, kind) not in self._fetched:
            self._fetched.add((source.name, kind))
            found = {
                b.output.name: b.args[1]
                for b in self.trace.bound_symbols
                if b.sym.id is kind and b.args[0].name == source.name and id(b) not in self._seldom
            }
            table = f"_table{len(self._fetched)}"
            self.lines.append(f"{table} = {source.name}.{_TABLES[kind]}")
            held = getattr(self.module, _TABLES[kind])  # not what another name stands for first: a weight that two modules share
            by_name = f"{source.name}.{_GETTERS[kind]}"
            self.lines.extend(
                f"{name} = {table}[{key!r}]" if key in held else f"{name} = {by_name}({key!r})" for name, key in found.items()
            )
        return True

    def attribute(self, root: str, name: str, kind: Any) -> str:
        """What ``root.get_parameter(name)`` or its like gives, in a variable; `check_like` says whether it is a Parameter."""
        above, _, key = name.rpartition(".")
        holder = self.attribute(root, above, PrimIDs.UNPACK_SUBMODULE) if above else root
        found = self._attributes.get((root, name))
        if found is None:
            found = self._attributes[root, name] = f"_attribute{len(self._attributes)}"
            self.lines.append(f"{found} = getattr({holder}, {key!r})")
            if kind is PrimIDs.UNPACK_SUBMODULE:
                self.refuse_if(f"not isinstance({found}, _Module)")
            elif kind is PrimIDs.UNPACK_BUFFER:
                self.refuse_if(f"{key!r} not in {holder}._buffers")
        return found

    def nothing(self, bsym: BoundSymbol) -> bool:
        return True

    def source(self) -> str:
        state = f"if {'_precision() != _precision_here' if self.precision.is_lowered else '_autocast()'} or _modes(): return None"
        return "def inputs(args, kwargs):\n" + "".join(f"    {line}\n" for line in [state, *self.lines])


_WRITERS: dict[Any, Callable[[_Writer, BoundSymbol], bool]] = {
    "check_tensor_metadata": _Writer.check_tensor,
    "check_number_type_and_value": _Writer.check_value,
    "check_string_value": _Writer.check_value,
    "check_literal_like": _Writer.check_literal,
    "check_type": _Writer.check_type,
    "check_none": _Writer.check_none,
    "check_len": _Writer.check_len,
    "check_plain_tensors": _Writer.check_guarded,
    PrimIDs.UNPACK_CACHE_INFO: _Writer.unpack_state,
    PrimIDs.UNPACK_GETITEM: _Writer.unpack_item,
    PrimIDs.UNPACK_FUNCTION_OBJ: _Writer.unpack_function,
    PrimIDs.UNPACK_THUNDER_MODULE: _Writer.unpack_module,
    PrimIDs.UNPACK_TRIVIAL: _Writer.nothing,
    **dict.fromkeys(_TABLES, _Writer.unpack_of_module),
}


class _TensorCheck:
    """What the tensors of a call are checked with: made of the tensors of the first."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        self.shapes = shapes
        self.check: Callable[..., bool] | None = None

    def __call__(self, *tensors: Any) -> bool:
        if self.check is None:
            if not all(isinstance(t, torch.Tensor) for t in tensors):
                return False
            self.check = check_like(tensors, self.shapes, [[None] * len(shape) for shape in self.shapes])
        return self.check(*tensors)


def shortened(
    trace: TraceCtx, module: ThunderModule | None, modules: Mapping[int, ThunderModule], args: tuple, kwargs: dict
) -> Inputs | None:
    """What a prologue gives to computation and epilogue, by a function that returns None where it cannot say that it accepts the arguments.

    Args:
        trace: the prologue as it runs.
        module: what ``thunder.jit`` gave for a module.
        modules: Thunder's table of such, by the id of the module.
        args: arguments of a call that the prologue has accepted; the tensors that it takes are what others are compared with.
        kwargs: the same, by name.

    Returns:
        None if the prologue asks for something that only Thunder's own call knows.
    """
    writer = _Writer(trace, module)
    try:
        with tracectx(trace):
            writer.write_all()
    except _Unknown:
        return None
    names = trace.python_ctx() | writer.constants
    names["__function_obj"] = trace.fn
    names["_thunder_module"] = functools.partial(_thunder_module, modules)
    names |= {
        "get_default_dtype": torch.get_default_dtype,
        "is_grad_enabled": torch.is_grad_enabled,
        "_Module": torch.nn.Module,
        "_autocast": torch._C._is_any_autocast_enabled,
        "_precision": precision_of_now,
        "_precision_here": writer.precision,
        "_modes": torch._C._len_torch_function_stack,
    }
    shapes, checks = iter(writer.shapes), {}
    for n, count in enumerate(writer.groups):
        names[f"_tensors{n}"] = checks[f"_tensors{n}"] = _TensorCheck(list(itertools.islice(shapes, count)))
    exec(code_of(writer.source(), "prologue"), names)  # noqa: S102 - written here, of names and literals
    inputs = names.pop("inputs")
    if _accepted(inputs, args, kwargs) is None:
        return None
    names.update((name, check.check) for name, check in checks.items())  # without a call of Python in between
    return inputs


def _thunder_module(modules: Mapping[int, ThunderModule], model: torch.nn.Module) -> Any:
    """As ``thunder.core.module.get_thunder_module``, which asks for the compile data that is current."""
    found = modules.get(id(model))
    return model if found is None or found._model is not model else found


def _accepted(inputs: Inputs, args: tuple, kwargs: dict) -> tuple | None:
    try:
        return inputs(args, kwargs)
    except Exception:  # noqa: BLE001 - what a prologue raises says no
        return None
