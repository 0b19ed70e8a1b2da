"""What has to hold for profiles of a random module and for memory budgets, against torch's counters and against storages of a run that are alive."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from tests import measured
from thunder_norm.transforms import CheckpointTransform, SubclassTransform, profile
import thunder

from .map_models import Case, module_on_meta, on_meta
from .plain_modules import Wrong

aten = torch.ops.aten


def _product(*operands: int) -> Callable[..., int]:
    def flops(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        a, b = (args[i] for i in operands)
        batch = 1 if len(a) < 3 else a[0]
        return 2 * batch * (a[-2] if len(a) > 1 else 1) * a[-1] * (b[-1] if len(b) > 1 else 1)

    return flops


def _three(a: Any, b: Any, c: Any, *args: Any, **kwargs: Any) -> int:
    """Of a bilinear layer, and of the gradients of one: two for each product of three entries."""
    expands = args[:3]
    sizes = []
    for shape, new in zip((a, b, c), expands, strict=True):
        shape = list(shape)
        for d in sorted(new):
            shape.insert(d, 1)
        sizes.append(shape)
    return 2 * math.prod(max(d) for d in zip(*sizes, strict=True))


# what torch's counter leaves out, and docs/profile.md says so
FORMULAS = {
    **measured.FORMULAS,
    aten.mv: _product(0, 1),
    aten.dot: _product(0, 1),
    aten.vdot: _product(0, 1),
    aten.addmv: _product(1, 2),
    aten.addbmm: _product(1, 2),
    aten._trilinear: _three,
}
# Kernels that take memory of their own, or that torch takes apart as soon as anybody watches.
WORKSPACES = ("LSTM", "SiLU", "Mish", "silu", "mish", "Conv", "conv")


class Alive(TorchDispatchMode):
    """How much is alive at most while a program runs, beyond what there was before.

    A storage counts from the operation that returns it until nothing holds it any more, as weak references tell.
    """

    def __init__(self, resident: Any):
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.resident = {t.untyped_storage()._cdata for t in measured.tensors(resident)}
        self.peak = self.constants = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in measured.tensors((args, kwargs)):
            if t.layout is torch.strided and t.untyped_storage()._cdata not in self.resident | self.known.keys():
                self.resident.add(t.untyped_storage()._cdata)
                self.constants += t.untyped_storage().nbytes()
        self.known = {key: v for key, v in self.known.items() if not v[0].expired()}
        for t in measured.tensors(result):
            if t.layout is torch.strided and t.untyped_storage()._cdata not in self.resident:
                storage = t.untyped_storage()
                size = t.nbytes if t.is_contiguous() else storage.nbytes()  # some kernels' results lie in more than they have
                self.known.setdefault(storage._cdata, (StorageWeakRef(storage), size))
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result


def eager_profile(case: Case) -> None:
    """FLOPs, saved bytes and the peak are those of a run; on the meta device as well."""
    model, (args, kwargs) = case.build(), case.arguments()
    has_backward = _has_backward(case)
    with case.untouched("profile", model, args, kwargs):
        found = profile(model, *args, backward=has_backward, target="eager", **kwargs)
        again = profile(model, *args, backward=has_backward, target="eager", **kwargs)
    _two(found, again)
    _resident(case, model, (args, kwargs), found)
    _against_run(case, "eager", lambda: case.build(), found, has_backward)
    if has_backward and not _has(case, "Checkpointed", "Trivialized"):
        fresh = case.build()
        saved = measured.saved_bytes(lambda: case.call(fresh, *case.arguments()), [*fresh.parameters(), *fresh.buffers()])
        if found.saved_bytes != saved and not _has(case, *WORKSPACES):
            raise Wrong(f"eager: {found.saved_bytes} bytes saved, by torch's hooks {saved}")
    if all(p.is_contiguous() for p in model.parameters()):
        meta = profile(module_on_meta(case.build()), *on_meta(args), backward=has_backward and _moves_parameters(model), target="eager", device="cpu", **on_meta(kwargs))  # fmt: skip
        if meta.forward_flops != found.forward_flops:
            raise Wrong(f"eager: {meta.forward_flops} FLOPs on meta, {found.forward_flops} of data")


def trace_profile(case: Case) -> None:
    """FLOPs and the peak of the program that Thunder runs are those of its run."""
    model, (args, kwargs) = case.build(), case.arguments()
    has_backward = _has_backward(case)
    with case.untouched("profile", model, args, kwargs):
        found = profile(model, *args, backward=has_backward, **kwargs)
    _resident(case, model, (args, kwargs), found)
    jm = thunder.jit(case.build(), transforms=[SubclassTransform()])
    own = profile(jm, *args, backward=has_backward, **kwargs)
    if (own.forward_flops, own.backward_flops) != (found.forward_flops, found.backward_flops):
        raise Wrong(f"trace: {found.flops} FLOPs of a module, {own.flops} of a jitted one")
    with contextlib.suppress(_AnotherProgram):
        _against_run(case, "trace", lambda: jm, own, has_backward)


def budget(case: Case) -> None:
    """A budget is kept, and the program is the same."""
    if not _has_backward(case):
        return
    args, kwargs = case.arguments()
    plain = profile(thunder.jit(case.build(), transforms=[SubclassTransform()]), *args, backward=True, **kwargs)
    share = Random(case.program.base.seed).choice([1.0, 0.95, 0.85, 0.7, 0.5])
    most = int(plain.resident_bytes + share * (plain.peak_bytes - plain.resident_bytes))
    transform = CheckpointTransform(memory_budget=most)
    model = case.build()
    jm = thunder.jit(model, transforms=[transform])
    same_program(case, jm, f"within {most} bytes")
    report = transform.report
    if not report.peak_bytes <= most:
        raise Wrong(f"a budget of {most} bytes, a peak of {report.peak_bytes} is said")
    if report.plain_peak_bytes != plain.peak_bytes:
        raise Wrong(f"without regions {report.plain_peak_bytes} bytes by the budget, {plain.peak_bytes} by a profile")
    args, kwargs = case.arguments()
    kept = profile(jm, *args, backward=True, **kwargs)
    if kept.peak_bytes != report.peak_bytes or kept.saved_bytes != report.saved_bytes:
        raise Wrong(
            f"a profile says {kept.peak_bytes} bytes, {kept.saved_bytes} saved; the budget {report.peak_bytes}, {report.saved_bytes}"
        )
    if kept.flops - plain.flops != report.extra_flops:
        raise Wrong(f"{report.extra_flops} more FLOPs are said, {kept.flops - plain.flops} are there")
    with contextlib.suppress(_AnotherProgram):
        _against_run(case, "budget", lambda: jm, kept, True)


def same_program(case: Case, jm: Any, what: str) -> None:
    """Results, gradients and what the module holds are those of eager mode."""
    leaves, structure, gradients = case.run(jm, *case.arguments())
    if structure != case.structure:
        raise Wrong(f"{what}: the result is {structure}, not {case.structure}")
    if (place := case.difference(leaves, gradients)) is not None:
        raise Wrong(f"{what}: {place}")
    model = case.build()
    case.run(model, *case.arguments())
    expected, found = dict(model.named_buffers()), dict(jm._model.named_buffers())
    for name, b in expected.items():
        if not case.agree(found[name], b):
            raise Wrong(f"{what}: buffer {name} is {found[name]}, not {b}")


# -- a run -------------------------------------------------------------------------------------------------------------------


def _against_run(case: Case, what: str, make: Callable[[], Any], found: Any, has_backward: bool) -> None:
    """FLOPs by torch's counter, the peak by the storages that are alive."""
    formulas: Any = FORMULAS
    counted = []

    def forward(model: Any, args: tuple, kwargs: dict) -> Any:
        with torch.set_grad_enabled(has_backward), FlopCounterMode(display=False, custom_mapping=formulas) as flops:
            result = case.call(model, args, kwargs)
        counted.append(flops.get_total_flops())
        return result

    def backward(result: Any) -> None:
        with FlopCounterMode(display=False, custom_mapping=formulas) as flops:
            _backward(result, has_backward, what)
        counted.append(flops.get_total_flops())

    _ran(case, make, lambda *call: backward(forward(*call)))
    if [found.forward_flops, found.backward_flops] != counted and not _has(case, "nn.LSTM", "recurrent"):
        raise Wrong(f"{what}: {found.forward_flops} + {found.backward_flops} FLOPs, by torch's counter {counted}")
    peaks = []

    def alive(model: Any, args: tuple, kwargs: dict) -> None:
        with Alive([*_module(model).parameters(), *_module(model).buffers(), *measured.tensors((args, kwargs))]) as mode:
            _whole(case, has_backward, what, model, args, kwargs)
        peaks.extend((mode.peak, mode.constants))

    _ran(case, make, alive)
    own = found.peak_bytes - found.resident_bytes
    if own < peaks[0] - 64 and not _has(case, *WORKSPACES):
        raise Wrong(f"{what}: {own} bytes at most beside what there was, {peaks[0]} were alive in a run")
    if own > peaks[0] + peaks[1] + 64:  # what a kernel makes inside, the allocator sees
        _ran(case, make, lambda *call: peaks.append(measured.peak_bytes(lambda: _whole(case, has_backward, what, *call))))
        if own > peaks[1] + peaks[2] + 64:
            raise Wrong(
                f"{what}: {own} bytes at most beside what there was, {peaks[0]} were alive in a run, {peaks[2]} allocated"
            )


