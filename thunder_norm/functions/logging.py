"""log: each operation of a function, with names and shapes, as it is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from thunder_norm.errors import TransformTypeError, with_details
from thunder_norm.functions.calls import constructor
from thunder_norm.functions.programs import Values, operations_of, outputs_of
from thunder_norm.functions.transformed import Call, Transformed
from thunder.core import dtypes
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten, tree_map
from thunder.core.symbol import BoundSymbol


class Log(Transformed):
    """A function that prints its operations when it is traced."""

    def __init__(self, function: Callable, name: str, file: TextIO | None):
        self.name = "log"
        super().__init__(function)
        if not isinstance(name, str):
            raise TransformTypeError(with_details("log: the name of a level must be a string", got=repr(name)))
        self.level = name
        self.file = file

    def emit(self, call: Call) -> Any:
        """Write the program as it is."""
        program = call.acquire()
        names = get_jit_ctx()._proxy_swapmap
        values = Values(renew=False)
        for p, v in zip(program.trace.args, [*call.tensors, *program.captured], strict=True):
            values[p] = v
        shown = {p.name: _name(v, names) for p, v in zip(program.trace.args, call.tensors, strict=False)}
        for bsym in operations_of(program.trace):
            if bsym.flat_proxy_outs:
                print(f"{self.level} {_line(bsym, names, shown)}", file=self.file or sys.stdout)
            values.copy(bsym)
        return program.result(values.read(outputs_of(program.trace)))


def _name(p: Proxy, names: dict) -> str:
    known = names.get(variableify(p))
    return p.name if known is None else known.name


def _line(bsym: BoundSymbol, names: dict, shown: dict[str, str]) -> str:
    def text(v: Any) -> Any:
        if isinstance(v, Proxy):
            return _Text(shown.get(v.name) or _name(v, names))
        return _Text(str(dtypes.to_torch_dtype(v))) if isinstance(v, dtypes.dtype) else v

    args = [repr(tree_map(text, a)) for a in bsym.args]
    args += [f"{k}={tree_map(text, v)!r}" for k, v in bsym.kwargs.items() if v is not None]
    outs = ", ".join(_described(p, names) for p in tree_flatten(bsym.output)[0] if isinstance(p, Proxy))
    return f"{outs} = {bsym.sym.name}({', '.join(args)})"


def _described(p: Proxy, names: dict) -> str:
    if isinstance(p, TensorProxy):
        return f"{_name(p, names)}: {tuple(p.shape)}"
    return f"{_name(p, names)}: a number" if isinstance(p, NumberProxy) else _name(p, names)


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


@constructor
def log(function: Callable, name: str = "log", *, file: TextIO | None = None) -> Callable:
    """The function itself, which prints each of its operations when it is traced, with names and shapes.

    What is printed is what this level of transforms sees: inside `vmap` the shapes of one sample, around `grad` the derivative's
    operations as well.  A call that finds its program in the cache prints nothing.

    Args:
        function: what to look at; it may be a transformed function.
        name: printed at the start of each line, to tell levels apart.
        file: where to, standard output by default.

    >>> import torch
    >>> from thunder_norm.transforms import grad
    >>> _ = log(grad(log(lambda x: torch.sin(x).sum(), "inside")), "outside")(torch.zeros(3))
    inside t1: (3,) = sin(x)
    inside t4: () = sum(t1, None, False)
    outside t7: (3,) = cos(x)
    """
    return Log(function, name, file)
