"""Activation checkpointing: the transform, and the function transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.checkpoint

from thunder_norm.checkpointing.acquisition import interpret_region
from thunder_norm.checkpointing.blocks import EVERY_BLOCK, chosen_modules
from thunder_norm.checkpointing.budget import Budget, CheckpointReport
from thunder_norm.checkpointing.listing import with_functions
from thunder_norm.checkpointing.regions import finished, grouped, is_region
from thunder_norm.errors import CheckpointError, TransformTypeError, with_details
from thunder_norm.functions.jitted import Watching
from thunder_norm.profiling.trace import tensors_of_module
from thunder_norm.scalars import is_count
from thunder_norm.subclass.interpreting import interception
from thunder_norm.tracing import hooks, lookasides
from thunder_norm.tracing.shared_memory import replaced_memory
import thunder
from thunder.core.interpreter import WrappedValue, _interpret_call, wrap_const
from thunder.core.module import ThunderModule
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx


class CheckpointTransform(Watching):
    """Have regions of a program computed again in the backward, instead of keeping what is inside them.

    ``thunder.jit(model, transforms=[CheckpointTransform(policy)])``.  Calls of ``torch.utils.checkpoint.checkpoint`` in the program,
    reentrant or not and nested to any depth, are regions in any case; a policy adds more without a change to the model.  A region is one
    operation of the acquired trace, named ``checkpoint_0``, those inside it ``checkpoint_0_0``, ``checkpoint_0_1``, ...

    Gradients are those of the program without regions: random operations draw the same numbers again, from the states of the generators
    that the forward keeps.

    Args:
        policy: None: what the program checkpoints itself.  "every block": the modules with children of their own that are in a
            ModuleList or Sequential, the outermost ones.  A list of names of modules or patterns (``["layers.*.mlp"]``).
        memory_budget: bytes.  Chooses what to compute again such that no more than this is alive at any time, parameters, inputs and
            their gradients included, for the least extra FLOPs found; ``transform.report`` says what it came to.

    Raises:
        CheckpointError: an unknown policy or module; (when the jitted function is called) a budget that no choice keeps to, or before a
            transform that interprets wrappers which the program has.
        UnsupportedOpError: (when it is called) a region uses a view of a differentiated tensor that is written without autograd, or
            chooses kernels by contexts.
        DataDependentError: (when it is called) the program needs the value of a tensor.

    >>> import torch
    >>> from thunder_norm.transforms import CheckpointTransform
    >>> import thunder
    >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.nn.Linear(2, 2))
    >>> jm = thunder.jit(model, transforms=[CheckpointTransform("every block")])
    >>> _ = jm(torch.ones(1, 2))
    >>> [b.sym.name for b in thunder.last_traces(jm)[0].bound_symbols if not b.sym.is_prim]
    ['checkpoint_0', 'linear']
    """

    def __init__(self, policy: str | Sequence[str] | None = None, *, memory_budget: int | None = None):
        if isinstance(policy, str) and policy != EVERY_BLOCK:
            raise CheckpointError(
                with_details(
                    f"unknown policy {policy!r}", instead=f'"{EVERY_BLOCK}", or a list of names of modules: [{policy!r}]'
                )
            )
        if policy is not None and not (isinstance(policy, Sequence) and policy and all(isinstance(p, str) for p in policy)):
            raise CheckpointError(f'a policy is "{EVERY_BLOCK}" or a list of names of modules, got {policy!r}')
        if policy is not None and memory_budget is not None:
            raise CheckpointError("CheckpointTransform takes a policy or a memory budget, not both")
        if memory_budget is not None and not is_count(memory_budget):
            raise CheckpointError(f"memory_budget is a positive number of bytes, got {memory_budget!r}")
        self.policy = policy
        self.memory_budget = memory_budget
        self.checkpointed_modules: dict[int, str] = {}
        self._report: CheckpointReport | None = None
        self._is_module = False
        super().__init__()

    def transform_module(self, model: ThunderModule) -> None:
        """Find the modules that the policy names."""
        super().transform_module(model)
        self._is_module = True
        if self.policy is not None:
            self.checkpointed_modules = {id(m): name for name, m in chosen_modules(model._model, self.policy).items()}

    def end(self, found: Any) -> None:
        """Have each region be one operation."""
        found.computation_trace = grouped(found.computation_trace, replaced_memory.replaced_inputs(found.computation_trace))

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, *, executors_list: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Give regions the results that the program around them uses, and choose more of them to keep to a budget."""
        if self.policy is not None and not self._is_module:
            raise CheckpointError("a policy of CheckpointTransform is about modules, and what is jitted is a function")
        prologue, computation, epilogue = super().transform_traces_pre_prologue(
            prologue_trace, computation_trace, epilogue_trace, executors_list=executors_list
        )
        computation = finished(computation)
        if self.memory_budget is not None and any(isinstance(p, TensorProxy) and p.requires_grad for p in computation.args):
            acquisition = interception.finished_acquisition()
            if acquisition is not None and acquisition.has_wrappers:
                raise CheckpointError(
                    with_details(
                        "a memory budget for a program with wrapper subclasses in it",
                        why="what they are made of is known once the transform that interprets them has rewritten the program",
                        instead=f"put {self!r} behind that transform",
                    )
                )
            kinds = {name: kind for name, (_, kind) in tensors_of_module(prologue).items()}
            computation, self._report = Budget(computation, self.memory_budget, executors_list, kinds).keep()
        return prologue, computation, epilogue

    @property
    def report(self) -> CheckpointReport:
        """What the budget led to in the last compilation.

        Raises:
            CheckpointError: there is no budget, or nothing with gradients was compiled yet.
        """
        if self._report is None:
            raise CheckpointError(
                "CheckpointTransform has a report once a program that is differentiated is compiled to a budget"
            )
        return self._report

    def __repr__(self) -> str:
        given = f"memory_budget={self.memory_budget}" if self.memory_budget is not None else repr(self.policy or "")
        return f"CheckpointTransform({given})"


