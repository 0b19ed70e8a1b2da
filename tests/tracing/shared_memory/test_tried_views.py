"""Which results lie in the memory of an argument: against torch's own storages, whatever was asked before."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.seeds import seeded
from thunder_norm.audit.op_db import outside_of_unittest
from thunder_norm.functions.torch_calls import views_in_cpp
from thunder_norm.functions.tried_views import _BUILT_IN, computes_entries, views
from thunder_norm.trees import flat_tensors
import thunder
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

x = torch.arange(24.0).reshape(2, 3, 4)

CALLS = [
    (torch.reshape, (x, (6, 4))),
    (torch.reshape, (x, (2, 3, 4))),
    (torch.Tensor.to, (x, torch.float32)),
    (torch.Tensor.to, (x, torch.float64)),
    (torch.Tensor.to, (x.double(), torch.float32)),
    (torch.Tensor.to, (x.double(), torch.float64)),
    (torch.Tensor.contiguous, (x,)),
    (torch.nn.functional.dropout, (x, 0.5, False)),
    (torch.nn.functional.dropout, (x, 0.5, True)),
    (torch.dropout, (x, 0.5, False)),
    (torch.dropout, (x, 0.5, True)),
    (torch.squeeze, (x, 0)),
    (torch.unbind, (x, 1)),
    (torch.unsafe_split, (x, 2)),
    (torch.meshgrid, ([x[0, 0], x[0, 1]],)),
    (torch.add, (x, x)),
    (torch.Tensor.add_, (x, 1)),
    (torch.where, (x > 1, x, 0.0)),
    (torch.cat, ([x],)),
    (torch.atleast_1d, (x,)),
    (torch.positive, (x,)),
]


def _shared(function, args) -> tuple[tuple[int, int], ...]:
    """Of real tensors that are contiguous and lie apart: results that are no argument that was changed, and whose memory they lie in."""
    given, spec = torch.utils._pytree.tree_flatten(args)
    given = [v.clone(memory_format=torch.contiguous_format) if isinstance(v, torch.Tensor) else v for v in given]
    tensors = [v for v in given if isinstance(v, torch.Tensor)]
    before = [t._version for t in tensors]
    results = flat_tensors(function(*torch.utils._pytree.tree_unflatten(given, spec)))
    changed = [t for t, version in zip(tensors, before, strict=True) if t._version != version]
    results = [r for r in results if all(r is not t for t in changed)]
    return tuple(
        (i, k)
        for i, r in enumerate(results)
        for k, t in enumerate(tensors)
        if all(t is not c for c in changed) and r.untyped_storage()._cdata == t.untyped_storage()._cdata
    )


def _asked(function, args, ask=views) -> tuple[tuple[int, int], ...]:
    with tracectx(TraceCtx(None)):
        proxies = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t: TensorProxy(
                shape=tuple(t.shape),
                device=thunder.core.devices.to_device(t.device),
                dtype=thunder.core.dtypes.to_dtype(t.dtype),
                requires_grad=False,
            ),
            args,
        )
        return ask(function, proxies, {})


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_calls_share_the_memory_that_they_share_in_torch(order: str) -> None:
    torch.manual_seed(seeded(0))
    calls = CALLS if order == "forwards" else CALLS[::-1]
    for function, args in [*calls, *calls]:
        assert _asked(function, args) == _shared(function, args), (function, args)


def test_a_function_that_is_not_torchs_is_asked_each_time() -> None:
    shares = True

    def function(t: torch.Tensor) -> torch.Tensor:
        return t[0] if shares else t[0].clone()

    assert _asked(function, (x,)) == ((0, 0),)
    shares = False
    assert _asked(function, (x,)) == ()


def test_what_torch_refuses_it_refuses_again() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            _asked(torch.reshape, (x, (5, 5)))


def test_tensors_without_a_device_say_of_torchs_operators_what_their_memory_says() -> None:
    torch.manual_seed(seeded(0))
    tried = set()
    with outside_of_unittest():
        for info in op_db:
            if not info.supports_dtype(torch.float32, "cpu") or info.name.startswith("empty"):
                continue
            for sample in list(info.sample_inputs("cpu", torch.float32))[:4]:
                args = (sample.input, *sample.args)
                for function in (info.op, info.method_variant):
                    if isinstance(function, _BUILT_IN) and not sample.kwargs:
                        found = _asked(function, args, views_in_cpp)
                        assert found is None or found == _shared(function, args), info.name
                        tried |= set() if found is None else {info.name}
    assert len(tried) > 150 and {"reshape", "bmm", "permute", "where", "diagonal", "squeeze"} <= tried


def _entry_by_entry():
    """Torch's operators that are taken for computed entry by entry, with which dtypes they can be tried."""
    found = {}
    for info in op_db:
        for function in (info.op, info.method_variant):
            if function is not None and computes_entries(function):
                found[f"{info.name} {type(function).__name__}"] = (info, function)
    return found


def test_what_computes_entries_never_gives_an_argument_back() -> None:
    torch.manual_seed(seeded(0))
    tried = set()
    with outside_of_unittest():
        for name, (info, function) in _entry_by_entry().items():
            for dtype in {torch.float32, torch.int64, torch.bool} & info.supported_dtypes("cpu"):
                for sample in list(info.sample_inputs("cpu", dtype))[:4]:
                    args = (sample.input, *sample.args)
                    if not sample.kwargs:
                        assert _shared(function, args) == (), (name, dtype)
                        tried.add(name.partition(" ")[0])
    assert {"add", "mul", "abs", "floor", "clamp"} <= tried


def test_what_may_hand_on_an_argument_is_not_taken_for_computed() -> None:
    handing_on = [torch.dropout, torch.positive, torch.Tensor.to, torch.Tensor.contiguous, torch.unsafe_split, torch.conj]
    assert not any(map(computes_entries, handing_on))
    assert computes_entries(torch.add) and computes_entries(torch.Tensor.mul) and computes_entries(torch.rsqrt)
