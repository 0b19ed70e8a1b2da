"""torch.autograd.Functions that the backward of another one calls: its derivative is that of *their* backwards.

Torch runs the backward of a function once, on fakes, and what it does is differentiated where somebody asks for second derivatives.  A function
that it calls would be taken for the operations of its forward then, so it is recorded as an operation with a rule of its own, which its own
backward says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.functions.custom import TorchOperation
from thunder_norm.functions.programs import program_of
from thunder_norm.subclass.backward.refused_backward import Refuse, untraceable_backward
from thunder_norm.subclass.interpreting.operations import AUTOGRAD_APPLY
from thunder_norm.subclass.recording.record import Recorded, Recorder, Step
from thunder_norm.subclass.recording.trace import OperationId, composite
from thunder_norm.tracing.translation import proxy_like
from thunder_norm.trees import flat_tensors, map_tensors
from thunder_norm.wrapper_classes import is_wrapper

_DETACH = torch.ops.aten.detach.default
_MOST_LEVELS = 2  # of functions in backwards of functions: one whose backward calls itself has no last


def like(t: torch.Tensor) -> torch.Tensor:
    """Another tensor that is as one is, and has no history."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


class RanFunction:
    """A function that torch has run on fakes, and what is known of it.

    Attributes:
        cls: the function.
        inputs: fakes that it was given.
        outputs: what it returned, each once.
        cotangents: for each of these what the backward was given.
        gradients: for each input what it returned; None for none.
        forward, backward: the operations.
    """

    cls: type[torch.autograd.Function]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    cotangents: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    forward: Sequence[Recorded]
    backward: Sequence[Recorded]

    def operation(self) -> TorchOperation:
        """An operation with a rule of its own."""
        produced = {id(t) for r in self.forward for t in r.outputs} | {id(t) for t in self.inputs}
        backward, gradients = self._with_saved_results()
        kept = {id(t): t for r in backward for t in r.inputs if id(t) in produced}
        kept |= {id(g): g for g in gradients if id(g) in produced}
        saved = list(kept.values())
        places = {
            id(t): (is_result, i) for is_result, ts in ((True, self.outputs), (False, self.inputs)) for i, t in enumerate(ts)
        }
        return TorchOperation(
            self.cls.__name__,
            self._program("forward", self.forward, self.inputs, self.outputs),
            self._program("forward", self.forward, self.inputs, [*self.outputs, *saved]),
            self._program("backward", backward, [*saved, *self.cotangents], gradients),
            tuple(g is not None for g in self.gradients),
            len(self.outputs),
            {i: places[id(t)] for i, t in enumerate(saved) if id(t) in places},
        )

    def _with_saved_results(self) -> tuple[list[Recorded], list[torch.Tensor]]:
        """The backward and its gradients, with results themselves for what torch makes of them where they are saved.

        That is a ``detach()`` as soon as the forward is over, and another one for each ``ctx.saved_tensors``.
        """
        results = {id(t): t for t in self.outputs}
        packed: dict[int, torch.Tensor] = {}
        for r in reversed([r for r in self.forward if isinstance(r.func, torch._ops.OpOverload) and r.func.namespace != "prim"]):
            if r.func is not _DETACH or id(r.inputs[0]) not in results:
                break
            packed[id(r.outputs[0])] = results[id(r.inputs[0])]
        unpacked: dict[int, torch.Tensor] = {}
        body: list[Recorded] = []
        for r in self.backward:
            if r.func is _DETACH and id(r.inputs[0]) in packed:
                unpacked[id(r.outputs[0])] = packed[id(r.inputs[0])]
            elif any(id(t) in unpacked for t in r.inputs):
                args, kwargs = map_tensors(lambda t: unpacked.get(id(t), t), (r.args, r.kwargs))
                body.append(replace(r, args=args, kwargs=kwargs))
            else:
                body.append(r)
        return body, [unpacked.get(id(g), g) for g in self.gradients if g is not None]

    def _program(
        self, part: str, log: Sequence[Recorded], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Any:
        """What `log` does as a flat program from `inputs` to `outputs`."""
        wanted = {id(t) for r in log for t in r.inputs} | {id(t) for t in outputs}
        symbol, _ = composite(OperationId(self.cls.__name__, part), log, inputs, outputs, wanted)
        formal = [proxy_like(t) for t in inputs]
        return program_of(lambda *args: symbol(*args), formal, hoists=False)


class _InBackward(RanFunction, Step):
    """A function that is called while a backward is recorded; it stands for its operation there."""

    def __init__(self, cls: type, args: tuple, kwargs: dict, recorder: Recorder, may_go_on: bool):
        self.cls = cls
        given = {id(t): t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        with recorder.paused(), torch.no_grad():
            own = {key: like(t).requires_grad_(t.is_floating_point() or t.is_complex()) for key, t in given.items()}
        self.given, self.inputs = tuple(given.values()), list(own.values())
        self.gradients = [None] * len(self.inputs)
        args, kwargs = tree_map(lambda v: own.get(id(v), v), (args, kwargs))
        before, recorder.log = recorder.log, []
        try:
            with torch.enable_grad():
                self.result = AUTOGRAD_APPLY(cls, *args, **kwargs)
            self.forward, recorder.log = recorder.log, []
            self.outputs = list({id(t): t for t in flat_tensors(self.result)}.values())
            check_plain(cls, self.outputs, "returns")
            with recorder.paused(), torch.no_grad():
                self.cotangents = [like(t) for t in self.outputs]
            try:
                if not may_go_on:
                    raise _too_deep(cls)
                self._go_backward()
                self.backward = recorder.log
            except Exception as e:  # noqa: BLE001 - nobody may ask for it
                self._refuse(untraceable_backward(cls.__name__, None, e), recorder)
        finally:
            recorder.log = before

    def _go_backward(self) -> None:
        pairs = [(t, c) for t, c in zip(self.outputs, self.cotangents, strict=True) if t.requires_grad]
        sources = [t for t in self.inputs if t.requires_grad]
        if pairs and sources:
            results, cotangents = zip(*pairs, strict=True)
            found = torch.autograd.grad(results, sources, cotangents, allow_unused=True)
            check_plain(self.cls, found, "has as a gradient")
            of = {id(t): g for t, g in zip(sources, found, strict=True)}
            self.gradients = [of.get(id(t)) for t in self.inputs]

    def _refuse(self, error: Exception, recorder: Recorder) -> None:
        with recorder.paused(), torch.no_grad():
            self.gradients = [like(t) if t.requires_grad else None for t in self.inputs]
        gradients = tuple(g for g in self.gradients if g is not None)
        self.backward = [Recorded(Refuse(error, gradients), tuple(self.cotangents), {}, gradients, gradients)]

    def emit(self, *inputs: Any) -> tuple[Any, ...]:
        """See `Step`."""
        return tuple(self.operation().symbol(*inputs))

    def note(self, recorder: Recorder) -> Any:
        """Record it; returns what it returns, without a history."""
        with recorder.paused(), torch.no_grad():
            made = {id(t): like(t) for t in self.outputs}
        outputs = tuple(made.values())
        recorder.log.append(Recorded(self, self.given, {}, outputs, outputs))
        return tree_map(lambda v: made.get(id(v), v), self.result)


def check_plain(cls: type, tensors: Sequence[torch.Tensor | None], part: str) -> None:
    """Refuse a function that makes wrappers of plain tensors where only these can be.

    Raises:
        UnsupportedOpError: says of which class one is.
    """
    wrapper = next((t for t in tensors if t is not None and is_wrapper(t)), None)
    if wrapper is not None:
        raise UnsupportedOpError(
            with_details(
                f"{cls.__name__} {part} a {type(wrapper).__name__} where gradients of plain tensors are computed",
                why="the gradient of a plain tensor is a plain one in a trace",
                instead="let the backward return plain tensors, or call the function under torch.no_grad()",
            )
        )


def _too_deep(cls: type) -> UnsupportedOpError:
    return UnsupportedOpError(
        with_details(
            f"a derivative of order {_MOST_LEVELS + 2} through {cls.__name__}, whose backward calls functions whose backwards call it",
            why="each is traced, and there is no last one",
            instead="write the backward with operations of torch",
        )
    )


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Record functions that are called meanwhile, on fakes of the recorder's, as what they say of themselves."""
    mode, levels = recorder.acquisition.fakes.mode, 0

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        nonlocal levels
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        is_differentiable = any(t.is_floating_point() or t.is_complex() for t in tensors)
        if not is_differentiable or any(getattr(t, "fake_mode", None) is not mode for t in tensors) or torch.is_grad_enabled():
            return AUTOGRAD_APPLY(cls, *args, **kwargs)
        levels += 1
        try:
            return _InBackward(cls, args, kwargs, recorder, levels <= _MOST_LEVELS).note(recorder)
        finally:
            levels -= 1

    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.autograd.Function.apply = classmethod(AUTOGRAD_APPLY)  # pyright: ignore[reportAttributeAccessIssue]
