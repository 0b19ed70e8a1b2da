"""What a program costs before it runs: the function `profile`, and the transform that fills itself while a program is jitted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from thunder_norm import progress
from thunder_norm.errors import ProfileError
from thunder_norm.functions.jitted import Watching
from thunder_norm.norms.undisturbed import undisturbed
from thunder_norm.profiling import eager, trace
from thunder_norm.profiling.flops import COUNTS, Count
from thunder_norm.profiling.memory import Kind
from thunder_norm.profiling.places import Watch
from thunder_norm.profiling.recorder import Recorder
from thunder_norm.profiling.report import Profile
from thunder_norm.profiling.roofline import torch_device
from thunder_norm.profiling.stand_ins import StandIns
from thunder_norm.profiling.totals import TARGETS, Target
from thunder_norm.tracing import compilation
from thunder_norm.tracing.calls.raising import Raised
from thunder_norm.tracing.translation import empty_for
import thunder
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx


def profile(
    fn: Callable,
    *args: Any,
    backward: bool = False,
    executors: Sequence[Any] | None = None,
    target: Target = "trace",
    device: str | torch.device | None = None,
    count: Count = "matmul",
    **kwargs: Any,
) -> Profile:
    """FLOPs, bytes and memory of every operation of a program, without running it.

    >>> import torch
    >>> from thunder_norm.transforms import profile
    >>> p = profile(torch.nn.Linear(8, 4), torch.ones(2, 8), backward=True)
    >>> p.forward_flops, p.backward_flops
    (128, 128)

    A backward is that of the sum of all entries of the results.  Nothing is computed, and nothing of the size of a tensor is allocated:
    parameters and inputs may live on the meta device.

    Args:
        fn: a function or module; or one that `thunder.jit` made, whose own trace is profiled then, acquired now if it was not before.
        *args: its arguments.
        backward: profile the backward too; otherwise the program as it is under `torch.no_grad`.
        executors: those of `thunder.jit`, for target "trace".
        target: which program: "trace", the one that Thunder runs, a row for each of its bound symbols; or "eager", the one that PyTorch
            runs without Thunder, a row for each call of a torch function.  They save different tensors for the backward.
        device: where the program would run, for what is not there; what is on the meta device stands for the GPU if there is one,
            else for the CPU.
        count: "matmul": contractions count, as in torch.utils.flop_counter; "all": an estimate for everything else too.
        **kwargs: the program's keyword arguments.

    Raises:
        ProfileError: the program cannot be profiled as asked for: nothing requires grad, a sparse tensor, an unknown option.
        UnsupportedOpError: the program needs values of tensors, at the line that is named.
        DataDependentError: the same, while its trace is acquired.
    """
    _check(fn, target, count, executors, backward)
    with undisturbed(_plain(fn), args, kwargs):
        return _profile(fn, args, kwargs, backward, executors, target, device, count)


def _profile(
    fn: Callable, args: tuple, kwargs: dict, backward: bool, executors: Any, target: str, device: Any, count: Count
) -> Profile:
    stand_ins = StandIns(None if device is None else torch_device(device))
    recorder = Recorder(count)
    if target == "eager":
        with progress.counting("profiling", None) as tick:
            resident = eager.record(
                _plain(fn), args, kwargs, backward=backward, stand_ins=stand_ins, recorder=recorder, tick=tick
            )
        return Profile.of(recorder, target, resident)
    jitted = fn
    if not is_jitted(fn):
        module = fn if isinstance(fn, torch.nn.Module) else None
        if stand_ins.is_needed(module, (args, kwargs)):
            fn = fn if module is None else stand_ins.of_module(module)
            args, kwargs = stand_ins.of_tree(args), stand_ins.of_tree(kwargs)
        watching = ProfileTransform(count=count)
        jitted = thunder.jit(fn, transforms=[watching], executors=executors)
        total = _operations(fn, args, kwargs, stand_ins) if progress.is_shown() else None
        with progress.counting("acquiring the trace", total) as watching.tick:
            entry, inputs = _compiled_for(jitted, args, kwargs, backward)
    else:
        entry, inputs = _compiled_for(jitted, args, kwargs, backward)
    backward_trace = entry.backward_traces[-1] if entry.backward_fn is not None else None
    if backward and backward_trace is None:
        raise ProfileError("backward=True, but nothing that the program uses requires grad")
    kinds = _kinds(jitted)
    given = [(t, kinds.get(id(t), "parameter" if isinstance(t, torch.nn.Parameter) else "input")) for t in inputs]
    return _of_traces(entry.computation_traces[-1], backward_trace, given, stand_ins, recorder)


def _compiled_for(jitted: Any, args: tuple, kwargs: dict, backward: bool) -> tuple[Any, Sequence[Any]]:
    """What `thunder.jit` would run for these arguments, and the inputs of that.

    Raises:
        Exception: what the acquisition ends in.
    """
    data: Any = thunder.compile_data(jitted)
    with torch.set_grad_enabled(backward):
        try:
            entry, inputs, _ = data.get_computation_and_inputs(*args, **kwargs)
        except Raised as e:  # a call would run by Python from here on
            raise e.error from None
    return entry, inputs


def _operations(fn: Callable, args: tuple, kwargs: dict, stand_ins: StandIns) -> int | None:
    """How many operations a program has, for a progress bar; None if it does not run eagerly without data."""
    recorder = Recorder("matmul")
    try:
        eager.record(fn, args, kwargs, backward=False, stand_ins=stand_ins, recorder=recorder, tick=lambda: None)
    except Exception:  # noqa: BLE001 - whatever it is, the acquisition meets it too
        return None
    return len(recorder.steps)


def is_jitted(fn: Any) -> bool:
    """Whether `thunder.jit` made it."""
    return thunder.compile_data(fn) is not None


def _check(fn: Any, target: str, count: str, executors: Any, backward: Any) -> None:
    if not callable(fn):
        raise ProfileError(f"profile needs a function or module, got {type(fn).__name__}")
    if target not in TARGETS:
        raise ProfileError(f"target must be one of {TARGETS}, got {target!r}")
    if count not in COUNTS:
        raise ProfileError(f"count must be one of {COUNTS}, got {count!r}")
    if not isinstance(backward, bool):
        raise ProfileError(f"backward says whether to profile the backward too, True or False, got {backward!r}")
    if executors is not None and not isinstance(executors, Sequence):
        raise ProfileError(f"executors are a list of executors of Thunder's, or of their names, got {executors!r}")
    if executors is not None and (target == "eager" or is_jitted(fn)):
        raise ProfileError(
            "executors are for a program that is jitted for its profile: not for target='eager', nor for a jitted one"
        )


def _plain(fn: Callable) -> Callable:
    """The program that was jitted."""
    data = thunder.compile_data(fn)
    return fn if data is None else data.fn


def _kinds(jitted: Any) -> dict[int, Kind]:
    """Whose the tensors of a jitted module are."""
    if not isinstance(jitted, torch.nn.Module):
        return {}
    kinds: dict[int, Kind] = {id(t): "buffer" for t in (*jitted._model.buffers(), *jitted._overrides_buffers.values())}
    return kinds | {id(t): "parameter" for t in (*jitted._model.parameters(), *jitted._overrides_parameters.values())}


def _of_traces(
    forward: TraceCtx, backward: TraceCtx | None, inputs: Sequence[tuple[Any, Kind]], stand_ins: StandIns, recorder: Recorder
) -> Profile:
    total = len(forward.bound_symbols) + (len(backward.bound_symbols) if backward is not None else 0)
    with progress.counting("profiling", total) as tick:
        resident = trace.record(forward, backward, inputs, stand_ins=stand_ins, recorder=recorder, tick=tick)
    return Profile.of(recorder, "trace", resident)


class ProfileTransform(Watching):
    """Profiles what a program is compiled to; read with ``transform.report``.

    ``thunder.jit(model, transforms=[transform])``: each compilation (another shape, with or without gradients) gives a profile.  The
    program stays as it is.  Put it behind transforms that change the program.

    Args:
        count: as in `profile`.

    Raises:
        ProfileError: an unknown `count`.
        DataDependentError: (when the jitted function is called) the program needs the value of a tensor.
    """

    def __init__(self, *, count: Count = "matmul"):
        if count not in COUNTS:
            raise ProfileError(f"count must be one of {COUNTS}, got {count!r}")
        super().__init__()
        self.count: Count = count
        self.tick: Callable[[], None] = _ignore
        self._compiled: list[_Compiled] = []
        self._module: Callable[[], ThunderModule | None] = _nothing

    def transform_module(self, model: ThunderModule) -> None:
        """Remember whose parameters and buffers will be among the inputs."""
        super().transform_module(model)
        self._module = weakref.ref(model)

    def begin(self, trace: TraceCtx) -> None:
        """Note where in the user's program operations come from, while the trace is acquired."""
        Watch(self.tick).attach(trace)

    def transform_traces_pre_prologue(self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, **kwargs: Any):
        """Keep the lists that the compilation at hand writes its traces into."""
        traces = super().transform_traces_pre_prologue(prologue_trace, computation_trace, epilogue_trace, **kwargs)
        stats = compilation.current_stats()
        names = {proxy: name for proxy, (name, _) in trace.tensors_of_module(prologue_trace).items()}
        self._compiled.append(_Compiled(stats.last_traces, stats.last_backward_traces, names, self._module, self.count))
        return traces

    @property
    def report(self) -> Profile:
        """The profile of the last compilation; inputs count as contiguous.

        Raises:
            ProfileError: nothing was compiled yet.
            UnsupportedOpError: the program needs values of tensors.
        """
        if not self._compiled:
            raise ProfileError("ProfileTransform has no report yet: nothing was compiled with it; call the jitted function first")
        return self._compiled[-1].report

    @property
    def reports(self) -> tuple[Profile, ...]:
        """The profiles of all compilations, in order."""
        return tuple(c.report for c in self._compiled)

    def __repr__(self) -> str:
        return f"ProfileTransform(count={self.count!r})"


