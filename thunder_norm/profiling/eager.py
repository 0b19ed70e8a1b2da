"""The program as PyTorch runs it without Thunder: one row for each call of a torch function."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.overrides import TorchFunctionMode

from thunder_norm.core import registry
from thunder_norm.errors import ProfileError, ThunderNormError, UnsupportedOpError, with_details
from thunder_norm.norms.eager import module_hooks
from thunder_norm.op_names import op_key
from thunder_norm.profiling import flops, shapes
from thunder_norm.profiling.memory import tensors_of
from thunder_norm.profiling.recorder import Recorder, Step
from thunder_norm.profiling.rows import NOWHERE, Place
from thunder_norm.profiling.stand_ins import StandIns, note_inputs, without_gradients_kept
from thunder_norm.user_code import user_line, user_line_of


def record(
    fn: Callable, args: tuple, kwargs: dict, *, backward: bool, stand_ins: StandIns, recorder: Recorder, tick: Callable[[], None]
) -> dict[str, int]:
    """Run a program, and its backward, on stand-ins.

    Returns the bytes that are there before: parameters, buffers and inputs.

    Raises:
        ProfileError: there is nothing to differentiate.
        UnsupportedOpError: the program asks for values.
    """
    module = fn if isinstance(fn, torch.nn.Module) else None
    target = fn if module is None else stand_ins.of_module(module)
    args, kwargs = stand_ins.of_tree(args), stand_ins.of_tree(kwargs)
    note_inputs(recorder.memory, target if module is not None else None, (args, kwargs))
    resident = recorder.memory.resident()
    calls = _Calls(recorder, tick)
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda t: t)
    saved = hooks if backward else contextlib.nullcontext()  # transforms of `torch.func` inside refuse any
    with stand_ins.mode, _explained(), torch.random.fork_rng(devices=[]):
        with torch.set_grad_enabled(backward), saved, calls.module_paths(), recorder, calls:
            result = target(*args, **kwargs)
        if backward:
            _run_backward(result, recorder, calls)
    return resident


# Kernels of CPU and GPU that the dispatcher takes apart as soon as anybody watches.
_ONE_KERNEL = {"SiluBackward0": "aten.silu_backward", "MishBackward0": "aten.mish_backward"}


def _run_backward(result: Any, recorder: Recorder, calls: _Calls) -> None:
    outputs = [t for t in tensors_of(result) if t.requires_grad]
    if not outputs:
        raise ProfileError("backward=True, but no result requires grad: nothing that the program uses does")
    nodes = _nodes_behind(outputs)
    leaves = [n.variable for n in nodes if hasattr(n, "variable")] + [t for t in outputs if t.is_leaf]
    with without_gradients_kept(leaves), recorder, _backward_steps(nodes, recorder, calls):
        del nodes
        recorder.begin("ones_like", "backward", NOWHERE)
        tangents = [torch.ones_like(t) for t in outputs]
        torch.autograd.backward(outputs, tangents)
        recorder.end()


def _nodes_behind(outputs: list[torch.Tensor]) -> list[Any]:
    """The nodes of the autograd graph of `outputs`."""
    seen = {}
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            pending.extend(n for n, _ in node.next_functions if n is not None)
    return list(seen)


@contextlib.contextmanager
def _backward_steps(nodes: list[Any], recorder: Recorder, calls: _Calls) -> Iterator[None]:
    """Let a step begin whenever one of `nodes` does."""
    numbers = {id(s): n for n, s in enumerate(recorder.steps)}

    def starting(name: str, step: Step | None) -> Callable[[Any], None]:
        place = NOWHERE if step is None else step.place

        def start(_: Any) -> None:
            recorder.begin(name, "backward", place, numbers.get(id(step)), _ONE_KERNEL.get(name))

        return start

    handles = [n.register_prehook(starting(n.name().split("::")[-1], calls.step_of(n))) for n in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Calls(TorchFunctionMode):
    """Makes each call of a torch function a step, and remembers the numbers of the autograd nodes it left."""

    def __init__(self, recorder: Recorder, tick: Callable[[], None]):
        super().__init__()
        self.recorder, self.tick = recorder, tick
        self.path = [""]
        self.starts: list[int] = []
        self.owners: list[tuple[Step, int]] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if registry.is_metadata(func) or getattr(func, "__name__", None) in _NOT_OPERATIONS:
            return func(*args, **kwargs)
        key = op_key(func)
        before = torch._C._autograd._get_sequence_nr()
        place = Place(self.path[-1], user_line() or "")
        name = key if isinstance(key, str) else flops.name_of(func)
        with self.recorder.step(name, "forward", place) as step:
            is_given, result = (False, None) if _is_kernel(func) else shapes.apply(func, args, kwargs)
            if is_given:
                self.recorder.stand_for(name, step, (args, kwargs), result)
            else:
                result = func(*args, **kwargs)
            step.flops = flops.own_flops(func, args, kwargs, result)
            step.finish(self.recorder.memory, (args, kwargs), result)
        if not step.kernels and step.flops is None and not step.made and next(tensors_of(result), None) is None:
            self.recorder.steps.pop()  # it asked for something, and computed nothing
        after = torch._C._autograd._get_sequence_nr()
        if after > before:
            self.starts.append(before)
            self.owners.append((step, after))
        self.tick()
        return result

    @contextlib.contextmanager
    def module_paths(self) -> Iterator[None]:
        """Keep track of the module whose forward runs: names are those in the outermost one."""
        names: dict[int, str] = {}

        def enter(module: torch.nn.Module, _: Any) -> None:
            if id(module) not in names:
                names.update({id(m): name for name, m in module.named_modules()})
            self.path.append(names[id(module)])

        def leave(module: torch.nn.Module, _: Any, __: Any) -> None:
            self.path.pop()
            if len(self.path) == 1:
                names.clear()

        with module_hooks(enter, leave):
            yield

    def step_of(self, node: Any) -> Step | None:
        """The step that left a node of the autograd graph: nodes have numbers, in the order of their making."""
        number = node._sequence_nr()
        i = bisect.bisect_right(self.starts, number) - 1
        return self.owners[i][0] if i >= 0 and number < self.owners[i][1] else None


def _is_kernel(func: Any) -> bool:
    """Whether an operation comes to the recorder as such, which asks for its rules itself."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


# They change what autograd sees, and compute nothing.
_NOT_OPERATIONS = frozenset(
    {"requires_grad_", "retain_grad", "register_hook", "_has_compatible_shallow_copy_type", "has_torch_function"}
)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Errors of programs that ask a tensor without data for its values say where."""
    unsupported = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedOperatorException,
    )
    try:
        yield
    except ThunderNormError:
        raise
    except unsupported as e:
        raise UnsupportedOpError(
            with_details(
                f"{getattr(e, 'func', e)} needs the values of its arguments, and a profile has none",
                at=user_line_of(e),
                instead="branch on shapes; for an operation of your own, thunder_norm.transforms.register_shape_rule",
            )
        ) from e
    except RuntimeError as e:
        if "support saved tensor hooks" not in str(e):
            raise
        raise UnsupportedOpError(
            with_details(
                'a transform of torch.func in a program whose backward is profiled with target="eager"',
                at=user_line_of(e),
                why=str(e).splitlines()[0],
                instead='target="trace", or backward=False',
            )
        ) from e
