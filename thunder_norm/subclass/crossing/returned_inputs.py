"""Wrappers that a program is given and hands back: they come out as the very objects, as in eager mode, not as others around their tensors.

So do leaves that were made before it, and are filled with what the program makes.
"""

from __future__ import annotations

from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.backward.made_leaves import filled
from thunder_norm.subclass.classes.proxy import SubclassProxy
from thunder_norm.subclass.crossing.boundary_passes import Traces, bind_arguments
from thunder_norm.subclass.crossing.recorded_writes import handing_on, recorded_inputs
from thunder_norm.tracing.guarding.bindable import bindable
from thunder.core import prims
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.trace import from_trace, tracectx


def returning_inputs(acquisition: Acquisition, traces: Traces) -> Traces:
    """Have the prologue send the wrappers that are handed back to the epilogue, in place of making others there.

    What the program wrote into them in place is copied there, so that they have it by then; those made are there for its history.
    """
    prologue, computation, epilogue = traces
    if epilogue is None:
        return traces
    given = {id(b.output.fake): b.output for b in prologue.bound_symbols if isinstance(b.output, SubclassProxy)}
    made = [b for b in epilogue.bound_symbols if isinstance(b.output, SubclassProxy) and id(b.output.fake) in given]
    made = [b for b in made if b.sym.id != prims.PrimIDs.UNPACK_TRIVIAL]
    if not made:
        return traces
    inputs = [given[id(b.output.fake)] for b in made]
    to_computation, to_epilogue = prologue.bound_symbols[-1].args[0]
    new_prologue = from_trace(prologue)
    returned = prologue.bound_symbols[-1].from_bsym(args=((to_computation, (*to_epilogue, *inputs)),))
    new_prologue.bound_symbols = [*prologue.bound_symbols[:-1], returned]
    new = from_trace(epilogue)
    recorded = {id(p.fake) for p in recorded_inputs(acquisition)} if acquisition.autograd.is_running else set()
    own = {id(b.output.fake) for b in made if not acquisition.is_input(b.output.fake)}
    with tracectx(new):
        received = [TensorProxy(like=p) for p in inputs]
        renewed = [TensorProxy(like=p) if id(b.output.fake) in recorded | own else p for b, p in zip(made, received, strict=True)]
    swaps = {variableify(b.output): p for b, p in zip(made, renewed, strict=True)}
    for bsym in epilogue.bound_symbols:
        i = next((i for i, m in enumerate(made) if m is bsym), None)
        if i is None:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(swaps))
        elif id(bsym.output.fake) in own:
            new.bound_symbols += [bsym, bindable("filled", filled)(received[i], bsym.output, output=renewed[i])]
        elif renewed[i] is not received[i]:
            new.bound_symbols += [bsym, handing_on(bsym, received[i], renewed[i])]
    new.args = (*epilogue.args[: len(to_epilogue)], *received, *epilogue.args[len(to_epilogue) :])
    bind_arguments(new, "epilogue", received)
    return new_prologue, computation, new
