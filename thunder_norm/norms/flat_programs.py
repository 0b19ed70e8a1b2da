"""Programs that differentiate inside (``torch.autograd.grad``, ``torch.func.grad``), as one list of operations, those of the derivatives among them.

Norm rules are of operations: what torch's autograd computes has norms once it is written out.  torch traces the program on fake tensors
(`make_fx`), and takes apart what has no rule; the operations are then run one by one as any program's are.  What depends on
values of tensors is not traced, and stays refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from thunder_norm.core import registry
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.errors import InnerDerivativeError, chain_of
from thunder_norm.norms.lifts.parameters import call_with, tensor_names
from thunder_norm.norms.undisturbed import Surroundings

aten = torch.ops.aten
# With a number where rules have a tensor: what autograd writes for 1 - y, g * 2 and 1 / y.
_WITH_THE_NUMBER_LAST: dict[Any, Callable] = {
    aten.add.Tensor: lambda number, t, alpha=1: torch.add(t * alpha if alpha != 1 else t, number),
    aten.sub.Tensor: lambda number, t, alpha=1: torch.rsub(t, number, alpha=alpha),
    aten.mul.Tensor: lambda number, t: torch.mul(t, number),
    aten.div.Tensor: lambda number, t: number / t,
}


@dataclass(frozen=True)
class FlatProgram:
    """A program's operations.

    Attributes:
        graph: takes the tensors of the model, in order of their names, and then those among the arguments.
        names: of the model's tensors.
        result: how what the graph gives is put together.
        others: what is in the result and no tensor, by place.
        writes: whether the program writes into tensors that it is given, which the graph does not.
        written: what torch has traced, before it was made functional.
    """

    graph: torch.fx.GraphModule
    names: tuple[str, ...]
    result: TreeSpec
    others: Mapping[int, Any]
    writes: bool
    written: _Written

    @staticmethod
    def of(
        model: torch.nn.Module,
        tensors: Mapping[str, torch.Tensor],
        args: tuple,
        kwargs: dict,
        error: InnerDerivativeError,
        before: FlatProgram | None = None,
    ) -> FlatProgram:
        """That of a model with these tensors and arguments.

        Args:
            model: any module.
            tensors: those it is run with, by name.
            args: its arguments, with norms or without.
            kwargs: its keyword arguments.
            error: what a program that cannot be traced is refused with.
            before: that of another call.  The program is traced in each, which sees whatever has changed; what became of its operations
                then holds where they are the same.

        Raises:
            InnerDerivativeError: torch cannot trace it without values.
        """
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_tensor)
        given = [x.backing if isinstance(x, NormedTensor) else x for x in leaves if _is_tensor(x)]
        found: list[Any] = []

        def program(own: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            each = iter(inputs)
            inside, named = tree_unflatten([next(each) if _is_tensor(x) else x for x in leaves], spec)
            values, result = tree_flatten(call_with(model, dict(zip(tensors, own, strict=True)), inside, named))
            found[:] = [result, {i: v for i, v in enumerate(values) if not _is_tensor(v)}]
            return [v for v in values if _is_tensor(v)]

        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        own = [t.detach().requires_grad_(name in trained) for name, t in tensors.items()]
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                graph = _traced(program, own, [t.detach() for t in given])
                written = _Written.of(graph, (*own, *given))
                if before is not None and written.is_like(before.written):
                    return FlatProgram(before.graph, tuple(tensors), *found, before.writes, before.written)
                with torch.no_grad():
                    graph = _traced(torch.func.functionalize(graph), own, given)
        except Exception as e:
            raise error from e
        writes = _with_rules(graph)
        return FlatProgram(graph, tuple(tensors), *found, writes, written)

    def __call__(self, tensors: Mapping[str, torch.Tensor], args: tuple, kwargs: dict) -> Any:
        """What the program gives, operation by operation."""
        given = [x for x in tree_flatten((args, kwargs), is_leaf=_is_tensor)[0] if _is_tensor(x)]
        interpreter = torch.fx.Interpreter(self.graph)
        values = interpreter.run(*(tensors[name] for name in self.names), *given, enable_io_processing=False)
        each = iter(values)
        num = self.result.num_leaves
        return tree_unflatten([self.others[i] if i in self.others else next(each) for i in range(num)], self.result)


@dataclass(frozen=True)
class _Written:
    """What torch has traced of a program, and all that is made of it later depends on.

    Attributes:
        code: of the operations.
        inputs: what is known of the tensors without their data, and which lie in the same memory.
        constants: the tensors that the program has by itself, as they were; None where it has others than torch's own with data,
            other parts, or runs under autocast.
        settings: of torch's that change what an operation is taken apart into.
    """

    code: str
    inputs: Sequence[tuple]
    constants: Sequence[torch.Tensor] | None
    settings: tuple

    @staticmethod
    def of(graph: torch.fx.GraphModule, tensors: Sequence[torch.Tensor]) -> _Written:
        """That of a graph, traced with these tensors."""
        memory: dict[int, int] = {}
        inputs = [
            (
                *(type(t), tuple(t.shape), t.dtype, t.device, t.layout, t.requires_grad, t.is_conj(), t.is_neg()),
                *((t.stride(), t.storage_offset(), _place(t, memory)) if t.layout is torch.strided else ()),
            )
            for t in tensors
        ]
        held = [getattr(graph, n.target, None) for n in graph.graph.nodes if n.op == "get_attr"]
        is_plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta for t in held)
        is_plain = is_plain and not torch._C._is_any_autocast_enabled()
        settings = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.is_inference_mode_enabled()
        return _Written(graph.code, inputs, [t.detach().clone() for t in held] if is_plain else None, settings)

    def is_like(self, other: _Written) -> bool:
        """Whether the same becomes of both."""
        if self.constants is None or other.constants is None:
            return False
        if (self.code, self.inputs, self.settings) != (other.code, other.inputs, other.settings):
            return False
        return all(map(_are_equal, self.constants, other.constants))


def _place(t: torch.Tensor, memory: dict[int, int]) -> int:
    """Which of the memories met so far a tensor lies in."""
    return memory.setdefault(t.untyped_storage()._cdata, len(memory))


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


class FlatModule(torch.nn.Module):
    """The parameters, buffers and modules of a model, under their names, with a flat program for its `forward`."""

    def __init__(self, model: torch.nn.Module, program: FlatProgram):
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.paths = [name.split(".") for name in program.names]
        self.run, self.result, self.others = program.graph.forward, program.result, dict(program.others)
        self.program = program

    @staticmethod
    def of(
        model: Any,
        args: tuple,
        kwargs: dict,
        error: BaseException,
        *,
        keeps_state: bool = True,
        before: FlatModule | None = None,
    ) -> FlatModule:
        """That of a model which cannot be traced with norms because it takes derivatives.

        Args:
            model: what cannot be traced.
            args: its arguments.
            kwargs: its keyword arguments.
            error: what tracing it met.
            keeps_state: whether what the program writes into its attributes and into tensors has to be there afterwards.
            before: that of another call.

        Raises:
            BaseException: `error`, which is another, or the model is a function; or it depends on values, or has state to keep.
        """
        cause = next((e for e in chain_of(error) if isinstance(e, InnerDerivativeError)), None)
        if cause is None or not isinstance(model, torch.nn.Module):
            raise error
        surroundings = Surroundings(model, args, kwargs)
        with surroundings.undisturbed():
            program = FlatProgram.of(model, tensor_names(model), args, kwargs, cause, before and before.program)
            writes = program.writes or surroundings.is_changed()
        if writes and keeps_state:
            raise cause
        return FlatModule(model, program)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the program gives."""
        own = []
        for path in self.paths:
            value = self
            for name in path:
                value = getattr(value, name)
            own.append(value)
        given = [x for x in tree_flatten((args, kwargs), is_leaf=_is_tensor)[0] if isinstance(x, torch.Tensor)]
        values = list(self.run(*own, *given))
        for place, other in self.others.items():
            values.insert(place, other)
        return tree_unflatten(values, self.result)

    def is_like(self, other: FlatModule) -> bool:
        """Whether another one computes the same of the same tensors, in whatever module it was traced."""
        mine, theirs = self.run.__self__, other.run.__self__
        if (mine.code, self.paths, self.result, self.others) != (theirs.code, other.paths, other.result, other.others):
            return False
        pairs = [(getattr(mine, n.target), getattr(theirs, n.target)) for n in mine.graph.nodes if n.op == "get_attr"]
        return all(a is b or (type(a) is torch.Tensor and _are_equal(a, b)) for a, b in pairs)


