"""The boundary of the computation: plain tensors inside, wrappers outside.

`lower` rewrites the three traces of an acquisition.  The prologue checks each wrapper input and takes its inner tensors out,
the computation takes and returns plain tensors only, and the epilogue, which runs after Thunder has connected the outputs to
torch.autograd, wraps them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.extend import OperatorExecutor

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquisition import Acquisition, LeafOrigin, WrapperOrigin
from thunder_norm.subclass.differentiation import Joint
from thunder_norm.subclass.names import with_readable_names
from thunder_norm.subclass.protocol import WrapperSpec
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.trace import FLATTEN, LEAF, REBIND, UNFLATTEN, keep_only

# Carries the operators below; it is in no executor list.
boundary_executor = OperatorExecutor("thunder_norm_boundary", version="1")
_counter = itertools.count()

Traces = tuple[TraceCtx, TraceCtx, TraceCtx | None]
Inner = dict[str, tuple[TensorProxy, ...]]


class GuardError(Exception):
    """An input is not what the trace was made for: the next cache entry, or a new trace, is tried."""


def _operator(name: str, fn: Callable, meta: Callable, *, keep: bool = False) -> Any:
    tags = (prims.OpTags.DONT_DCE,) if keep else None
    return boundary_executor.register_operator(name, meta=meta, fn=fn, tags=tags)


def check_plain_tensors(*tensors: torch.Tensor) -> None:
    """Guard: none of the inputs traced as plain tensors is a wrapper (Thunder's own check accepts any subclass)."""
    if _PLAIN.issuperset(map(type, tensors)):
        return
    for t in tensors:
        if type(t) not in _PLAIN and not isinstance(t, torch._subclasses.FakeTensor):
            _check_not_wrapper(t)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def _check_not_wrapper(t: torch.Tensor) -> None:
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise GuardError(f"expected a plain tensor, got {type(t).__name__}")


_check_plain = _operator("check_plain_tensors", check_plain_tensors, lambda *tensors: None, keep=True)


def _flatten_operator(spec: WrapperSpec, is_detached: tuple[bool, ...]) -> Callable:
    """``(x_a, x_b) = flatten_TwoTensor_0(x)``: the guard on everything static about x, then its inner tensors."""
    detaches = any(is_detached)

    def flatten(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not spec.matches(x):
            raise GuardError(f"expected {spec}, got {type(x).__name__}")
        leaves = spec.leaves(x)
        return tuple(t.detach() if d else t for t, d in zip(leaves, is_detached, strict=True)) if detaches else leaves

    return _bindable(f"flatten_{spec.cls.__name__}_{next(_counter)}", flatten)


def _unflatten_operator(fake: torch.Tensor, joint: Joint | None) -> Callable:
    """``y = unflatten_TwoTensor_1(t0, t1)``: the wrapper around inner results; carriers of its gradient may follow these."""
    spec = WrapperSpec.of(fake)
    result = None if joint is None else joint.result_of(fake)

    def unflatten(*leaves: torch.Tensor) -> torch.Tensor:
        if result is not None:
            return result.close(spec, leaves)
        if joint is not None:
            return spec.build(tuple(t.detach() for t in leaves))
        with torch.enable_grad():  # the generated epilogue runs under no_grad; inner results keep their history
            return spec.build(leaves)

    return _bindable(f"unflatten_{spec.cls.__name__}_{next(_counter)}", unflatten)


def wrap_output(proxy: SubclassProxy, leaves: Sequence[TensorProxy], wrap: Callable[..., torch.Tensor]) -> BoundSymbol:
    """An epilogue operation that makes the wrapper `proxy` from `leaves` in another way than its class does."""

    def with_history(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return wrap(*tensors)

    return _bindable(f"wrap_{type(proxy.fake).__name__}_{next(_counter)}", with_history)(*leaves, output=proxy)


def _bindable(name: str, fn: Callable) -> Callable:
    """A function that binds a one-off operator with given proxies as its output."""
    from thunder.core.symbol import Symbol

    def with_call_ctx(bsym: BoundSymbol) -> None:
        bsym._call_ctx = {name: fn}

    symbol = Symbol(
        name=name,
        id=name,
        is_prim=True,
        executor=boundary_executor,
        tags=(prims.OpTags.DONT_DCE,),
        _bind_postprocess=with_call_ctx,
    )
    return symbol.bind


# -- lowering ---------------------------------------------------------------------------------------------------------


def lower(
    acquisition: Acquisition,
    traces: Traces,
    joint: Joint | None = None,
    executor: Any = None,
) -> Traces:
    """Take wrappers out of the computation and put checks, unpacking and wrapping into prologue and epilogue.

    `joint` is what torch's autograd does with the program, `executor` what its operation is registered with.

    Raises:
        UnsupportedOpError: an operation that was not interpreted still touches a wrapper.
    """
    prologue, computation, epilogue = traces
    inner: Inner = {}
    if not acquisition.has_wrappers:  # only the prologue changes: it must also find that there are none
        return _lower_prologue(acquisition, prologue, inner, [], computation, None), computation, epilogue
    computation, epilogue = with_readable_names(acquisition, computation, epilogue)
    leaves = [bsym for bsym in computation.bound_symbols if bsym.sym.id == LEAF.id]
    _note_origins(acquisition, computation, leaves)
    new_computation = _lower_computation(computation, inner, leaves, joint, executor)
    new_prologue = _lower_prologue(acquisition, prologue, inner, leaves, new_computation, joint)
    num_computed = len(computation.bound_symbols[-1].args[0]["output"])
    new_epilogue = None if epilogue is None else _with_structs(_lower_epilogue(epilogue, inner, num_computed, joint))
    return new_prologue, new_computation, new_epilogue


def _note_origins(acquisition: Acquisition, trace: TraceCtx, leaves: list[BoundSymbol]) -> None:
    for bsym in leaves:
        for index, p in enumerate(bsym.output):
            acquisition.origins[p.name] = LeafOrigin(bsym.args[0], index)
    for bsym in trace.bound_symbols:
        if bsym.sym.id == FLATTEN.id:
            (wrapper,) = bsym.args
            for p, name in zip(bsym.output, acquisition.spec_of(wrapper).leaf_names(), strict=True):
                acquisition.origins[p.name] = WrapperOrigin(acquisition.real_input(wrapper), name)


def _flat(tree: Any, inner: Inner) -> Iterator[Any]:
    """The leaves of a tree with wrappers replaced by their inner proxies."""
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, SubclassProxy):
            yield from inner[leaf.name]
        else:
            yield leaf


def _lower_computation(trace: TraceCtx, inner: Inner, leaves: list[BoundSymbol], joint: Joint | None, executor: Any) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = []
    given = [p for bsym in leaves for p in bsym.output]
    for bsym in trace.bound_symbols:
        if bsym.sym.id == LEAF.id:
            continue
        if bsym.sym.id == FLATTEN.id:
            inner[bsym.args[0].name] = tuple(bsym.output)
        elif bsym.sym.id == UNFLATTEN.id:
            inner[bsym.output.name] = tuple(bsym.args)
        elif bsym.sym.id == REBIND.id:
            inner[bsym.args[0].name] = tuple(bsym.args[1:])
        elif bsym.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and isinstance(bsym.output, SubclassProxy):
            continue
        elif bsym.sym.id == prims.PrimIDs.RETURN:
            (returned,) = bsym.args
            carriers = () if joint is None else joint.anchor_sources(trace.args, new)
            arguments = tuple(_unique(_flat((*trace.args, *given, *carriers), inner)))
            # one tensor in two wrappers is returned once: autograd would keep the derivatives of its last place only
            outputs = tuple(_unique(_flat(returned["output"], inner)))
            if joint is not None:
                outputs = joint.write(new, executor, returned["output"], outputs, inner, arguments)
            lowered = {**returned, "output": outputs, "flat_args": list(arguments)}
            new.bound_symbols.append(bsym.from_bsym(args=(lowered,)))
        else:
            _refuse_wrapper(bsym)
            new.bound_symbols.append(bsym)
    new.args = arguments
    _bind_arguments(new, "computation", [p for p in new.args if all(p is not q for q in trace.args)])
    new.set_provenance(TraceProvenance("Interpretation of wrapper subclasses"))
    return new


def _unique(proxies: Iterator[Any]) -> list[Any]:
    return list({variableify(p): p for p in proxies}.values())


def _refuse_wrapper(bsym: BoundSymbol) -> None:
    if any(isinstance(p, SubclassProxy) for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)):
        line = bsym.source_positions.lineno if bsym.source_positions is not None else "?"
        raise UnsupportedOpError(
            with_details(f"{bsym.sym.name} with a wrapper subclass is not supported", at=f"{bsym.source_filename}:{line}")
        )


def declare_arguments(trace: TraceCtx, name: str) -> None:
    """Make `trace.args` the signature of the function a trace prints."""
    info = SigInfo(name)
    info.args = [(p.name, None) for p in trace.args]
    trace._siginfo = info


def _bind_arguments(trace: TraceCtx, name: str, added: list[Proxy]) -> None:
    """Declare `trace.args` in the signature, and unpack those that are new."""
    declare_arguments(trace, name)
    with tracectx(trace):
        unpacks = [prims.unpack_trivial.bind(p, output=p, name=p.name) for p in added]
    trace.bound_symbols[:0] = unpacks


def _lower_prologue(
    acquisition: Acquisition,
    trace: TraceCtx,
    inner: Inner,
    leaves: list[BoundSymbol],
    computation: TraceCtx,
    joint: Joint | None,
) -> TraceCtx:
    specs = {p.name: acquisition.spec_of(p) for p in _wrappers_in(trace) if p.name in inner}
    new = from_trace(trace)
    new.bound_symbols = []
    checked: list[TensorProxy] = []
    for p in itertools.chain.from_iterable(inner.get(name, ()) for name in specs):
        new.add_name(p.name) if not new.has_name(p.name) else None
    for bsym in trace.bound_symbols:
        if bsym.sym.id == prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA:
            (tensor, *_) = bsym.args
            if isinstance(tensor, SubclassProxy):
                continue
            checked.append(tensor)
        elif bsym.sym.id == prims.PrimIDs.RETURN:
            (to_computation, to_epilogue) = bsym.args[0]
            if leaves:
                _fetch(acquisition, new, leaves)
            with tracectx(new):
                opening = None if joint is None else joint.opening({id(p.fake): p for p in _wrappers_in(trace)})
                if opening is not None:
                    function, inputs, carriers = opening
                    bind = _bindable(f"gradient_carriers_{next(_counter)}", function)
                    new.bound_symbols.append(bind(*inputs, output=carriers))
                new.bound_symbols.extend(bsym for bsym in acquisition.guards())
                if checked:
                    new.bound_symbols.append(_check_plain.bind(*checked, output=None))
            bsym = bsym.from_bsym(args=((tuple(computation.args), to_epilogue),))
        new.bound_symbols.append(bsym)
        if isinstance(bsym.output, SubclassProxy) and bsym.output.name in inner and bsym.output.name in specs:
            spec = specs.pop(bsym.output.name)
            fakes = spec.leaves(bsym.output.fake)
            # autograd stops at a wrapper that requires grad itself
            is_source = id(bsym.output.fake) in acquisition.sources
            is_detached = tuple(is_source and acquisition.inner_fakes.get(id(t), False) for t in fakes)
            checked.extend(_open(new, spec, bsym.output, inner[bsym.output.name], is_detached))
    new.set_provenance(TraceProvenance("Interpretation of wrapper subclasses"))
    return new


def _wrappers_in(trace: TraceCtx) -> Iterator[SubclassProxy]:
    for bsym in trace.bound_symbols:
        if isinstance(bsym.output, SubclassProxy):
            yield bsym.output


def _open(
    trace: TraceCtx,
    spec: WrapperSpec,
    wrapper: SubclassProxy,
    leaves: tuple[TensorProxy, ...],
    is_detached: tuple[bool, ...],
) -> tuple[TensorProxy, ...]:
    """Guard, unpack and check one wrapper in the prologue; returns the inner proxies."""
    with tracectx(trace):
        trace.bound_symbols.append(_flatten_operator(spec, is_detached)(wrapper, output=leaves))
        _check_metadata(leaves)
    return leaves


def _fetch(acquisition: Acquisition, trace: TraceCtx, leaves: Sequence[BoundSymbol]) -> None:
    """Take the scalars given for parameters in the prologue, all at once, if what was given is still of the same kinds."""
    given = acquisition.leaves
    names = [leaf.args[0] for leaf in leaves]
    outputs = tuple(p for leaf in leaves for p in leaf.output)
    positions = [i + j * len(leaves) for i, leaf in enumerate(leaves) for j in range(len(leaf.output))]
    expected = given.sizes(names).signature

    def fetch() -> tuple[torch.Tensor, ...]:
        sizes = given.sizes(names)
        if sizes.signature != expected or not sizes.are_scalars():
            raise GuardError("a norm given for a parameter is of another kind now")
        found = [*sizes.norm_sizes, *sizes.perturbation_sizes]
        return tuple([found[i] for i in positions])

    for p in outputs:
        trace.add_name(p.name)
    with tracectx(trace):
        trace.bound_symbols.append(_bindable(f"parameter_norms_{next(_counter)}", fetch)(output=outputs))


def _check_metadata(proxies: Iterable[TensorProxy]) -> None:
    for p in proxies:
        prims.check_tensor_shape_and_metadata(p, tuple(p.shape), p.device.device_str(), to_torch_dtype(p.dtype), p.requires_grad)


def computing_only(trace: TraceCtx, outputs: Sequence[TensorProxy]) -> TraceCtx:
    """The computation of some of its outputs alone; its arguments are those they need."""
    *body, returned = trace.bound_symbols
    body = keep_only([b for b in body if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL], {p.name for p in outputs})
    made = {p.name for b in body for p in b.flat_proxy_outs}
    used = {p.name for b in body for p in b.flat_proxy_args} | {p.name for p in outputs} - made
    arguments = tuple({p.name: p for p in trace.args if p.name in used}.values())
    new = from_trace(trace)
    unpacks = [b for b in trace.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and b.output.name in used]
    kept = {**returned.args[0], "output": tuple(outputs), "flat_args": list(arguments)}
    new.bound_symbols = [*unpacks, *body, returned.from_bsym(args=(kept,))]
    new.args = arguments
    declare_arguments(new, "computation")
    new.set_provenance(TraceProvenance("Norms only"))
    return new


def pass_through_epilogue(
    traces: Traces,
    outputs: tuple[TensorProxy, ...],
    given: Sequence[Any],
    name: str,
    function: Callable[..., tuple[torch.Tensor, ...]],
) -> Traces:
    """Replace, in the epilogue, the computed `outputs` by ``function(*outputs, *given)``.

    `given` are inputs of the computation; they become further arguments of the epilogue.
    """
    prologue, computation, epilogue = traces
    new_prologue = from_trace(prologue)
    (to_computation, to_epilogue) = prologue.bound_symbols[-1].args[0]
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *given)),))
    new_prologue.bound_symbols = [*prologue.bound_symbols[:-1], returned]

    new = from_trace(epilogue)
    swaps, inputs = {}, []
    with tracectx(new):
        for p in given:
            inputs.append(TensorProxy(like=p) if isinstance(p, TensorProxy) else p)
        passed = tuple(TensorProxy(like=p) for p in outputs)
    swaps = {variableify(p): q for p, q in zip(outputs, passed, strict=True)}
    unpacks = [b for b in epilogue.bound_symbols if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    call = _bindable(f"{name}_{next(_counter)}", function)(*outputs, *inputs, output=passed)
    new.bound_symbols = [*unpacks, call, *rest]
    # the epilogue takes what the prologue sends it first, then what the computation returns
    new.args = (*epilogue.args[: len(to_epilogue)], *inputs, *epilogue.args[len(to_epilogue) :])
    _bind_arguments(new, "epilogue", inputs)
    return new_prologue, computation, new


def guard(name: str, check: Callable[[], bool]) -> BoundSymbol:
    """A prologue guard that does not depend on the inputs: raises when `check` is false."""

    def run() -> None:
        if not check():
            raise GuardError(name)

    return _bindable(name, run)(output=None)


def _lower_epilogue(trace: TraceCtx, inner: Inner, num_computed: int, joint: Joint | None) -> TraceCtx:
    """Take inner tensors, each once, and wrap them; the last `num_computed` arguments are what the computation returned.

    The carriers of the results' gradients come after these.
    """
    wrappers = [p for p in trace.args if isinstance(p, SubclassProxy) and p.name in inner]
    if not wrappers and (joint is None or not joint.result_carriers()):
        return trace
    new = from_trace(trace)
    arguments: list[Any] = []
    bodies: list[tuple[SubclassProxy, list[TensorProxy]]] = []
    first = len(trace.args) - num_computed
    plain = {p.name: p for p in trace.args[first:] if not any(p is w for w in wrappers)}
    computed: dict[str, Any] = {}
    for i, p in enumerate(trace.args):
        is_wrapper = any(p is w for w in wrappers)
        leaves = []
        for q in inner[p.name] if is_wrapper else (p,):
            leaf = computed.get(q.name) if i >= first else None
            if leaf is None:
                leaf = _renamed(q, new) if is_wrapper and (i < first or q.name not in plain) else plain.get(q.name, q)
                arguments.append(leaf)
                computed |= {q.name: leaf} if i >= first else {}
            leaves.append(leaf)
        if is_wrapper:
            bodies.append((p, leaves))
    carriers = {} if joint is None else {id(fake): [_renamed(q, new) for q in found] for fake, found in joint.result_carriers()}
    arguments.extend(itertools.chain.from_iterable(carriers.values()))
    body = [_unflatten_operator(p.fake, joint)(*leaves, *carriers.get(id(p.fake), ()), output=p) for p, leaves in bodies]
    new.args = tuple(arguments)
    kept = [
        b for b in trace.bound_symbols if not (b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and any(b.output is w for w in wrappers))
    ]
    unpacks = [b for b in kept if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b for b in kept if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    new.bound_symbols = [*unpacks, *body, *rest]
    _bind_arguments(new, "epilogue", [a for a in arguments if all(a is not q for q in trace.args)])
    new.set_provenance(TraceProvenance("Interpretation of wrapper subclasses"))
    return new


def _with_structs(trace: TraceCtx) -> TraceCtx:
    """The epilogue with ``torch.return_types`` made by operators: Thunder prints them in a form that does not run."""
    returned = trace.bound_symbols[-1]
    makers: list[BoundSymbol] = []

    def convert(value: Any) -> Any:
        if type(value).__module__ == "torch.return_types":
            made = AnyProxy(value)
            cls = type(value)
            make = _bindable(f"{cls.__name__}_{next(_counter)}", lambda *values: cls(values))
            makers.append(make(*(convert(v) for v in value), output=made))
            return made
        if type(value) in (list, tuple):
            return type(value)(convert(v) for v in value)
        return {k: convert(v) for k, v in value.items()} if type(value) is dict else value

    with tracectx(trace):
        converted = tuple(convert(a) for a in returned.args)
    if not makers:
        return trace
    new = from_trace(trace)
    new.bound_symbols = [*trace.bound_symbols[:-1], *makers, returned.from_bsym(args=converted)]
    return new


def _renamed(p: TensorProxy, trace: TraceCtx) -> TensorProxy:
    """`p`, or a copy under a new name if the epilogue already takes one of that name from the prologue."""
    if not trace.has_name(p.name):
        trace.add_name(p.name)
        return p
    with tracectx(trace):
        return TensorProxy(like=p)
