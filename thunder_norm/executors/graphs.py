"""From a Python function of tensors to a function that inductor made of it, for inputs like given ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from thunder_norm.errors import CompilerError, chain_of, with_details
from thunder_norm.executors import stored
from thunder_norm.executors.plans import Layout, NotCompilable, Plan, Tensors, View, planned

Function = Callable[..., Tensors]
Boxed = Callable[[list[torch.Tensor]], Tensors]


_STARTS_A_HISTORY = "inside of a function being transformed by a functorch transform"  # what torch says of `requires_grad_` there


def compiled(
    function: Function, inputs: Tensors, layouts: Sequence[Layout], has_backward: bool, description: str | None = None
) -> Boxed:
    """A function of a list, which it empties, with the results of `function`.

    Args:
        function: of tensors, giving tensors.
        inputs: the function is for inputs with the sizes, strides, dtypes and devices of these.
        layouts: how each result is to lie in memory.
        has_backward: whether this is a part of a program that is differentiated.
        description: all that the function does, as text; None if there is none.

    Raises:
        NotCompilable: it is to be called as it is.
        CompilerError: a compiler is missing, or fails.
    """
    # inductor's cache of graphs asks for the symbols of sizes, of which there are none
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    with mode:
        fakes = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device) for t in inputs]
    with _prepared(mode):
        key = (
            None
            if description is None
            else stored.key_of(description, fakes, f"{[layout.name for layout in layouts]} {has_backward}")
        )
        found = None if key is None else _loaded(stored.read(key), fakes, has_backward)
    if found is None:
        with mode:
            graph, plan = _traced(function, fakes, layouts)
        if all(view.of_input for view in plan.views):
            raise NotCompilable  # nothing is computed
        _check_pure(graph)
        _write_out_numbers(graph)
        with _prepared(mode), _errors():
            made = _through_inductor(graph, fakes, _with_strides(plan, layouts), has_backward)
        graph_key = getattr(made, "_fx_graph_cache_key", None)
        if key is not None and graph_key is not None:
            stored.write(key, {"graph": graph_key, "plan": dataclasses.asdict(plan)})
    else:
        made, plan = found
    call = getattr(made, "current_callable", None) or made
    if not getattr(made, "_boxed_call", False):
        call = functools.partial(_unboxed, call)
    return call if plan.is_direct else _with_views(call, plan.views)


def is_compilable(function: Function, like: Sequence[tuple[Sequence[int], torch.dtype, torch.device]]) -> bool:
    """Whether inductor may have a function of tensors with these sizes, dtypes and devices: tried out, as nothing of its inside is known."""
    with FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)):
        try:
            fakes = [torch.empty(tuple(size), dtype=dtype, device=device) for size, dtype, device in like]
            results = function(*fakes)
            graph, _ = _traced(function, fakes, [Layout.ANY] * len(results))
            _check_pure(graph)
            _write_out_numbers(graph)
        except Exception:  # noqa: BLE001 - whatever a region could not do either
            return False
    return True


def _unboxed(call: Function, inputs: list[torch.Tensor]) -> Tensors:
    return call(inputs)


@contextlib.contextmanager
def _prepared(mode: FakeTensorMode) -> Iterator[None]:
    """What inductor finds around it when it compiles, or reads what it has compiled."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.virtualized import V

    # what the generated code would assert of its inputs is checked by the caller, in one call of C++
    without_checks = config.patch(size_asserts=False, alignment_asserts=False, scalar_asserts=False)
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), without_checks:
        yield


def _loaded(kept: Any, fakes: Tensors, has_backward: bool) -> tuple[Any, Plan] | None:
    """What inductor's cache has for a region, if it was noted which graph that is, and the graph is still there."""
    if kept is None:
        return None
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    try:
        views = (View(**view | {name: tuple(view[name]) for name in ("size", "stride")}) for view in kept["plan"]["views"])
        plan = Plan(tuple(views), kept["plan"]["is_direct"])
        constants = CompiledFxGraphConstants()
        made, _ = FxGraphCache.load_with_key(kept["graph"], [], list(fakes), True, None, False, constants)
        if made is None:
            return None
        options: Any = {"cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": not has_backward}
        made.post_compile(list(fakes), constants, options | {"static_input_idxs": (), "boxed_forward_device_index": None})
    except Exception:  # noqa: BLE001 - whatever is wrong with what lies on disk, the region is compiled anew
        return None
    return made, plan