def _traced(program: Callable, *args: Any) -> torch.fx.GraphModule:
    return make_fx(program, decomposition_table=_decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)(*args)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


@functools.cache
def _torchs_parts() -> dict[Any, Callable]:
    return dict(core_aten_decompositions())


def _decompositions() -> dict[Any, Callable]:
    """How what has no norm rule is taken apart, and what is a derivative, which has one that refuses."""
    parts = {op: parts for op, parts in _torchs_parts().items() if not registry.has_rule(op) or "backward" in op.name()}
    return {**parts, **_NORMALIZATIONS, **_OWN_PARTS}


def _convolution_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    """The gradient of the input is a convolution of the other kind; those of parameters are no derivative that a norm is wanted of."""
    if output_mask[1] or output_mask[2]:
        return NotImplemented
    missing = [0] * len(stride)
    if not transposed:  # what the strides leave out at the end
        sizes = zip(input.shape[2:], grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
        missing = [n - (out - 1) * s + 2 * p - d * (k - 1) - 1 for n, out, s, p, d, k in sizes]
    return aten.convolution.default(grad, weight, None, stride, padding, dilation, not transposed, missing, groups), None, None


def _softplus_backward(grad: torch.Tensor, input: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
    """torch's parts have exp(beta x), which is infinite for large x."""
    return torch.where(input * beta > threshold, grad, grad * torch.sigmoid(input * beta))


def _elu_backward(
    grad: torch.Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, of: torch.Tensor
) -> torch.Tensor:
    """torch's parts have the exponential of positive numbers, which is thrown away."""
    below = of.clamp(max=0.0)
    slope = input_scale * (below + alpha * scale) if is_result else input_scale * alpha * scale * torch.exp(below * input_scale)
    return grad * torch.where(of <= 0, slope, scale)


_OWN_PARTS = {
    aten.convolution_backward.default: _convolution_backward,
    aten.softplus_backward.default: _softplus_backward,
    aten.elu_backward.default: _elu_backward,
}
# Their derivatives take the means and deviations that they return beside, whose rules need to see what they are of.
_NORMALIZATIONS = get_decompositions(
    [
        aten.native_layer_norm,
        aten.native_group_norm,
        aten._fused_rms_norm,
        aten.native_batch_norm,
        aten._native_batch_norm_legit,
        aten._native_batch_norm_legit_no_training,
        aten._native_batch_norm_legit_functional,
    ]
)


# what forward mode asks of a tangent before it takes it, and does no more with
_ASKED_OF_TANGENTS = frozenset({aten.is_same_size.default, aten._has_same_storage_numel.default})


def _with_rules(graph: torch.fx.GraphModule) -> bool:
    """Put operations that have rules for those that have none and are alike; whether one was left out that writes into an argument."""
    writes = False
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _WITH_THE_NUMBER_LAST and not isinstance(node.args[0], torch.fx.Node):
            node.target = _WITH_THE_NUMBER_LAST[node.target]
        elif node.target is aten.copy.default:
            node.target = _copied
        elif node.target is aten.copy_.default and node.args[0].op == "placeholder" and not node.users:
            graph.graph.erase_node(node)
            writes = True
        elif node.target in _ASKED_OF_TANGENTS and not node.users:
            graph.graph.erase_node(node)
        elif node.target is aten._new_zeros_with_same_feature_meta.default and not node.kwargs.get("self_num_batch_dims"):
            node.target, node.args, node.kwargs = aten.zeros_like.default, node.args[1:2], {}  # what a tangent is copied into
    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # with tensors for arguments, as the nodes have them
    graph.recompile()
    return writes


def _copied(target: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What a tensor is after the whole of it was written."""
    return value.to(target.dtype).expand(target.shape)
