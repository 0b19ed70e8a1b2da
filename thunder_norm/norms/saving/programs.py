"""The traces of a program as JSON, and traces built from it again, operation by operation."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from thunder_norm.errors import SavedFileError
from thunder_norm.norms.higher_order import opened
from thunder_norm.norms.saving import operations, values
from thunder_norm.norms.scalar_fusion import fused, scalar_executor
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import CollectionProxy, Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx

# Names and strings stand in the Python that a trace is compiled to.
_NAME = re.compile(r"[A-Za-z_]\w{0,200}", re.ASCII)
_STRING = re.compile(r"[\w .:,/+-]{0,200}", re.ASCII)
_FUNCTIONS = ("computation", "backward_fn")


def encode(trace: TraceCtx, *, runs: bool) -> dict:
    """A trace as JSON.

    Args:
        trace: a computation or a backward.
        runs: whether it is what runs, of which parts of operations are left out, or what is compiled.

    Raises:
        SavedFileError: an operation or a value that has no name.
    """
    bsyms = trace.bound_symbols if runs else list(_known(opened(trace.bound_symbols)))
    statements = [_statement(b, runs) for b in bsyms]
    proxies = {p.name: p for b in _with_parts(bsyms) for p in (*b.flat_proxy_args, *b.flat_proxy_outs)}
    return {
        "name": trace.siginfo().name,
        "arguments": [name for name, _ in trace.siginfo().args],
        "inputs": [p.name for p in trace.args if isinstance(p, Proxy)],  # a backward has lists
        "proxies": {name: _proxy(p) for name, p in proxies.items()},
        "statements": statements,
    }


def decode(data: dict, *, runs: bool) -> TraceCtx:
    """The trace that `encode` made this JSON of.

    Raises:
        SavedFileError: an operation, a name or a value that no such trace has.
    """
    trace = TraceCtx()
    if data["name"] not in _FUNCTIONS:
        raise SavedFileError(f"the file has a program called {data['name']!r}")
    with tracectx(trace):
        proxies = {name: _made(_checked(name), p) for name, p in data["proxies"].items()}
        trace.bound_symbols = [_bound(s, proxies, trace, runs) for s in data["statements"]]
    signature = SigInfo(data["name"])
    signature.args = [(_checked(name), None) for name in data["arguments"]]
    trace._siginfo = signature
    trace.args = tuple(proxies[name] for name in data["inputs"])
    return trace


def _known(bsyms: Iterable[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Operations; one that is not known by name is what it consists of (Thunder's, with a gradient of ours)."""
    for b in bsyms:
        if b.subsymbols and not operations.is_known(b.sym):
            yield from _known(b.subsymbols)
        else:
            yield b


