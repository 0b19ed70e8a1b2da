"""torch.autograd.Function in traces: torch runs it on fakes, and what it did becomes one operation with a rule of its own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.errors import UnsupportedOpError, UnsupportedSubclassError, with_details
from thunder_norm.functions import classed_fakes, functions_in_backward, missing_cotangents
from thunder_norm.functions.functions_in_backward import RanFunction, check_plain, like
from thunder_norm.functions.interpreted import active_level
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.data_sizes import UnknownValueError
from thunder_norm.subclass.backward import side_effects
from thunder_norm.subclass.backward.refused_backward import Refuse, untraceable_backward
from thunder_norm.subclass.interpreting.held_tensors import held_by
from thunder_norm.subclass.interpreting.interception import current_acquisition
from thunder_norm.subclass.interpreting.operations import AUTOGRAD_APPLY, on_proxies
from thunder_norm.subclass.recording.record import Recorded, Recorder, recording
from thunder_norm.tracing import lookasides
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.torch_functions import known_classes
from thunder_norm.tracing.torch_functions.data_dependence import data_dependent
from thunder_norm.trees import flat_tensors
import thunder.torch as ltorch
from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    wrap_const,
)
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.proxies import NumberProxy, TensorProxy


def _values(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, dict) else held


def _has_no_tensor(given: Any) -> bool:
    """Whether it is a container that the function is given as it is: it may put something in."""
    return isinstance(given, list | dict) and not any(isinstance(v, TensorProxy) for v in tree_flatten(given)[0])


def _exchanged(held: Any, for_others: dict[int, torch.Tensor]) -> Any:
    """What a place holds, with other tensors for some, by their identity."""
    if isinstance(held, dict):
        return {k: for_others.get(id(v), v) for k, v in held.items()}
    return type(held)(for_others.get(id(v), v) for v in held)


@lookasides.instead_of(AUTOGRAD_APPLY)
def _apply(cls: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """Called for ``cls.apply(*args)``."""
    if (error := _refused_class(cls.value, [a.value for a in (*args, *kwargs.values())])) is not None:
        return do_raise(error)
    with_modules = [a for a in args if any(isinstance(m, torch.nn.Module) for m in _each(a.value))]
    held = _interpret_call(_parameters, *with_modules) if with_modules else wrap_const([])
    if held is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        return held
    return on_proxies(lambda held, *args, **kwargs: FunctionCall(cls.value, args, kwargs, held).write())(held, *args, **kwargs)


def _refused_class(cls: type, given: Sequence[Any]) -> UnsupportedSubclassError | None:
    """The error for a function that is given tensors of classes that it, or they, ask for more than torch knows of fakes."""
    given = tree_flatten(given)[0] if _asks_classes() else []
    classes = [known_classes.class_of(p) for p in given if type(p) is TensorProxy]
    own = [c for c in classes if not classed_fakes.leaves_to_torch(c)]
    tensors = [p for p in given if type(p) is TensorProxy] if own else []
    of = next((c for p in tensors if (c := known_classes.class_of(p)) in own and classed_fakes.has_attributes(p)), None)
    why = "torch runs it on tensors without values, of which the class, with a __torch_function__ of its own, may read attributes"
    asking = (cls.forward, cls.backward, cls.setup_context, *(c.__torch_function__ for c in own))
    if of is None and any(map(classed_fakes.looks_at_types, asking)):
        of = next((c for c in classes if c is not torch.Tensor), None)
        why = "torch runs it on tensors without values, whose type is asked for"
    if of is None:
        return None
    return UnsupportedSubclassError(
        with_details(
            f"{cls.__name__}, a torch.autograd.Function, is given a tensor of class {of.__name__}",
            at=location_of_user(),
            why=why,
            instead=f"{cls.__name__}.apply(x.as_subclass(torch.Tensor)).as_subclass({of.__name__})",
        )
    )


def _asks_classes() -> bool:
    return known_classes.are_met() and not known_classes.say_nothing()


def _each(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else (given,)


def _parameters(*given: Any) -> list[torch.nn.Parameter]:
    """The parameters of modules, interpreted."""
    modules = [m for g in given for m in _each(g) if isinstance(m, torch.nn.Module)]
    return [p for m in modules for p in m.parameters() if p.requires_grad]


class FunctionCall(RanFunction):
    """One call of a ``torch.autograd.Function``: torch runs it, on fakes, and what its forward and backward did is written into the trace.

    So everything that a function may do with its ``ctx`` means what it means in torch: ``setup_context``, ``needs_input_grad``,
    ``mark_non_differentiable``, ``set_materialize_grads``, attributes, several results, arguments that are no tensors.  What is
    written is an operation with a rule of its own, so the function's backward holds under every transform.

    Args:
        cls: the function's class.
        args, kwargs: what ``apply`` is called with, with proxies for tensors.
        held: the proxies of parameters of modules among these, to which the backward may add gradients itself, as those of reversible
            networks do by ``torch.autograd.backward``.
    """

    def __init__(self, cls: type[torch.autograd.Function], args: tuple, kwargs: dict, held: Sequence[TensorProxy] = ()):
        self.cls = cls
        self.leaves, self.spec = tree_flatten((args, kwargs), is_leaf=_has_no_tensor)
        given = {v.name: v for v in self.leaves if isinstance(v, TensorProxy)}
        self.inside = held_by(cls, (args, kwargs))
        inside = [p for p in (() if self.inside is None else self.inside.proxies) if isinstance(p, TensorProxy)]
        self.proxies = list({**given, **{v.name: v for v in (*held, *inside)}}.values())
        self.num_given = len(given)
        self.acquisition = Acquisition()  # of the fakes of this call alone
        self.acquisition.num_levels = 1  # what has effects, or changes what the program holds, is no part of one operation
        self.acquisition.asks = self._ask
        self.classes = [c for p in self.proxies if not classed_fakes.leaves_to_torch(c := known_classes.class_of(p))]
        side_effects.note_read(cls, *self.classes, *[v for v in self.leaves if not isinstance(v, TensorProxy)])
        self.fakes = {p.name: self._fake(p) for p in self.proxies}
        for p in inside:
            if p.name not in given:  # torch knows of no gradient to it
                self.fakes[p.name].requires_grad_(False)
        self.inputs = [self.fakes[p.name] for p in self.proxies]
        self.backward: list[Recorded] = []
        self.gradients: list[torch.Tensor | None] = [None] * len(self.inputs)
        with self._standing_in(), recording(self.acquisition) as recorder, torch.set_grad_enabled(is_grad_enabled()):
            with (
                self._watched(is_backward=False),
                classed_fakes.followed(_asks_classes()),
                missing_cotangents.noting() as are_made,
            ):
                self.result = self._run()
            self.forward, recorder.log = recorder.log, []
            self.outputs = list({id(t): t for t in flat_tensors(self.result)}.values())
            self._check_unchanged()
            classed_fakes.check_without_attributes(cls, self.outputs)
            with self.acquisition.fakes.mode, recorder.paused(), torch.no_grad():
                self.cotangents = [like(t) for t in self.outputs]
            try:
                with (
                    self._watched(is_backward=True),
                    functions_in_backward.recorded(recorder),
                    classed_fakes.followed(bool(self.classes)),
                ):
                    self._go_backward(recorder, False in are_made)
                self.backward = recorder.log
            except Exception as e:  # noqa: BLE001 - the forward is right whatever the backward says
                self._refuse_backward(untraceable_backward(cls.__name__, None, e))
        self._leave_out_unused()

    def _fake(self, p: TensorProxy) -> torch.Tensor:
        fake = self.acquisition.fake_of(p)
        if known_classes.are_met():
            classed_fakes.be_of(fake, known_classes.class_of(p))
        # of an input of the program it is known whether it requires grad, of all else it is not
        may_require = active_level() is not None or p.history is None or p.requires_grad
        is_differentiable = fake.is_floating_point() or fake.is_complex()
        return fake.requires_grad_(is_grad_enabled() and may_require and is_differentiable)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Have what the function can reach hold the fakes of its arguments where it holds these: a module beside its parameters.

        The backward may ask for a gradient to the argument, of what the module computes.
        """
        program = current_acquisition()
        reals = {} if program is None else {id(program.fakes.real_input(p)): self.fakes[p.name] for p in self.proxies}
        reals.pop(id(None), None)
        reachable = Reachable((self.cls, [v for v in self.leaves if not isinstance(v, TensorProxy)]))
        self.others = [(t, t.grad) for t in reachable.tensors if t.requires_grad and t.is_leaf and id(t) not in reals]
        places = [p for p in reachable.places if reals and any(id(v) in reals for v in _values(p.held))]
        fakes = {id(fake): real for p in places for real in _values(p.held) if (fake := reals.get(id(real))) is not None}
        for place in places:
            place.write(_exchanged(place.held, reals))
        try:
            yield
        finally:
            for place in places:
                place.write(_exchanged(place.read(), fakes))
            for t, gradient in self.others:
                t.grad = gradient

    def _ask(self, func: Callable, given: Sequence[torch.Tensor | NumberProxy]) -> Any:
        """What a function says of values that the function asks for, as the program around it would."""
        program = current_acquisition()
        if program is None or any(isinstance(v, NumberProxy) for v in given):
            raise UnknownValueError("it is asked for in a torch.autograd.Function")
        function, met = self.acquisition.sizes.as_function(func, given)
        proxies = [self.acquisition.fakes.first_proxy_of(t) for t in met]
        if any(p is None for p in proxies):
            raise UnknownValueError("it is computed from a gradient")
        return program.ask(function, [program.fake_of(p) for p in proxies])

    def _run(self) -> Any:
        values = [self.fakes[v.name] if isinstance(v, TensorProxy) else self._as_given(v) for v in self.leaves]
        args, kwargs = tree_unflatten(values, self.spec)
        try:
            if self.inside is not None:
                return self.inside.apply(self.cls, args, kwargs, [self.fakes.get(p.name, p) for p in self.inside.proxies])
            return self.cls.apply(*args, **kwargs)
        except DataDependentOutputException as e:
            what = f"what {e.func} returns in the forward of {self.cls.__name__}"
            raise data_dependent(what, why="torch runs the function as a whole, for all values of its tensors") from e

    def _as_given(self, value: Any) -> Any:
        """What torch is given for what is no tensor: a container is the program's own where nothing in it is another thing for torch."""
        found = self.acquisition.to_fake(value)
        is_same = isinstance(value, list | dict) and all(map(operator.is_, tree_flatten(value)[0], tree_flatten(found)[0]))
        return value if is_same else found

    def _check_unchanged(self) -> None:
        if any(r.is_in_place and any(r.outputs[0] is t for t in self.inputs) for r in self.forward):
            raise UnsupportedOpError(
                with_details(
                    f"the forward of {self.cls.__name__} changes an argument in place",
                    at=location_of_user(),
                    instead="return a new tensor",
                )
            )

    @contextmanager
    def _watched(self, is_backward: bool) -> Iterator[None]:
        """Refuse what the function leaves in objects that it can reach, where no call would do it again.

        A backward runs once, while the trace is acquired.  A forward may leave something in what was there before the program, which has a
        trace for one call then; but Thunder's interpreter does not see a change of what it has noted the contents of.
        """
        own = (self.cls.backward, self.cls.vjp) if is_backward else (self.cls.forward, self.cls.setup_context)
        asked = Reachable(self.classes).places
        places = Reachable((*own, [v for v in self.leaves if not isinstance(v, TensorProxy)])).places
        made = [*asked, *(p for p in places if is_backward or self._is_followed(p.owner))]
        yield
        changed = [p for p in made if not p.is_of_others and p.is_changed]
        for place in changed:
            place.restore()
        if changed:
            part = "backward" if is_backward else "forward"
            raise UnsupportedOpError(
                with_details(
                    f"the {part} of {self.cls.__name__} changes a {type(changed[0].owner).__name__}",
                    at=location_of_user(),
                    why="torch runs it, once, while the trace is acquired",
                    instead="let it return what it computes",
                )
            )

    def _is_followed(self, owner: Any) -> bool:
        """Whether Thunder's interpreter has noted what is in it: a list or dict that the program has made or gives to the function."""
        is_given = any(owner is v for v in self.leaves)
        return isinstance(owner, list | dict) and (is_given or id(owner) not in side_effects.known_before())

    def _go_backward(self, recorder: Recorder, may_be_missing: bool) -> None:
        pairs = [(t, c) for t, c in zip(self.outputs, self.cotangents, strict=True) if t.requires_grad]
        sources = [t for t in self.inputs if t.requires_grad]
        if not pairs or not sources:
            return
        may_be_missing = may_be_missing and len(pairs) > 1
        found = torch.autograd.grad(
            [t for t, _ in pairs], sources, [c for _, c in pairs], allow_unused=True, retain_graph=may_be_missing
        )
        if may_be_missing:
            missing_cotangents.check(self.cls, pairs, sources, recorder)
        check_plain(self.cls, found, "has as a gradient")
        of = {id(t): g for t, g in zip(sources, found, strict=True)}
        self.gradients = [of.get(id(t)) for t in self.inputs]
        self.gradients[self.num_given :] = [t.grad for t in self.inputs[self.num_given :]]
        if changed := [t for t, gradient in self.others if t.grad is not gradient]:
            raise UnsupportedOpError(
                with_details(
                    f"the backward of {self.cls.__name__} adds to the gradient of a tensor of shape {list(changed[0].shape)} itself",
                    why="the function was not given it, nor a module that has it",
                    instead="give the function the tensor or the module",
                )
            )

    def _leave_out_unused(self) -> None:
        """Leave out the parameters that neither the forward nor the backward has to do with."""
        used = {id(t) for r in (*self.forward, *self.backward) for t in r.inputs}
        kept = [i for i, t in enumerate(self.inputs) if i < self.num_given or id(t) in used or self.gradients[i] is not None]
        for values in (self.proxies, self.inputs, self.gradients):
            values[:] = [values[i] for i in kept]  # type: ignore[index]

    def _refuse_backward(self, error: Exception) -> None:
        with self.acquisition.fakes.mode, torch.no_grad():
            self.gradients = [torch.empty_like(t) if t.requires_grad else None for t in self.inputs]
        gradients = tuple(g for g in self.gradients if g is not None)
        self.backward = [Recorded(Refuse(error, gradients), tuple(self.cotangents), {}, gradients, gradients)]

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self) -> Any:
        """Write the operation; returns the function's result with proxies in the place of fakes."""
        get_jit_ctx().computation_trace.set_current_source_location(
            *get_interpreterruntimectx().get_current_user_source_location()
        )
        made = {id(t): p for t, p in zip(self.outputs, self.operation().symbol(*self.proxies), strict=True)}
        for t in self.outputs:
            if not t.requires_grad and (t.is_floating_point() or t.is_complex()) and any(o.requires_grad for o in self.outputs):
                made[id(t)] = ltorch.detach(made[id(t)])  # `mark_non_differentiable`
            if (cls := classed_fakes.class_of(t)) is not torch.Tensor:
                known_classes.note(made[id(t)], cls)
        return tree_map(lambda v: made[id(v)] if isinstance(v, torch.Tensor) else v, self.result)