class _AnotherProgram(Exception):
    """What is called is not what was profiled: the module has changed in a call before."""


def _ran(case: Case, make: Callable[[], Any], run: Callable[[Any, tuple, dict], None]) -> None:
    model, (args, kwargs) = make(), case.arguments()
    before = _misses(model)
    run(model, args, kwargs)
    for t in [*_module(model).parameters(), *measured.tensors((args, kwargs))]:
        t.grad = None
    if _misses(model) != before:
        raise _AnotherProgram


def _misses(model: Any) -> int:
    return 0 if _module(model) is model else thunder.cache_misses(model)


def _whole(case: Case, has_backward: bool, what: str, model: Any, args: tuple, kwargs: dict) -> None:
    with torch.set_grad_enabled(has_backward):
        result = case.call(model, args, kwargs)
    _backward(result, has_backward, what)


def _backward(result: Any, has_backward: bool, what: str) -> None:
    """The profile of a trace counts a result that is returned twice as one, and none that is an input."""
    if has_backward:
        found = measured.tensors(tree_flatten(result)[0])
        measured.backward(found if what == "eager" else list({id(t): t for t in found if not t.is_leaf}.values()))


def _resident(case: Case, model: Any, inputs: Any, found: Any) -> None:
    own = {}
    for kind, tensors in (("parameter", model.parameters()), ("buffer", model.buffers()), ("input", measured.tensors(inputs))):
        for t in tensors:
            own.setdefault(t.untyped_storage()._cdata, (kind, t.untyped_storage().nbytes()))
    for kind in ("parameter", "buffer", "input"):
        said, there = getattr(found, f"{kind}_bytes"), sum(n for k, n in own.values() if k == kind)
        if said != there and not (found.target == "trace" and said <= there):  # a trace has what the program uses
            raise Wrong(f"{found.target}: {said} bytes of kind {kind}, there are {there}")