def _with_parts(bsyms: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    for b in bsyms:
        yield b
        yield from _with_parts(b.subsymbols)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name.startswith("__") or keyword.iskeyword(name):
        raise SavedFileError(f"the file has a tensor called {name!r}")
    return name


# -- proxies ------------------------------------------------------------------------------------------------------------


def _proxy(p: Proxy) -> Any:
    if isinstance(p, CollectionProxy):
        return "collection"
    if type(p) is not TensorProxy:
        raise SavedFileError(f"the program has a number, {p.name}, that is known only when it runs")
    return {
        "shape": list(p.shape),
        "dtype": str(dtypes.to_torch_dtype(p.dtype)).removeprefix("torch."),
        "weak": p.true_dtype.is_weak,
        "device": p.device.device_str(),
        "requires_grad": p.requires_grad,
        "detached": ProxyTag.DETACHED_AUTOGRAD_GRAPH in p.tags,
    }


def _made(name: str, data: Any) -> Proxy:
    if data == "collection":
        return CollectionProxy([], name=name)
    p = TensorProxy(
        name,
        shape=tuple(data["shape"]),
        device=devices.Device(data["device"]),
        dtype=_thunders_dtype([data["dtype"], data["weak"]]),
        requires_grad=data["requires_grad"],
    )
    if data["detached"]:
        p.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
    return p


def _thunders_dtype(data: list) -> dtypes.dtype:
    name, is_weak = data
    found = dtypes.to_dtype(values.dtype_named(name))
    return dtypes.to_weak_dtype(found) if is_weak else found


# -- operations ---------------------------------------------------------------------------------------------------------


def _special(value: Any) -> Any:
    if isinstance(value, Proxy):
        return {"proxy": value.name}
    if isinstance(value, dtypes.dtype):
        return {"thunder_dtype": [str(dtypes.to_torch_dtype(value)).removeprefix("torch."), value.is_weak]}
    if isinstance(value, devices.Device):
        return {"thunder_device": value.device_str()}
    if type(value) is str and not _STRING.fullmatch(value):
        raise SavedFileError(f"a program with the string {value!r} cannot be saved")
    return None


def _statement(b: BoundSymbol, runs: bool) -> dict:
    if b.sym.executor is scalar_executor:
        return {"fused": [_statement(part, runs) for part in b.subsymbols], "out": [p.name for p in b.output]}
    found = {
        "operation": operations.name_of(b.sym),
        "args": [values.encode(a, _special) for a in b.args],
        "kwargs": {k: values.encode(v, _special) for k, v in b.kwargs.items()},
        "out": values.encode(b.output, _special),
    }
    if not runs and b.subsymbols:
        found["parts"] = [_statement(part, runs) for part in _known(b.subsymbols)]
    return found


def _bound(data: dict, proxies: dict[str, Proxy], trace: TraceCtx, runs: bool) -> BoundSymbol:
    def special(value: dict) -> Any:
        if "proxy" in value:
            return proxies[value["proxy"]]
        if "thunder_dtype" in value:
            return _thunders_dtype(value["thunder_dtype"])
        return devices.Device(value["thunder_device"]) if "thunder_device" in value else None

    def read(value: Any) -> Any:
        found = values.decode(value, special)
        for text in _strings(found):
            if not _STRING.fullmatch(text):
                raise SavedFileError(f"the file has a program with the string {text!r}")
        return found

    if "fused" in data:
        group = [_bound(part, proxies, trace, runs) for part in data["fused"]]
        outputs = [proxies[name] for name in data["out"]]
        if not all(isinstance(p, TensorProxy) for p in outputs):
            raise SavedFileError("the file has norm arithmetic that makes no norms")
        return fused(trace, group, outputs)  # type: ignore[arg-type]
    symbol = operations.symbol_named(data["operation"])
    if runs and not operations.is_executable(symbol):
        raise SavedFileError(f"the file has an operation that cannot run: {' '.join(map(str, data['operation']))}")
    kwargs = {_checked(k): read(v) for k, v in data["kwargs"].items()}
    parts = tuple(_bound(part, proxies, trace, runs) for part in data.get("parts", ()))
    b = BoundSymbol(symbol, args=tuple(map(read, data["args"])), kwargs=kwargs, output=read(data["out"]), subsymbols=parts)
    if symbol._bind_postprocess:
        symbol._bind_postprocess(b)
    return b


def _strings(tree: Any) -> Iterator[str]:
    if type(tree) is str:
        yield tree
    elif isinstance(tree, dict):
        for k, v in tree.items():
            yield from _strings(k)
            yield from _strings(v)
    elif isinstance(tree, list | tuple) and not isinstance(tree, Proxy):
        for v in tree:
            yield from _strings(v)


def returned(trace: TraceCtx) -> tuple[TensorProxy, ...]:
    """What a computation returns as its results."""
    last = trace.bound_symbols[-1]
    if last.sym.id is not prims.PrimIDs.RETURN:
        raise SavedFileError("the file has a program that returns nothing")
    return tuple(last.args[0]["output"])
