"""Operations that write into tensors, as they are recorded: what they write is computed out of place, and the tensor stands for it from then on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.acquiring import aliasing
from thunder_norm.subclass.acquiring.acquisition import Acquisition
from thunder_norm.subclass.acquiring.autograd import is_grad_enabled
from thunder_norm.subclass.acquiring.fallback import is_random
from thunder_norm.subclass.acquiring.functional_forms import (
    WITHOUT_HISTORY,
    Drawn,
    functional_variant,
    is_view,
    returning_what_it_writes,
    rewritten,
    with_defaults,
    without_history,
    without_outs,
)
from thunder_norm.subclass.recording.lists import is_on_lists, out_of_place
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.shared_memory.aliases import share_elements
from thunder_norm.trees import flat_tensors, map_tensors

aten = torch.ops.aten


_OF_ONE_VALUE = frozenset({aten.zero_.default, aten.fill_.Scalar})  # which they give to all entries
_READING_FIRST = frozenset(
    {aten.fill_.Tensor, aten.masked_fill_.Tensor, aten.index_fill_.int_Tensor, aten.copy_.default}
)  # a number


def _check_casts(func: Any, args: tuple, kwargs: dict) -> None:
    """Let torch say, of numbers that are all zero, whether an operation casts what it writes into tensors of another dtype.

    Tensors without data are not asked by all operations, and those that are not entry by entry may compute in the other dtype.

    Raises:
        UnsupportedOpError: it is not entry by entry.
        RuntimeError: torch's, where it does not cast.
    """
    if torch.Tag.pointwise not in func.tags:
        raise UnsupportedOpError(
            with_details(
                f"{func} into tensors of another dtype than what it returns",
                at=location_of_user(),
                instead="give tensors of that dtype, or convert what it returns without out=",
            )
        )
    with _disable_current_modes(), torch.no_grad():
        zeros = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), (args, kwargs))
        func(*zeros[0], **zeros[1])


# What torch computes in the dtype of `out`, as if `dtype` were that.
_COMPUTED_IN_OUT = frozenset({"cumsum", "cumprod", "sum", "prod", "mean"})


class Writing(TorchDispatchMode):
    """The part of `record.Recorder` that is about them."""

    acquisition: Acquisition
    log: list[Any]
    has_met_wrappers: bool
    is_inside_no_grad: bool = False  # in a region of the operation's own
    is_differentiated: bool  # the call records gradients, whatever a region of the program says

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Run `func` on plain fakes and log it as one operation, whatever it decomposes into."""
        raise NotImplementedError

    def paused(self) -> AbstractContextManager[None]:
        """Operations inside the block are not logged."""
        raise NotImplementedError

    def _note(
        self, func: Callable, args: tuple, kwargs: dict, outputs: tuple[torch.Tensor, ...], result: Any, is_in_place: bool = False
    ) -> None:
        raise NotImplementedError

    def _append(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        raise NotImplementedError

    def _record_in_place(self, func: Any, args: tuple, kwargs: dict) -> Any:
        schema = func._schema
        mutated = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if (whole_form := returning_what_it_writes(func)) is not None:
            written = [(args[i], schema.arguments[i].name in WITHOUT_HISTORY) for i in mutated]
            return self._record_with_results(func, whole_form, written, args, kwargs)
        if is_on_lists(func) and mutated == [0]:
            functional, calls = out_of_place(func, args, kwargs)
            for own_args, own_kwargs in calls:
                self._record_with_results(func, functional, [(t, False) for t in own_args[0]], own_args, own_kwargs)
            return None
        if (form := without_outs(func)) is not None:
            return self._record_outs(func, *form, args, kwargs)
        functional = functional_variant(func)
        is_drawn = functional is not None and is_random(functional)
        if mutated != [0] or functional is None:
            raise UnsupportedOpError(
                with_details(f"{func} mutates its arguments and has no functional form here", at=location_of_user())
            )
        target = args[0]
        self._enter_write(func, target, flat_tensors((args[1:], kwargs)))
        own_args = args = with_defaults(func, args, kwargs)
        if is_drawn:
            self.acquisition.fakes.guard_layouts()
        if is_drawn and target.ndim > 1:  # what Thunder made may lie in another order
            functional, own_args = Drawn(func), (target, tuple(target.stride()), *args[1:])
        with self.paused():
            value = functional(*own_args, **kwargs)
            if not torch.can_cast(value.dtype, target.dtype):  # torch's words; fakes are not asked by all operations
                raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
            result = func(*args, **kwargs)
        aliases = self._aliases(target)
        if (value.dtype, value.shape) == (target.dtype, target.shape):
            self._become(target, functional, own_args, kwargs)
        else:  # the target keeps its dtype
            self._append(functional, own_args, kwargs, value)
            self._become(target, aten.copy.default, (target, value))
        if not isinstance(functional, Drawn):
            self._keep_strides(target, value)
        self._renew(aliases, target)
        self._renew_kept(aliases, target)
        return result

    def _record_with_results(
        self, func: Any, functional: Any, written: Sequence[tuple[torch.Tensor, bool]], args: tuple, kwargs: dict
    ) -> Any:
        """Record an operator that writes into tensors; of each it is known whether what is written has no history."""
        for target, _ in written:
            self._enter_write(func, target, flat_tensors((args, kwargs)))
        # what is kept for the backward is not what is written into
        copies = {id(t): self.call(aten.clone.default, (t,), {}) for t, is_without_history in written if is_without_history}
        args, kwargs = map_tensors(lambda t: copies.get(id(t), t), (args, kwargs))
        with self.paused():
            found = functional(*args, **kwargs)
        self._append(functional, args, kwargs, found)
        found = flat_tensors(found)
        num_results = len(found) - len(written)
        results, values = found[:num_results], found[num_results:]
        for (target, is_without_history), value in zip(written, values, strict=True):
            if not torch.can_cast(value.dtype, target.dtype):  # torch's words
                raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
            aliases = self._aliases(target)
            if is_without_history:
                value = self.call(without_history, (value,), {})
            self._become(target, aten.copy.default, (target, value))
            self._keep_strides(target, target)  # a copy has those of a contiguous tensor
            self._renew(aliases, target)
            self._renew_kept(aliases, target)
        if not results:  # an in-place operation returns what it writes into
            return written[0][0]
        return results if len(results) > 1 else results[0]

    def _record_outs(self, func: Any, functional: Any, names: Sequence[str], args: tuple, kwargs: dict) -> Any:
        outs = [kwargs[name] for name in names]
        rest = {name: v for name, v in kwargs.items() if name not in names}
        if self.is_differentiated and any(self.acquisition.requires_grad(t) for t in flat_tensors((args, rest, outs))):
            raise RuntimeError(f"{func}: functions with out=... arguments don't support automatic differentiation")
        if func.overloadpacket.__name__ in _COMPUTED_IN_OUT and rest.get("dtype") is None:
            rest["dtype"] = outs[0].dtype
        with self.paused():
            found = flat_tensors(functional(*args, **rest))
        shapes = [t.shape for t in found]
        if shapes != [t.shape for t in outs]:
            raise UnsupportedOpError(
                with_details(
                    f"{func} into tensors of other shapes than {[list(s) for s in shapes]}, which it would resize",
                    at=location_of_user(),
                    instead="give tensors of these shapes, or use what it returns without out=",
                )
            )
        if [t.dtype for t in found] != [t.dtype for t in outs]:
            _check_casts(func, args, kwargs)
        self._record_with_results(func, functional, [(t, False) for t in outs], args, rest)
        return tuple(outs) if len(outs) > 1 else outs[0]

    def _become(
        self, target: torch.Tensor, func: Callable, args: tuple, kwargs: dict | None = None, is_detached: bool = False
    ) -> None:
        """Record that `target` is what an operation returns from now on; under `torch.no_grad` it keeps its history.

        It does as well where that was written into it as into a tensor without history (``target.detach()``).
        """
        is_of_itself = args[0] is target and is_view(func)  # which has the history of the target wherever the program does it
        if is_detached or (self._keeps_history(target) and not is_of_itself):
            args, kwargs, func = (target, self.call(func, args, kwargs or {})), {}, rewritten
        if id(target) in self.acquisition.fakes.inputs:
            self.acquisition.fakes.written[id(target)] = target
            if self.acquisition.fakes.is_given(target):
                self.acquisition.tape.tear()  # what it would run on again has changed since
        self._note(func, args, kwargs or {}, (target,), target, is_in_place=True)

    def _keep_strides(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Lay out what was written as the target lies, which stays so, whatever the operation returns out of place."""
        if aliasing.is_permuted(target) or not value.is_contiguous():
            self._become(target, aliasing.laid_out, (target, aliasing.order(target)))

    def _keeps_history(self, target: torch.Tensor) -> bool:
        """Whether Thunder differentiates a program that writes into `target` under `torch.no_grad`."""
        is_recorded = is_grad_enabled() and not self.is_inside_no_grad
        return not is_recorded and self._has_history_of_thunders(target) and not self.acquisition.beyond_no_grad()

    def _has_history_of_thunders(self, target: torch.Tensor) -> bool:
        """Whether Thunder may differentiate what becomes of a tensor."""
        is_inexact = target.is_floating_point() or target.is_complex()
        return self.is_differentiated and is_inexact and not self.acquisition.autograd.is_running

    def _has_switched_off_gradients(self) -> bool:
        """Whether the operation at hand, one of plain tensors, has switched gradients off for a part of what it does."""
        is_torchs = self.has_met_wrappers or self.acquisition.autograd.is_running or self.acquisition.num_levels  # who follows it
        return self.is_differentiated and not is_torchs and is_grad_enabled() and not torch.is_grad_enabled()

    def _is_detached(self, target: torch.Tensor, alias: torch.Tensor) -> bool:
        """Whether autograd takes `target`, which was written into, for another tensor than `alias`, which keeps its own history."""
        if not self.is_differentiated or self.acquisition.fakes.detached_at(target) is not self.acquisition.fakes.detached_at(
            alias
        ):
            return self.is_differentiated
        is_known = self.acquisition.fakes.proxy_of(target) is not None
        return is_known and self.acquisition.requires_grad(alias) and not self.acquisition.requires_grad(target)

    def _renew(self, aliases: Sequence[torch.Tensor], target: torch.Tensor, *, are_detached: bool = False) -> None:
        """Record what tensors became that share memory with `target`, which was changed; each keeps its history if they `are_detached`."""
        detached = [alias for alias in aliases if are_detached or self._is_detached(target, alias)]
        attached = [alias for alias in aliases if all(alias is not t for t in detached)]
        self._renew_from(attached, target, attached, are_detached=False)
        was_inside, self.is_inside_no_grad = self.is_inside_no_grad, True
        try:
            self._renew_from(detached, target, aliases, are_detached=True)
        finally:
            self.is_inside_no_grad = was_inside

    def _renew_from(
        self, aliases: Sequence[torch.Tensor], target: torch.Tensor, known: Sequence[torch.Tensor], *, are_detached: bool
    ) -> None:
        """Record what `aliases` became, by what is `known` of the memory of `target`; they keep their history if they `are_detached`."""
        for alias in aliases:
            if aliasing.is_reshaped(alias, target):
                self._become(alias, aten.view.default, (target, list(alias.shape)), is_detached=are_detached)
        others = [alias for alias in aliases if not aliasing.is_reshaped(alias, target)]
        if not others:
            return
        base = aliasing.whole((target, *known))
        if base is None:
            places = {id(t): tuple(aliasing.place(t)) for t in (target, *others)}
            for alias in others:
                arguments = (alias, places[id(alias)], target, places[id(target)])
                self._become(alias, aliasing.written_over, arguments, is_detached=are_detached)
            return
        with torch.no_grad():
            if base is target or aliasing.is_reshaped(base, target):
                found = self.call(aliasing.elements, (base, aliasing.order(base)), {})
            else:
                found = self.call(aliasing.with_written, (base, aliasing.order(base), target, *aliasing.place(target)), {})
        for alias in others:
            self._become(alias, aliasing.taken_out, (found, *aliasing.place(alias)), is_detached=are_detached)
        if not are_detached and not aliasing.is_dense(target):  # whose value lies as operations return it, and not with its steps
            self._become(target, aliasing.taken_out, (found, *aliasing.place(target)))

    def _enter_write(self, func: Any, target: torch.Tensor, operands: Sequence[torch.Tensor]) -> None:
        self._check_may_mutate(func, target, operands)
        self.acquisition.integers.forget(target)
        acquisition, inner = self.acquisition, self.acquisition.fakes.inner
        is_followed = (
            self.has_met_wrappers or acquisition.autograd.is_running or acquisition.num_levels or acquisition.is_transformed
        )
        if is_followed or not (inner and self.is_differentiated and any(map(acquisition.requires_grad, operands))):
            return
        if any(id(t) in inner for t in (target, *self._aliases(target))):
            acquisition.autograd.starts_late = True  # what is inside of an input wrapper gets a history of its own

    def _check_may_mutate(self, func: Any, target: torch.Tensor, operands: Iterable[torch.Tensor]) -> None:
        why = None
        read = next((t for t in operands if self._is_read_while_written(t, target)), None)
        if read is not None and (read.ndim or func not in _READING_FIRST):
            raise UnsupportedOpError(
                with_details(
                    f"{func} on a tensor of shape {list(target.shape)}, with one of shape {list(read.shape)} in the same memory",
                    at=location_of_user(),
                    why="what it reads of elements that it also writes hangs on the order in which it does so",
                    instead="give it a clone of the second",
                )
            )
        fakes, aliases = self.acquisition.fakes, self._aliases(target)
        for t in (target, *aliases):
            if self.acquisition.is_finished and self.acquisition.is_of_program(t):
                why = "it is a tensor of the program, and the program is differentiated: this would be done in the backward"
            elif (not isinstance(t, FakeTensor) or fakes.is_given(t)) and not self._may_write_back(t, target):
                what = "it" if t is target else "it is a view of what"
                why = f"{what} is an input of the jitted function"
                why += ", and the program is differentiated" if id(t) in fakes.inner else ""
            elif fakes.is_held(t) and not self.acquisition.may_replace():
                why = "the program also holds it as a plain tensor"
            elif torch.Tag.inplace_view in func.tags and t is target and id(t) in fakes.inputs:
                whose = "an input of the jitted function" if fakes.is_given(t) else "a tensor that the program goes on with"
                why = f"it changes the shape or the strides of {whose}"
            elif self.acquisition.has_view(t):
                fakes.misses_memory = True
                why = "another tensor is a view of it, or it is a view of another tensor"
        if (
            why is None
            and not all(aliasing.is_reshaped(t, target) for t in aliases)
            and aliasing.whole((target, *aliases)) is None
        ):
            if any(t.dtype != target.dtype for t in aliases) and any(map(self._may_have_gradient, (target, *aliases))):
                why = "tensors of other dtypes lie in its memory, which is differentiated"
            elif not all(map(aliasing.lies_once, (target, *aliases))):
                why = "elements of a tensor in its memory are elements of it several times"
        if why is None and func not in _OF_ONE_VALUE and (aliasing.is_expanded(target) or not aliasing.lies_once(target)):
            why = "several of its entries are one element in memory, and get several values"
        if why is not None:
            raise UnsupportedOpError(
                with_details(
                    f"{func} on {'an inner tensor of a wrapper subclass' if self.has_met_wrappers else 'a tensor'}: {why}",
                    at=location_of_user(),
                    instead="use the out-of-place operation",
                )
            )

    def _may_write_back(self, t: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether what is written into `target` may be written into an input in whose memory it lies: `x`, of ``x.detach().mul_(2)``."""
        if self.acquisition.may_write_back(t):
            return True
        is_detached = t is not target and id(t) not in self.acquisition.fakes.inner and self._is_detached(target, t)
        return is_detached and self.acquisition.may_replace()

    def _is_read_while_written(self, t: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether some elements of `target`, of several, are elements of `t`, which has them at another place."""
        if t is target or target.numel() == 1 or t.untyped_storage()._cdata != target.untyped_storage()._cdata:
            return False
        return share_elements(t, target) and not aliasing.is_same(t, target)

    def _may_have_gradient(self, t: torch.Tensor) -> bool:
        """Whether what stands for a fake by now may be differentiated, by Thunder."""
        return self.is_differentiated and self.acquisition.requires_grad(t)

    def _aliases(self, target: torch.Tensor) -> list[torch.Tensor]:
        """The tensors known by now that share memory with `target`."""
        in_log = (t for r in self.log for t in (*r.inputs, *r.outputs))
        return _in_memory_of(target, itertools.chain((fake for fake, _ in self.acquisition.fakes.pairs()), in_log))

    def _renew_kept(self, aliases: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Record what tensors became that torch's autograd may keep, a result as it was detached, in the memory of what was changed.

        Where autograd does not notice the change (``x.a.mul_(2)``, ``x.data.mul_(2)``) the backward computes with what they became.
        """
        autograd, named = self.acquisition.autograd, {id(t) for t in (target, *aliases)}
        base = aliasing.whole((target, *aliases))
        for t in _in_memory_of(target, (made.fake for made in autograd.intermediates.values())):
            if id(t) in named:
                continue
            autograd.outdated.pop(id(t), None)
            if aliasing.is_reshaped(t, target):
                self._become(t, aten.view.default, (target, list(t.shape)))
            elif base is not None and base.dtype == t.dtype:
                with torch.no_grad():
                    found = self.call(aliasing.elements, (base, aliasing.order(base)), {})
                self._become(t, aliasing.taken_out, (found, *aliasing.place(t)))
            else:
                autograd.outdated[id(t)] = t

    def renew_late(self, fake: torch.Tensor) -> None:
        """Record what an input is that is met after the program has written into its memory."""
        for t in self._aliases(fake):
            if id(t) in self.acquisition.fakes.written:
                self._renew([fake], t)


def _in_memory_of(target: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of some tensors, each once, that have elements of `target`, and are others."""
    storage = target.untyped_storage()._cdata
    found = {id(t): t for t in tensors if t is not target and t.untyped_storage()._cdata == storage}
    return [t for t in found.values() if share_elements(t, target)]
