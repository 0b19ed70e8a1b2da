"""The boundary of the computation: plain tensors inside, wrappers outside.

`lower` rewrites the three traces of an acquisition.  The prologue checks each wrapper input and takes its inner tensors out,
the computation takes and returns plain tensors only, and the epilogue, which runs after Thunder has connected the outputs to
torch.autograd, wraps them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring.acquisition import Acquisition, LeafOrigin, WrapperOrigin
from thunder_norm.subclass.acquiring.integer_values import GIVEN_AGAIN
from thunder_norm.subclass.acquiring.lengths import Lengths
from thunder_norm.subclass.backward.differentiation import Joint
from thunder_norm.subclass.backward.followed import starts_in_program
from thunder_norm.subclass.backward.made_leaves import empty_leaf
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing.boundary_operators import check_plain, flatten_operator, unflatten_operator
from thunder_norm.subclass.crossing.boundary_passes import Traces, bind_arguments, results_and_received
from thunder_norm.subclass.crossing.names import with_readable_names
from thunder_norm.subclass.crossing.other_objects import Objects, another
from thunder_norm.subclass.crossing.write_back import Given, Written, write_back, written_inputs
from thunder_norm.subclass.interpreting.opaque_objects import OpaqueProxy
from thunder_norm.subclass.interpreting.opaque_traces import guard_input
from thunder_norm.subclass.recording.trace import FLATTEN, LEAF, REBIND, UNFLATTEN
from thunder_norm.tracing.guarding.bindable import bindable
from thunder_norm.tracing.torch_functions.named_results import made_by_operators
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

Inner = dict[str, tuple[TensorProxy, ...]]


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
    written = written_inputs(acquisition, computation, _opened(computation))
    if not acquisition.has_wrappers and not written and not _takes_twice(epilogue):
        # only the prologue changes: it must also find that there are none
        epilogue = None if epilogue is None else made_by_operators(epilogue)
        computation = _without_marks(computation)
        return _lower_prologue(acquisition, prologue, inner, [], computation, None), computation, epilogue
    epilogue = None if epilogue is None else _as_returned(computation, epilogue)
    computation, epilogue = with_readable_names(acquisition, computation, epilogue)
    leaves = [bsym for bsym in computation.bound_symbols if bsym.sym.id == LEAF.id]
    _note_origins(acquisition, computation, leaves)
    written = written_inputs(acquisition, computation, _opened(computation))
    values = [w.value for w in written]
    new_computation = _lower_computation(computation, inner, leaves, joint, executor, written)
    new_prologue = _lower_prologue(acquisition, prologue, _opened(computation), leaves, new_computation, joint)
    num_computed = len(computation.bound_symbols[-1].args[0]["output"])
    new_epilogue = (
        None
        if epilogue is None
        else made_by_operators(_lower_epilogue(acquisition, epilogue, inner, num_computed, joint, values, new_computation))
    )
    lowered = new_prologue, new_computation, new_epilogue
    return write_back(acquisition, lowered, written, _given(acquisition, computation), joint) if written else lowered


def _without_marks(trace: TraceCtx) -> TraceCtx:
    if all(b.sym.id != GIVEN_AGAIN.id for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = [b for b in trace.bound_symbols if b.sym.id != GIVEN_AGAIN.id]
    return new


def _takes_twice(epilogue: TraceCtx | None) -> bool:
    """Whether a result is one tensor with another: what an operation wrote into, which it returned."""
    return epilogue is not None and len({p.name for p in epilogue.args}) < len(epilogue.args)


def _as_returned(computation: TraceCtx, epilogue: TraceCtx) -> TraceCtx:
    """The epilogue with what it takes from the computation called as there: Thunder names anew what was changed in place."""
    pairs = results_and_received(computation, epilogue)
    swaps = {variableify(q): p for p, q in pairs if isinstance(p, Proxy) and p.name != q.name}
    if not swaps:
        return epilogue
    new = from_trace(epilogue)
    new.args = tuple(swaps.get(variableify(q), q) for q in epilogue.args)
    new.bound_symbols = [b.from_bsym_swap_proxies(swaps) for b in epilogue.bound_symbols]
    for p in swaps.values():
        if not new.has_name(p.name):
            new.add_name(p.name)
    return new


def _opened(trace: TraceCtx) -> Inner:
    """The inner tensors of input wrappers, as the program gets them."""
    return {b.args[0].name: tuple(b.output) for b in trace.bound_symbols if b.sym.id == FLATTEN.id}


def _given(acquisition: Acquisition, trace: TraceCtx) -> Given:
    """What the program is given in the call at hand, inner tensors of wrappers too."""
    found = {p.name: acquisition.fakes.real_input(p) for p in trace.args if isinstance(p, TensorProxy)}
    found = {name: t for name, t in found.items() if t is not None and not is_wrapper(t)}
    wrappers: dict[str, SubclassProxy] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym.id == FLATTEN.id:
            real = acquisition.fakes.real_input(bsym.args[0])
            names = [p.name for p in bsym.output]
            found |= zip(names, WrapperSpec.of(real).leaves(real), strict=True)
            wrappers |= dict.fromkeys(names, bsym.args[0])
    return Given(found, wrappers)


def _note_origins(acquisition: Acquisition, trace: TraceCtx, leaves: list[BoundSymbol]) -> None:
    for bsym in leaves:
        for index, p in enumerate(bsym.output):
            acquisition.origins[p.name] = LeafOrigin(bsym.args[0], index)
    for bsym in trace.bound_symbols:
        if bsym.sym.id == FLATTEN.id:
            (wrapper,) = bsym.args
            for p, name in zip(bsym.output, acquisition.wrappers.spec_of(wrapper).leaf_names(), strict=True):
                acquisition.origins[p.name] = WrapperOrigin(acquisition.fakes.real_input(wrapper), name)


def _flat(tree: Any, inner: Inner) -> Iterator[Any]:
    """The leaves of a tree with wrappers replaced by their inner proxies."""
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, SubclassProxy):
            yield from inner[leaf.name]
        else:
            yield leaf


def _lower_computation(
    trace: TraceCtx, inner: Inner, leaves: list[BoundSymbol], joint: Joint | None, executor: Any, written: list[Written]
) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = []
    given = [p for bsym in leaves for p in bsym.output]
    opened = _opened(trace)
    for bsym in trace.bound_symbols:
        if bsym.sym.id in (LEAF.id, GIVEN_AGAIN.id):
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
            carriers = () if joint is None else joint.anchor_sources(list(_flat(trace.args, opened)), new)
            arguments = tuple(_unique(_flat((*trace.args, *given, *carriers), inner | opened)))
            # one tensor in two wrappers is returned once: autograd would keep the derivatives of its last place only
            outputs = tuple(_unique(itertools.chain(_flat(returned["output"], inner), (w.value for w in written))))
            if joint is not None:
                outputs = joint.write(
                    new,
                    executor,
                    returned["output"],
                    outputs,
                    inner,
                    arguments,
                    [w.value for w in written],
                    [w.target for w in written],
                )
            # what an argument became in place is returned in its stead: otherwise Thunder moves the change into the backward
            became = {
                p.name: q for p, q in zip(trace.args, returned["flat_args"], strict=True) if not isinstance(p, SubclassProxy)
            }
            lowered = {**returned, "output": outputs, "flat_args": [became.get(p.name, p) for p in arguments]}
            new.bound_symbols.append(bsym.from_bsym(args=(lowered,)))
        else:
            _refuse_wrapper(bsym)
            new.bound_symbols.append(bsym)
    new.args = arguments
    bind_arguments(new, "computation", [p for p in new.args if all(p is not q for q in trace.args)])
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


def _lower_prologue(
    acquisition: Acquisition,
    trace: TraceCtx,
    inner: Inner,
    leaves: list[BoundSymbol],
    computation: TraceCtx,
    joint: Joint | None,
) -> TraceCtx:
    specs = {p.name: acquisition.wrappers.spec_of(p) for p in _wrappers_in(trace) if p.name in inner}
    new = from_trace(trace)
    new.bound_symbols = []
    checked: list[TensorProxy] = []
    objects: list[OpaqueProxy] = []
    for p in itertools.chain.from_iterable(inner.get(name, ()) for name in specs):
        new.add_name(p.name) if not new.has_name(p.name) else None
    for bsym in trace.bound_symbols:
        if bsym.sym.id == prims.PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA:
            (tensor, *_) = bsym.args
            if isinstance(tensor, SubclassProxy):
                continue
            (objects if isinstance(tensor, OpaqueProxy) else checked).append(tensor)
        elif bsym.sym.id == prims.PrimIDs.RETURN:
            (to_computation, to_epilogue) = bsym.args[0]
            if leaves:
                _fetch(acquisition, new, leaves)
            with tracectx(new):
                made = _made_leaves(acquisition, new, joint)
                opening = None if joint is None else joint.opening({id(p.fake): p for p in (*_wrappers_in(trace), *made)})
                if opening is not None:
                    function, inputs, carriers = opening
                    bind = bindable("gradient_carriers", function)
                    new.bound_symbols.append(bind(*inputs, output=carriers))
                new.bound_symbols.extend(acquisition.lengths.guards())
                new.bound_symbols.extend(acquisition.guards(list(_wrappers_in(trace))))
                new.bound_symbols.extend(guard_input(acquisition, p, checked) for p in objects)
                if checked:
                    new.bound_symbols.append(check_plain.bind(*checked, output=None))
            bsym = bsym.from_bsym(args=((tuple(computation.args), to_epilogue),))
        new.bound_symbols.append(bsym)
        if isinstance(bsym.output, SubclassProxy) and bsym.output.name in inner and bsym.output.name in specs:
            spec = specs.pop(bsym.output.name)
            checked.extend(_open(new, spec, bsym.output, inner[bsym.output.name], acquisition.lengths))
    new.set_provenance(TraceProvenance("Interpretation of wrapper subclasses"))
    return new


def _made_leaves(acquisition: Acquisition, trace: TraceCtx, joint: Joint | None) -> list[SubclassProxy]:
    """Make the leaves whose gradients the program has, without their values; the open trace is the prologue."""
    made = [SubclassProxy(leaf, acquisition) for leaf in (() if joint is None else joint.made_leaves)]
    trace.bound_symbols.extend(bindable(f"empty_{type(p.fake).__name__}", empty_leaf(p.fake))(output=p) for p in made)
    return made


def _wrappers_in(trace: TraceCtx) -> Iterator[SubclassProxy]:
    for bsym in trace.bound_symbols:
        if isinstance(bsym.output, SubclassProxy):
            yield bsym.output


def _open(
    trace: TraceCtx,
    spec: WrapperSpec,
    wrapper: SubclassProxy,
    leaves: tuple[TensorProxy, ...],
    lengths: Lengths,
) -> tuple[TensorProxy, ...]:
    """Guard, unpack and check one wrapper in the prologue, but for lengths that `lengths` checks; returns the inner proxies."""
    with tracectx(trace):
        trace.bound_symbols.append(flatten_operator(spec)(wrapper, output=leaves))
        fakes = spec.leaves(wrapper.fake)
        _check_metadata(p for p, fake in zip(leaves, fakes, strict=True) if not lengths.checks(fake))
        for p, fake in zip(leaves, fakes, strict=True):
            lengths.note_proxy(fake, p)
    return leaves


def _fetch(acquisition: Acquisition, trace: TraceCtx, leaves: Sequence[BoundSymbol]) -> None:
    """Take the inputs that are no arguments in the prologue, all at once."""
    outputs = tuple(p for leaf in leaves for p in leaf.output)
    positions = [i + j * len(leaves) for i, leaf in enumerate(leaves) for j in range(len(leaf.output))]
    taken = acquisition.fetching([leaf.args[0] for leaf in leaves])

    def fetch() -> tuple[torch.Tensor, ...]:
        found = taken()
        return tuple([found[i] for i in positions])

    for p in outputs:
        trace.add_name(p.name)
    with tracectx(trace):
        trace.bound_symbols.append(bindable("parameter_norms", fetch)(output=outputs))


def _check_metadata(proxies: Iterable[TensorProxy]) -> None:
    for p in proxies:
        prims.check_tensor_shape_and_metadata(p, tuple(p.shape), p.device.device_str(), to_torch_dtype(p.dtype), p.requires_grad)


def _lower_epilogue(
    acquisition: Acquisition,
    trace: TraceCtx,
    inner: Inner,
    num_computed: int,
    joint: Joint | None,
    written: list[TensorProxy],
    computation: TraceCtx,
) -> TraceCtx:
    """Take inner tensors, each once, and wrap them; the last `num_computed` arguments are what the computation returned.

    What is written into inputs and the carriers of the results' gradients come after these.
    """
    wrappers = [p for p in trace.args if isinstance(p, SubclassProxy) and p.name in inner]
    is_unique = len({p.name for p in trace.args}) == len(trace.args)
    new = from_trace(trace)
    arguments: list[Any] = []
    bodies: list[tuple[SubclassProxy, list[TensorProxy]]] = []
    first = len(trace.args) - num_computed
    plain = {p.name: p for p in trace.args[first:] if not any(p is w for w in wrappers)}
    computed: dict[str, Any] = {}
    fakes = acquisition.fakes.by_name()
    given = ((p, fakes[p.name]) for p in computation.args if isinstance(p, TensorProxy) and p.name in fakes)
    objects, others, renewed = Objects(computation, given), [], {}
    for i, p in enumerate(trace.args):
        is_wrapper = any(p is w for w in wrappers)
        leaves = []
        own = WrapperSpec.of(p.fake).leaves(p.fake) if is_wrapper else [fakes.get(getattr(p, "name", None))]
        for q, fake in zip(inner[p.name] if is_wrapper else (p,), own, strict=True):
            leaf = computed.get(q.name) if i >= first else None
            if leaf is None:
                leaf = _renamed(q, new) if is_wrapper and (i < first or q.name not in plain) else plain.get(q.name, q)
                arguments.append(leaf)
                computed |= {q.name: leaf} if i >= first else {}
            if i >= first and isinstance(q, TensorProxy) and objects.is_another(q, fake):
                with tracectx(new):
                    others.append(another(leaf, fake, TensorProxy(like=leaf)))
                leaf = others[-1].output
            leaves.append(leaf)
        if is_wrapper:
            bodies.append((p, leaves))
        elif leaves[0].name != p.name:
            renewed[variableify(p)] = leaves[0]
    if is_unique and not (wrappers or written or others) and (joint is None or not joint.result_carriers()):
        return trace
    arguments.extend(_renamed(q, new) for q in written if q.name not in computed)
    carriers = {} if joint is None else {id(fake): [_renamed(q, new) for q in found] for fake, found in joint.result_carriers()}
    arguments.extend(itertools.chain.from_iterable(carriers.values()))
    arguments.extend(_renamed(q, new) for q in (() if joint is None else joint.kept))
    starting = [starts_in_program(acquisition, p.fake, joint is not None) for p, _ in bodies]
    body = [
        unflatten_operator(p.fake, joint, starts_in_program=starts)(*leaves, *carriers.get(id(p.fake), ()), output=p)
        for (p, leaves), starts in zip(bodies, starting, strict=True)
    ]
    new.args = tuple(arguments)
    kept = [
        b for b in trace.bound_symbols if not (b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL and any(b.output is w for w in wrappers))
    ]
    unpacks = [b for b in kept if b.sym.id == prims.PrimIDs.UNPACK_TRIVIAL]
    rest = [b.from_bsym_swap_proxies(renewed) for b in kept if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    new.bound_symbols = [*unpacks, *others, *body, *rest]
    bind_arguments(new, "epilogue", [a for a in arguments if all(a is not q for q in trace.args)])
    new.set_provenance(TraceProvenance("Interpretation of wrapper subclasses"))
    return new


def _renamed(p: TensorProxy, trace: TraceCtx) -> TensorProxy:
    """`p`, or a copy under a new name if the epilogue already takes one of that name from the prologue."""
    if not trace.has_name(p.name):
        trace.add_name(p.name)
        return p
    with tracectx(trace):
        return TensorProxy(like=p)