def _two(first: Any, second: Any) -> None:
    if (first.rows, first.backward_rows) != (second.rows, second.backward_rows):
        raise Wrong("two profiles differ")
    if not str(first) or not first.summary() or len(first.to_dataframe()) != len(first):
        raise Wrong("a profile prints nothing")
    totals = first.by_module()[""]
    if (totals.forward_flops, totals.backward_flops) != (first.forward_flops, first.backward_flops) and all(
        r.derivative_of is not None or not r.flops for r in first.backward_rows
    ):
        raise Wrong(f"modules add up to {totals}, not {first.forward_flops} + {first.backward_flops}")
    if any(
        r.live_bytes > r.peak_bytes or min(r.flops, r.bytes_read, r.bytes_written, r.output_bytes, r.live_bytes) < 0
        for r in first
    ):
        raise Wrong("a row has more alive than at most, or less than nothing")


def _has_backward(case: Case) -> bool:
    return any(g is not None for g in case.gradients.values()) or any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in tree_flatten(case.call(case.build(), *case.arguments()))[0]
    )


def _moves_parameters(model: Any) -> bool:
    return any(p.requires_grad for p in model.parameters())


def _module(model: Any) -> Any:
    return getattr(model, "_model", model)


def _has(case: Case, *words: str) -> bool:
    return any(word in case.program.base.expression for word in words)


CHECKS: dict[str, Callable[[Case], None]] = {"eager profile": eager_profile, "trace profile": trace_profile, "budget": budget}