def _with_views(call: Boxed, views: tuple[View, ...]) -> Boxed:
    bases = sorted({view.index for view in views if view.of_input})

    def with_views(inputs: list[torch.Tensor]) -> Tensors:
        given = {i: inputs[i] for i in bases}
        computed = call(inputs)
        return [view.made(given, computed) for view in views]

    return with_views


def _traced(function: Function, fakes: Tensors, layouts: Sequence[Layout]) -> tuple[torch.fx.GraphModule, Plan]:
    """The graph of what is computed, in functional aten operations that inductor knows, and how the results come out of it."""
    import torch._inductor.lowering  # which some of these decompositions take for imported
    from torch._inductor.decomposition import select_decomp_table

    plans: list[Plan] = []

    def of_computed(*given: torch.Tensor) -> list[torch.Tensor]:
        results = list(function(*given))
        computed, plan = planned(given, results, layouts)
        plans.append(plan)
        return computed

    try:
        graph = make_fx(of_computed, decomposition_table=select_decomp_table())(*fakes)
        if _writing(graph):
            graph = make_fx(torch.func.functionalize(of_computed), decomposition_table=select_decomp_table())(*fakes)
            if plans[-1] != plans[0] or _writing(graph):
                raise NotCompilable
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        raise NotCompilable from e
    except RuntimeError as e:  # Thunder has torch's autograd run some operations again for their gradients
        if _STARTS_A_HISTORY not in str(e):
            raise
        raise NotCompilable from e
    return graph, plans[0]


def _writing(graph: torch.fx.GraphModule) -> bool:
    return any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in graph.graph.nodes)


def _write_out_numbers(graph: torch.fx.GraphModule) -> None:
    """Have the graph make what operations make of a number, ``torch.tensor(0.0)``; refuse other tensors that stand in the function."""
    aten = torch.ops.aten
    graph.graph.eliminate_dead_code()
    for copied in graph.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        constant = copied.args[0]
        value = getattr(graph, constant.target) if constant.op == "get_attr" else None
        if type(value) is not torch.Tensor or value.ndim or value.is_complex():
            continue
        with graph.graph.inserting_before(copied):
            made = graph.graph.call_function(
                aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
            )
        made.meta.update(copied.meta)
        copied.replace_all_uses_with(made)
        graph.graph.erase_node(copied)
    graph.graph.eliminate_dead_code()
    if graph.graph.find_nodes(op="get_attr"):
        raise NotCompilable


# They give what was in memory, or of a stand-in for an operation whose result depends on values: its size alone.
_UNWRITTEN = frozenset(
    "aten::empty aten::empty_like aten::empty_strided aten::empty_permuted aten::new_empty aten::new_empty_strided".split()
)
_WRITING_ALL = (torch.ops.aten.copy.default, torch.ops.aten.fill.Scalar, torch.ops.aten.fill.Tensor, torch.ops.aten.zero.default)