def checkpoint_functions(program: Any) -> str:
    """The text of a program with its checkpointed regions as functions: ``checkpoint_0``, ``checkpoint_0_0`` inside it, ...

    Args:
        program: what `thunder.jit` made, called before; or a trace.

    Raises:
        TransformTypeError: it is neither, or was not called yet.
    """
    if isinstance(program, TraceCtx):
        return with_functions(program)
    traces = thunder.last_traces(program) if thunder.compile_data(program) is not None else None
    if not traces:
        raise TransformTypeError("checkpoint_functions takes a trace, or what thunder.jit made, once it was called")
    rewritten = [i for i, t in enumerate(traces) if "heckpointed" in str(t.get_provenance())]
    first = rewritten[-1] if rewritten else 0
    regions = _regions(traces[first].bound_symbols)
    if not regions:
        return with_functions(traces[first])
    # other transforms may have rewritten it since; differentiation takes regions apart
    return with_functions([t for t in traces[first:] if _regions(t.bound_symbols) == regions][-1])


def _regions(bsyms: Sequence[BoundSymbol]) -> list[str]:
    """The names of all regions in a program, in the order in which they begin."""
    return [name for b in bsyms for name in ([b.sym.name] if is_region(b) else []) + _regions(b.subsymbols)]


@hooks.first_use
def checkpoint(function: Callable) -> Callable:
    """A function that computes what `function` does, and computes it again in the backward instead of keeping what is inside.

    In a traced program a call is a region as those of `CheckpointTransform`, with or without that transform (without it, tensors get out
    of it by its result only, and it may not write into others); elsewhere it is a call of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        TransformTypeError: `function` is not callable.

    >>> import torch
    >>> from thunder_norm.transforms import checkpoint
    >>> import thunder
    >>> def f(x):
    ...     return checkpoint(lambda x: x.sin().exp())(x) * 2
    >>> x = torch.zeros(2, requires_grad=True)
    >>> jf = thunder.jit(f)
    >>> jf(x).sum().backward()
    >>> x.grad
    tensor([2., 2.])
    >>> [p.name for p in thunder.last_traces(jf)[-1].bound_symbols[-1].args[1][0]]  # what is kept
    ['x']
    """
    return Checkpointed(function)


class Checkpointed:
    """What `checkpoint` returns."""

    def __init__(self, function: Callable):
        if not callable(function):
            raise TransformTypeError(f"checkpoint takes a function, got {type(function).__name__}")
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it as a checkpointed region."""
        return torch.utils.checkpoint.checkpoint(self.function, *args, use_reentrant=False, **kwargs)


@lookasides.for_our(Checkpointed.__call__)
def _call(checkpointed: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    function = _interpret_call(getattr, checkpointed, wrap_const("function"))
    return interpret_region(function, *args, **kwargs)
