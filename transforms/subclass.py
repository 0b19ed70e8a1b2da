"""The transform that interprets tensor wrapper subclasses."""

from __future__ import annotations

from typing import Any

from thunder.core.compile_data import get_compile_stats
from thunder.core.transform_common import Transform

from thunder_norm.dispatch import Environment
from thunder_norm.subclass import boundary, patches
from thunder_norm.subclass.acquisition import Acquisition, location_of_user
from thunder_norm.subclass.record import Recorder


class TracingEnvironment(Environment):
    """Rules run on fakes: real operations are recorded as one operation each."""

    def __init__(self, acquisition: Acquisition, recorder: Recorder):
        self.acquisition = acquisition
        self.recorder = recorder

    def run_real(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain fakes and record it as one operation."""
        return self.recorder.call(func, args, kwargs)

    def user_location(self) -> str | None:
        """The user's line the interpreter is at."""
        return location_of_user()


class SubclassTransform(Transform):
    """Interpret every traceable wrapper subclass while the trace is acquired.

    ``thunder.jit(f, transforms=[SubclassTransform()])`` accepts instances of any class made with
    ``torch.Tensor._make_wrapper_subclass`` that has ``__torch_dispatch__``, ``__tensor_flatten__`` and
    ``__tensor_unflatten__``: as arguments, as (frozen) parameters and buffers, constructed inside, and as results.  The
    computation runs on their inner tensors; gradients flow into inner tensors that require grad.

    Raises (when the jitted function is called):
        UnsupportedSubclassError: a class does not follow the protocol, or an instance requires grad itself.
        UnsupportedOpError: an operation on a wrapper has no place in a trace.
    """

    interprets_subclasses = True
    intercepts_plain = False

    def __init__(self) -> None:
        patches.install()

    def effective(self, transforms: list[Transform]) -> SubclassTransform:
        """The transform whose rules apply when several of ours are in the list: the most derived."""
        ours = [t for t in transforms if isinstance(t, SubclassTransform)]
        return max(ours, key=lambda t: len(type(t).__mro__))

    def new_acquisition(self) -> Acquisition:
        """The state for one acquisition."""
        return Acquisition(self)

    def environment(self, acquisition: Acquisition, recorder: Recorder) -> Environment:
        """What norm rules see around them while an operation is recorded."""
        return TracingEnvironment(acquisition, recorder)

    def transform_traces_pre_prologue(self, prologue_trace: Any, computation_trace: Any, epilogue_trace: Any, **kwargs: Any):
        """Lower wrappers to their inner tensors; see `thunder_norm.subclass.boundary`."""
        acquisition = patches.take_acquisition()
        if acquisition is None:  # another transform of ours has done it
            return prologue_trace, computation_trace, epilogue_trace
        lowered = boundary.lower(acquisition, prologue_trace, computation_trace, epilogue_trace)
        if acquisition.has_wrappers:
            # what precedes still mentions wrappers; the first trace users see is the program on plain tensors
            get_compile_stats().last_traces.clear()
        return lowered