def _ignore() -> None:
    """What happens at an operation when nobody shows progress."""


def _nothing() -> None:
    """The module of a function."""


@dataclass
class _Compiled:
    """What one compilation leads to."""

    forward: list[TraceCtx]
    backward: list[TraceCtx]
    names: dict[str, str]  # of parameters and buffers, by those of their proxies
    module: Callable[[], ThunderModule | None]
    count: Count

    @cached_property
    def report(self) -> Profile:
        """The profile, made when it is asked for."""
        forward = self.forward[-1]
        stand_ins = StandIns()
        tensors = _tensors_by_name(self.module())
        inputs = [_input(p, tensors.get(self.names.get(getattr(p, "name", ""), "")), stand_ins) for p in forward.args]
        return _of_traces(forward, self.backward[-1] if self.backward else None, inputs, stand_ins, Recorder(self.count))


def _tensors_by_name(module: ThunderModule | None) -> dict[str, tuple[torch.Tensor, Kind]]:
    """Parameters and buffers, with those that other transforms put in their places."""
    if module is None:
        return {}
    model = module._model
    parameters = {**dict(model.named_parameters(remove_duplicate=False)), **module._overrides_parameters}
    buffers = {**dict(model.named_buffers(remove_duplicate=False)), **module._overrides_buffers}
    found: dict[str, tuple[torch.Tensor, Kind]] = {n: (t, "buffer") for n, t in buffers.items() if t is not None}
    found |= {n: (t, "parameter") for n, t in parameters.items() if t is not None}
    return found


def _input(p: Any, known: tuple[torch.Tensor, Kind] | None, stand_ins: StandIns) -> tuple[Any, Kind]:
    """A placeholder for an input of a computation; tied parameters are one tensor."""
    if known is not None and isinstance(p, TensorProxy) and tuple(p.shape) == tuple(known[0].shape):
        return known
    if not isinstance(p, TensorProxy):
        return getattr(p, "value", p), "input"
    with stand_ins.mode, torch.no_grad():
        return empty_for(p), "input"
