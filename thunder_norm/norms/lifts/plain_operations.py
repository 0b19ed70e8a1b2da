"""Operations on parameters that no NormedTensor takes part in: a parameter keeps its norm through them, or is refused.

A parameter is lifted where an operation consumes it together with a NormedTensor.  What is done to it before (a split of a packed
projection, a transpose) gives a plain tensor, whose norm is not that of its data if the parameter's was given or moves.  Two modes
watch such operations: `Functions` calls of torch functions, in the program and inside those that are written in Python
(`F.multi_head_attention_forward`), `Operations` what torch's C++ code decomposes others into.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_norm.core import bodies, context, dispatch, in_place, registry
from thunder_norm.core.kinds import LinfTensor
from thunder_norm.core.known_ranges import range_of_constant
from thunder_norm.core.ranges import Range, range_of_values
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.errors import NormMismatchError
from thunder_norm.norms.lifts.lifting import Lifting
from thunder_norm.norms.lifts.parameters import canonical_dims, refuse_mutation
from thunder_norm.norms.lifts.written_buffers import WrittenBuffers
from thunder_norm.norms.lifts.written_parameters import Write, refused, sharing_memory, values_after, write_of
from thunder_norm.rules.known_ranges import windows
from thunder_norm.trees import flat_tensors, map_tensors


class LiftingEnvironment(context.Environment):
    """What surrounds the rules in normed mode, in an eager program and in a trace: plain tensors are lifted by one policy."""

    def __init__(self, lifting: Lifting):
        self.lifting = lifting
        self.buffers: WrittenBuffers | None = None  # of an eager run

    def lift(self, t: torch.Tensor, kind: type[NormedTensor], elem_dims: tuple[int, ...] | None) -> NormedTensor:
        """The normed tensor for a plain one, by the policy."""
        dims = canonical_dims(kind, elem_dims, t.ndim)
        self.lifting.check_known(t, self.user_location)
        normed = self.lift_over(t, kind, dims)
        normed._range = self.range_of(t)
        return normed

    def range_of(self, t: torch.Tensor) -> Range | None:
        """Between which numbers the entries of a tensor made from parameters are, by the operations that made it; that of one number is it."""
        found = None if t.ndim or not self.is_constant(t) else range_of_values(self.values_of(t))
        return self.lifting.range_of(t) if found is None else found

    def largest_without_values(self, t: torch.Tensor) -> float | None:
        return self.lifting.largest_without_values(t)

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether a plain tensor is neither a parameter or buffer nor made from one."""
        known = self.lifting
        return not known.concerns(t) and known.name_of(t) is None and t not in known.unknown

    def moves(self, t: torch.Tensor) -> bool:
        """By the policy."""
        return self.lifting.moves(t)

    def is_measured(self, t: torch.Tensor) -> bool:
        """By the policy."""
        return self.lifting.is_measured(t)

    def lift_over(self, t: torch.Tensor, kind: type[NormedTensor], dims: tuple[int, ...]) -> NormedTensor:
        """The same for canonical elem_dims, and a tensor that may be lifted."""
        raise NotImplementedError

    def annotated(self, values: Any) -> Any:
        """Arguments with parameters as the kinds stated or chosen for them, and anything else as it is."""
        return map_tensors(self._annotated, values) if self.lifting.has_stated_kinds() else values

    def _annotated(self, t: torch.Tensor) -> Any:
        name = self.lifting.name_of(t)
        if name is None or not self.lifting.is_taken_as_stated(t, name):
            return t
        try:
            own = self.lifting.stated(name, t)
            return self.lift(t, own.kind, own.elem_dims)
        except NormMismatchError as e:
            raise NormMismatchError(f"the norm stated for parameter {name!r} does not fit it: {e}") from e

    def run(self, func: Callable, args: Any, kwargs: Any) -> Any:
        """An operation on NormedTensors."""
        return func(*args, **kwargs)

    def derive(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters alone: plain, but remembered."""
        in_place.refuse_out(func, kwargs)
        result = func(*args, **kwargs)
        self.lifting.remember(func, args, kwargs, result)
        return result

    def beside_others(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation on parameters and others by its rule; a matrix times a constant, such as a mask, is plain, but remembered.

        It stays what it was made from, whose kind the operation says that consumes it.  So is what is made of constants and of parameters
        whose norms are those of their data (``weight / torch.dot(u, weight @ v)``, u and v buffers): the norm of the result is that of its own.
        """
        known, tensors = self.lifting, flat_tensors((args, kwargs))
        if tensors and not registry.is_mutation(func, kwargs) and all(map(self._is_as_measured, tensors)):
            return self.derive(func, args, kwargs)
        is_product = registry.key_of(func) == "mul" and not registry.is_mutation(func, kwargs)
        if not is_product or len(tensors) != 2 or len(args) != 2:
            return dispatch.run_registered(func, args, kwargs)
        of, gain = tensors if known.concerns(tensors[0]) else tensors[::-1]
        is_constant = has_norm(gain) and not known.concerns(gain) and gain not in known.unknown
        if not known.concerns(of) or of.ndim < 2 or of.is_complex() or not is_constant or not _keeps_shape(of, gain):
            return dispatch.run_registered(func, args, kwargs)
        result = self.run_real(func, args, kwargs)
        lifted = self.lift(gain, LinfTensor, ())
        known.remember(func, tuple(lifted if t is gain else t for t in args), {}, result)
        return result

    def _is_as_measured(self, t: torch.Tensor) -> bool:
        """Whether it is plain, the model's own, and its norm that of its data and no argument of the program."""
        known = self.lifting
        if isinstance(t, NormedTensor) or t in known.unknown or not has_norm(t) or known.matters(t):
            return False
        return known.concerns(t) or known.is_of_buffers(t)

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Called after an operation that neither parameters alone nor NormedTensors take part in: what comparisons decided is followed."""
        windows.follow(func, args, kwargs, result)

    def lets_change(self, t: torch.Tensor, func: Callable) -> bool:
        """Buffers: what is made of one from now on has no known norm."""
        if self.lifting.concerns(t) or self.lifting.name_of(t) is None:
            return False
        self.lifting.unknown.change(func, t)
        return True

    def with_current(self, func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with what stands for constants by now that others were written into, or are to be by this operation.

        Others are normed tensors, and parameters whose norms are not those of their data.
        """
        written = self.lifting.written
        args, kwargs = map_tensors(written.current, (args, kwargs))
        target = args[0] if args else None
        if not registry.is_mutation(func, kwargs) or not written.may_be_written(target) or self.lifting.concerns(target):
            return args, kwargs
        if not any(isinstance(t, NormedTensor) or self.lifting.moves(t) for t in flat_tensors((args[1:], kwargs))):
            return args, kwargs
        normed = self.written_constant(target)
        written.replace(target, normed)
        return (normed, *args[1:]), kwargs

    def by_now(self, values: Any) -> Any:
        """Arguments with what stands for tensors by now, by whatever name they are."""
        return map_tensors(lambda t: self.lifting.written.current(self.lifting.known(t)), values)

    def sets_data_of(self, t: torch.Tensor, value: Any) -> bool:
        """Whether another tensor stands for one whose `data` is set: one made from parameters, or one that is normed from then on."""
        buffer = self.buffers is not None and self.buffers.has(t)
        value = self.by_now(value)
        return self.changes(t) or buffer and (isinstance(value, NormedTensor) or self.lifting.moves(value))

    def changes(self, t: Any) -> bool:
        """Whether what is written into a tensor is to be followed, and can be: as it is one made from parameters."""
        return False

    def written_constant(self, t: torch.Tensor) -> NormedTensor:
        """What stands for a constant that normed tensors are about to be written into."""
        lifted = self.lift(t, LinfTensor, ())
        found = LinfTensor._wrap(t, lifted.norm_size, None, ())
        found._range = lifted._range or range_of_constant(t)  # zeros that weights are added to
        return found

    def inside_function(self) -> contextlib.AbstractContextManager[Any]:
        """The calls of a torch function written in Python are those of the program."""
        return Functions(self)

    def inside_operation(self) -> contextlib.AbstractContextManager[Any]:
        """What torch's C++ code does to parameters."""
        return Operations(self)


def _keeps_shape(of: torch.Tensor, gain: torch.Tensor) -> bool:
    """Whether what is broadcast to a tensor's shape leaves that as it is."""
    sizes = zip(reversed(gain.shape), reversed(of.shape), strict=False)
    return gain.ndim <= of.ndim and all(m in (1, n) for m, n in sizes)


class Functions(TorchFunctionMode):
    """Takes over torch functions on parameters; NormedTensors find their rules by themselves."""

    is_of_environment = True

    def __init__(self, environment: LiftingEnvironment):
        super().__init__()
        self.environment = environment

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        environment, known = self.environment, self.environment.lifting
        if func == _SET_DATA and environment.sets_data_of(*args):
            return known.written.replace(args[0], known.written.current(known.known(args[1])))
        if isinstance(kwargs.get("out"), torch.Tensor) and self._is_concerned(args, kwargs):
            return self._write_out(func, args, kwargs)
        if environment.buffers is not None and registry.is_mutation(func, kwargs) and args and environment.buffers.has(args[0]):
            if self._is_normed_write(args, kwargs):
                return environment.buffers.write(func, args, kwargs, environment.by_now, self._run)
        if not registry.is_metadata(func):
            args, kwargs = environment.with_current(func, args, kwargs)
            write = write_of(func, args, kwargs)
            if write is None and not registry.is_mutation(func, kwargs):
                args, kwargs = environment.by_now((args, kwargs))
            if write is not None and environment.changes(target := known.written.current(known.known(args[0]))):
                return self._change(write._replace(args=(target, *write.args[1:])), target)
        tensors = flat_tensors((args, kwargs))
        if any(isinstance(t, NormedTensor) for t in tensors):
            return environment.run(func, environment.annotated(args), environment.annotated(kwargs))
        return self._on_plain(func, args, kwargs, tensors)

    def _on_plain(self, func: Callable, args: tuple, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        """An operation none of whose tensors is a NormedTensor by now: those that have norms here become one where a rule takes them."""
        environment, known = self.environment, self.environment.lifting
        if getattr(func, "__self__", None) is torch.Tensor.data:  # the same tensor by another name
            is_derived = len(tensors) == 1 and id(tensors[0]) in known.derived
            return environment.derive(torch.Tensor.detach, tensors, {}) if is_derived else func(*args, **kwargs)
        if func in _DEEP_COPIES:
            return known.copied(func, *args, **kwargs)
        has_rule = registry.has_rule(func)
        if not has_rule and registry.is_metadata(func):
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._check_not_transformed(tensors)
        concerns = [known.concerns(t) for t in tensors]
        if not any(concerns) and dispatch.is_factory(func):
            return dispatch.run_registered(func, args, kwargs)
        if tensors and all(concerns):
            given = environment.annotated((args, kwargs))
            if any(isinstance(t, NormedTensor) for t in flat_tensors(given)):
                return environment.run(func, *given)
            if any(map(known.matters, tensors)):
                refuse_mutation(func, args, kwargs, environment.user_location())
            elif not has_rule:
                return func(*args, **kwargs)
            return environment.derive(func, args, kwargs)
        if tensors and concerns[0] and known.matters(tensors[0]):
            refuse_mutation(func, args, kwargs, environment.user_location())
        if (
            registry.is_mutation(func, kwargs)
            and any(map(known.moves, tensors[1:]))
            and not environment.lets_change(tensors[0], func)
        ):
            raise refused(
                func, tensors[0], environment.user_location(), "parameters are written into it, and it is not the program's own"
            )
        if any(concerns) and has_rule:
            return environment.beside_others(func, environment.annotated(args), environment.annotated(kwargs))
        if any(concerns) and any(map(known.matters, tensors)):
            body = bodies.python_body(func)
            if body is not None:  # what it calls may have rules
                with environment.inside_function():
                    return body(*args, **kwargs)
            if bodies.is_composite(func):  # what it is taken apart into may have some
                with environment.inside_operation():
                    return func(*args, **kwargs)
        return run_plainly(environment, func, args, kwargs, tensors)

    def _check_not_transformed(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse what a transform of torch's makes of tensors with norms: it hides whose they are, and each sample has a norm of its own.

        Raises:
            InnerDerivativeError: there is one; programs are run operation by operation on the whole then.
        """
        known = self.environment.lifting
        for t in tensors:
            inside = t
            while torch._C._functorch.is_functorch_wrapped_tensor(inside):
                inside = torch._C._functorch.get_unwrapped(inside)
            if inside is not t and (isinstance(inside, NormedTensor) or known.concerns(inside)):
                context.lift(t, LinfTensor)

    def _is_normed_write(self, args: tuple, kwargs: dict) -> bool:
        """Whether a buffer's norm is not that of its values after a write: it was not before, or that of what is written is not."""
        target, *others = self.environment.by_now(args)
        moves = self.environment.lifting.moves
        tensors = flat_tensors((others, self.environment.by_now(kwargs)))
        return isinstance(target, NormedTensor) or any(isinstance(t, NormedTensor) or moves(t) for t in tensors)

    def _is_concerned(self, args: tuple, kwargs: dict) -> bool:
        """Whether tensors that have norms here are among the arguments."""
        tensors = flat_tensors(self.environment.by_now((args, kwargs)))
        return any(isinstance(t, NormedTensor) or self.environment.lifting.concerns(t) for t in tensors)

    def _write_out(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """What is computed into a tensor that is given for it is computed, and written there: by the rules of both."""
        out = kwargs["out"]
        result = self._run(func, *args, **{name: value for name, value in kwargs.items() if name != "out"})
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (out.shape, out.dtype):
            in_place.refuse_out(func, kwargs)
        return self._run(torch.Tensor.copy_, out, result)

    def _run(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(fn, (), args, kwargs)

    def _change(self, write: Write, target: torch.Tensor) -> torch.Tensor:
        """Write into a tensor made from parameters: from now on the results stand for it, and for what shares its memory."""
        lifting, location = self.environment.lifting, self.environment.user_location()
        tensors = [target, *sharing_memory(target, lifting.plain_tensors())]
        after = values_after(
            write, tensors, tensors, self._run, lambda t: t.backing if isinstance(t, NormedTensor) else t, location
        )
        for t, new in zip(tensors, after, strict=True):
            lifting.written.replace(t, new)
        return target


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DEEP_COPIES = frozenset({torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__})


class Operations(TorchDispatchMode):
    """Watches aten operations that a torch function on NormedTensors becomes."""

    def __init__(self, environment: LiftingEnvironment):
        super().__init__()
        self.environment = environment

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        environment, known = self.environment, self.environment.lifting
        tensors = flat_tensors((args, kwargs))
        if any(isinstance(t, NormedTensor) for t in tensors):
            return dispatch.torch_dispatch(func, args, kwargs)
        if tensors and all(map(known.concerns, tensors)) and any(map(known.matters, tensors)):
            refuse_mutation(func, args, kwargs, environment.user_location())
            return environment.derive(func, args, kwargs)
        if any(map(known.concerns, tensors)) and registry.has_rule(func):
            return dispatch.torch_dispatch(func, args, kwargs)
        return run_plainly(environment, func, args, kwargs, tensors)


def run_plainly(
    environment: LiftingEnvironment, func: Callable, args: tuple, kwargs: dict, tensors: Sequence[torch.Tensor]
) -> Any:
    """An operation that is run plainly, also on tensors that are not parameters."""
    result = func(*args, **kwargs)
    environment.follow(func, args, kwargs, result)
    known = environment.lifting
    known.note_of_buffers(tensors, result)
    if any(t in known.unknown or known.concerns(t) and known.matters(t) for t in tensors):
        known.unknown.add(func, (args, kwargs), result)
    else:
        known.written.note(func, result, tensors)
    return result