def _is_unwritten(node: torch.fx.Node) -> bool:
    """Whether a node makes a tensor that is read and that nothing has computed."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.name().partition(".")[0] not in _UNWRITTEN:
        return False
    return bool(node.meta["val"].numel()) and not _is_filled(node)


def _is_filled(node: torch.fx.Node) -> bool:
    """Whether all that reads a node writes into the whole of it first; torch 2.9 permutes what it makes."""
    return all(
        (user.target in _WRITING_ALL and user.args[0] is node)
        or (user.target is torch.ops.aten.permute.default and _is_filled(user))
        for user in node.users
    )


def _check_pure(graph: torch.fx.GraphModule) -> None:
    """Refuse what draws numbers, which inductor would draw in another order, and what reads a tensor that was only given its size."""
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if _is_unwritten(node):
            raise NotCompilable
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in target.tags
            and not _has_no_dropout(node)
        ):
            raise NotCompilable


def _has_no_dropout(node: torch.fx.Node) -> bool:
    """Whether an operation that may draw numbers has an argument that says it does not."""
    values = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)  # type: ignore[union-attr]
    return "dropout_p" in {a.name for a in node.target._schema.arguments} and not values.get("dropout_p", 0.0)  # type: ignore[union-attr]


def _with_strides(plan: Plan, layouts: Sequence[Layout]) -> list[int]:
    """Which of what the graph computes is to have the strides that torch gives it: also what there are views of."""
    pairs = zip(plan.views, layouts, strict=True)
    kept = {v.index for v, layout in pairs if not v.of_input and (layout is Layout.AS_IN_TORCH or v.offset is not None)}
    return sorted(kept)


def _through_inductor(graph: torch.fx.GraphModule, fakes: Tensors, with_strides: list[int], has_backward: bool) -> Any:
    """What inductor makes of a graph."""
    from torch._inductor import compile_fx

    (output,) = graph.graph.find_nodes(op="output")
    output.meta["original_output_strides"] = [tuple(n.meta["val"].stride()) for n in output.args[0]]
    output.meta["user_visible_output_idxs"] = with_strides
    _lay_out_weights(graph)
    _name_in_key(graph, with_strides)
    written = list(output.args[0])
    graph = compile_fx._recursive_joint_graph_passes(graph) or graph
    _return_apart(graph, written)
    return compile_fx.compile_fx_inner(graph, list(fakes), is_inference=not has_backward)


def _return_apart(graph: torch.fx.GraphModule, written: Sequence[torch.fx.Node]) -> None:
    """Copy what the graph returns now in place of what it computed, `written`: an input for ``x * 1``, or one result for two.

    Both may be written into after the call.
    """
    (output,) = graph.graph.find_nodes(op="output")
    returned: list[torch.fx.Node] = []
    for before, node in zip(written, output.args[0], strict=True):
        if node is not before and (node.op == "placeholder" or node in returned):
            with graph.graph.inserting_before(output):
                copied = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            copied.meta["val"] = node.meta["val"].clone()
            node = copied
        returned.append(node)
    if returned != list(output.args[0]):
        output.args = (returned,)
        graph.recompile()


def _lay_out_weights(graph: torch.fx.GraphModule) -> None:
    """Copy each weight that is returned as its convolution on CPU reads it, just before it does: one copy serves both.

    Inductor, left alone, copies all such weights before everything else, and they have left the processor's cache when they are used.
    """
    if not (torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available() and _keeps_noted_strides()):  # type: ignore[attr-defined]
        return
    (output,) = graph.graph.find_nodes(op="output")
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        weight = node.args[1]
        value = weight.meta["val"]
        if weight.op != "placeholder" or output not in weight.users or value.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.graph.inserting_before(node):
            laid_out = graph.graph.call_function(torch.ops.aten.clone.default, (weight,), {"memory_format": torch.channels_last})
        laid_out.meta["val"] = value.clone(memory_format=torch.channels_last)
        node.replace_input_with(weight, laid_out)
        output.replace_input_with(weight, laid_out)


@functools.cache
def _keeps_noted_strides() -> bool:
    """Whether inductor gives results the strides that are noted: torch 2.9 to 2.11 note again those of the graph, whose convolutions have others then."""
    from torch._inductor import compile_fx

    graph = torch.fx.Graph()
    output, noted = graph.output([]), []
    output.meta["original_output_strides"] = noted
    compile_fx.record_original_output_strides(torch.fx.GraphModule({}, graph))
    return output.meta["original_output_strides"] is noted


def _name_in_key(graph: torch.fx.GraphModule, with_strides: list[int]) -> None:
    """Have inductor's cache tell graphs apart by which results keep their strides: its keys have the code, not what is noted at nodes."""
    for node in graph.graph.find_nodes(op="placeholder")[:1]:
        node._rename("_".join([node.name, "keeping", *map(str, with_strides)]))
        node.target = node.name
    graph.recompile()


_MISSING = {
    "InvalidCxxCompiler": (
        "inductor found no C++ compiler",
        "install g++ or clang++, or name one in the environment variable CXX",
    ),
    "TritonMissing": (
        "Triton is not installed, which inductor needs for this device",
        "install the triton that belongs to this torch",
    ),
    "GPUTooOldForTriton": ("this GPU is too old for Triton", "leave the executor out"),
}


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except Exception as e:
        for cause in chain_of(e):
            for error in (cause, getattr(cause, "inner_exception", None)):  # what inductor raises carries what the backend did
                if type(error).__name__ in _MISSING:
                    why, instead = _MISSING[type(error).__name__]
                    raise CompilerError(
                        with_details("a region cannot be compiled", why=why, instead=f"{instead}; or leave the executor out")
                    ) from e
        raise CompilerError(
            with_details(
                "inductor cannot compile a region",
                why=_first_line(e),
                instead="leave the executor out, and report it with the trace",
            )
        ) from e


def _first_line(e: BaseException) -> str:
    return next(iter(f"{type(e).__name__}: {e}".splitlines()))
