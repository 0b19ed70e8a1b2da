"""Which graph of inductor's cache on disk a region becomes: a process that knows need not make the graph again to ask for it.

Inductor's cache is asked by a graph of aten operations, which a region has to run on fake tensors for; the passes before the question take
as long.  Here the question is the region as it is written in the trace, with all that decides which graph comes of it.  A region with
anything in it that its text does not tell is not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

import thunder
from thunder.core import devices, dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol

# Executors whose operations do what their name and their arguments say.  An operation for a function of aten carries that function.
_TOLD = ("torch", "thunder_norm_gradients", "thunder_norm_kernels")
_LITERALS = (int, float, bool, str, type(None), type(...))
_NAMED = (dtypes.dtype, devices.Device, torch.dtype, torch.device, torch.memory_format, torch.layout)


class _Untold(Exception):
    """Something in a region cannot be told by text."""


def described(bsyms: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> str | None:
    """A region as text that is the same in each process, whatever its tensors are called; None if not all of it can be told."""
    numbers = {p.name: i for i, p in enumerate(inputs)}
    try:
        lines = [_line(bsym, numbers) for bsym in bsyms]
    except _Untold:
        return None
    return "\n".join([*lines, " ".join(f"%{numbers[p.name]}" for p in outputs)])


def _line(bsym: BoundSymbol, numbers: dict[str, int]) -> str:
    symbol = bsym.sym
    if symbol.executor is None or symbol.executor.name not in _TOLD:
        raise _Untold
    given = _told(bsym.args, numbers), _told(bsym.kwargs, numbers)
    for p in bsym.flat_proxy_outs:
        numbers.setdefault(p.name, len(numbers))
    called = [_name_of(f) for f in (bsym._call_ctx or {}).values()]
    return f"{_told(bsym.output, numbers)} = {symbol.executor.name} {symbol.module} {symbol.name} {called} {given}"


def _name_of(function: Any) -> str:
    """What a function is called, if it is one of a library whose version is known, with what it was made with."""
    if isinstance(function, functools.partial):
        return f"{_name_of(function.func)}{_made_with((*function.args, *sorted(function.keywords.items())))}"
    if isinstance(function, Symbol):
        return f"{function.module} {function.name}"
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module.partition(".")[0] not in ("torch", "thunder", "thunder_norm"):
        raise _Untold
    return f"{module}.{name}{_made_with(cell.cell_contents for cell in getattr(function, '__closure__', None) or ())}"


def _made_with(values: Iterable[Any]) -> str:
    return f"({', '.join(_name_of(v) if callable(v) else _told(v, {}) for v in values)})"


def _told(value: Any, numbers: dict[str, int]) -> str:
    if isinstance(value, TensorProxy) and value.name in numbers:
        return f"%{numbers[value.name]}"
    if type(value) in _LITERALS:
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, _NAMED):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, slice):
        return f"slice{_told((value.start, value.stop, value.step), numbers)}"
    if isinstance(value, list | tuple):
        return f"{'[' if isinstance(value, list) else '('}{', '.join(_told(v, numbers) for v in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_told(v, numbers)}" for k, v in value.items()) + "}"
    raise _Untold


def key_of(description: str, fakes: Sequence[torch.Tensor], how: str) -> str | None:
    """The name under which the graph of a region is kept, for inputs like these; None where inductor keeps nothing.

    Args:
        description: of the region.
        fakes: stand for its inputs.
        how: what else the graph is made for.
    """
    from torch._inductor import config
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCachePickler, FxGraphHashDetails

    if (
        not config.fx_graph_cache
        or config.force_disable_caches
        or config.triton.cudagraphs
        or getattr(config, "cudagraph_policy", None) is not None  # later versions of torch have it
    ):
        return None
    empty = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    asked: Any = {"region": description, "how": how, "state": _state(), "versions": _versions()}
    try:
        pickler: Any = FxGraphCachePickler(empty)
        key = getattr(pickler, "get_key", pickler.get_hash)  # before torch had two, a hash was a key
        return key(FxGraphHashDetails(empty, list(fakes), asked, []))
    except BypassFxGraphCache:
        return None


def _state() -> str:
    """What of the process decides which operations of aten an operation becomes, besides inductor's own settings."""
    cuda, mkldnn, cudnn = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    libraries = (mkldnn.enabled, mkldnn.is_available(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic)  # type: ignore[attr-defined]
    asked = GlobalStateGuard().__getstate__()
    return f"{asked} {attention} {libraries} {torch.get_default_device()} {torch.get_float32_matmul_precision()}"


@functools.cache
def _versions() -> str:
    """What the operations of a region are written in: Thunder and this library, as they lie on disk; torch is in inductor's own key."""
    found = hashlib.sha256(thunder.__version__.encode())
    for folder in (Path(__file__).parents[1], Path(thunder.__file__).parent / "executors"):
        for path in sorted(folder.rglob("*.py")):
            status = path.stat()
            found.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "thunder_norm" / f"{key}.json"


def read(key: str) -> Any:
    """What was kept under this name; None if nothing was, or what there is cannot be read."""
    try:
        return json.loads(_path(key).read_text())
    except (OSError, ValueError):
        return None


def write(key: str, content: Any) -> None:
    """Keep what JSON can say under this name; where nothing can be written nothing is kept."""
    from torch._inductor.codecache import write_atomic

    with contextlib.suppress(OSError):
        write_atomic(str(_path(key)), json.dumps(content), make_dirs=True)
