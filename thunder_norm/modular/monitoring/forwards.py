"""The forwards of a model, watched from outside: norms of what its modules return, and attention logits.

In steps that are sampled the model has one hook, which its copies and pickles lose.  While its forward runs, modules are seen by torch's
global hooks, and calls of functions by a mode.  A model that a compiler made is run once more, as the plain program that it
is, before the compiled one runs, and that leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_norm.core.kinds import RMSTensor
from thunder_norm.core.tensors import NormedTensor, has_norm
from thunder_norm.modular.monitoring.attention import AttentionLogits
from thunder_norm.norms.eager import module_hooks
from thunder_norm.norms.lifts.inference import NormSpec
from thunder_norm.norms.lifts.parameters import canonical_dims
from thunder_norm.norms.undisturbed import Surroundings
from thunder_norm.trees import leaves_of_results

MODEL = "(model)"
"""The name of what the model itself returns."""

_MOST = 8  # forwards between two steps that are looked at
# In eval mode these ask whether torch functions are watched, and take another kernel then.
_FUSED_IN_EVAL = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)

Kinds = dict[str, NormSpec]


@dataclass
class Seen:
    """What one forward showed: 0-dim tensors, so that a device is not waited for.

    Attributes:
        args: of the model.
        kwargs: of the model.
        activations: the largest norm of each output of a module, by its name.
        attention: the largest logit of each head, by the path of the module that computes it.
    """

    args: tuple
    kwargs: dict[str, Any]
    activations: dict[str, torch.Tensor] = field(default_factory=dict)
    attention: dict[str, torch.Tensor] = field(default_factory=dict)


def output_names(path: str, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with norms that a module returned, with their names: its path, or several of them numbered."""
    found = [t for t in leaves_of_results(result) if isinstance(t, torch.Tensor) and has_norm(t)]
    for i, t in enumerate(found):
        yield (path or MODEL) + (f"[{i}]" if len(found) > 1 else ""), t


class Forwards:
    """Watches the forwards of one model between `open` and `close`.

    Args:
        model: the plain module.
        compiled: what a compiler made of it, if one did.
        kinds: in which norm each output is measured: as `output_names` has them; else RMS over the last dimension.
        done: called with what each forward showed, at its end.
    """

    def __init__(self, model: torch.nn.Module, compiled: torch.nn.Module | None, kinds: Kinds, done: Callable[[Seen], None]):
        self._model, self._compiled, self._kinds, self._done = model, compiled, kinds, done
        self._opening: Any = None
        self._hooks = contextlib.ExitStack()  # of all modules, while the model runs
        self._names: dict[int, str] = {}
        self._hooked: frozenset[int] = frozenset()  # modules that have forward hooks, which may change what they return
        self._path: list[str] = []
        self._seen: Seen | None = None
        self._mode = AttentionLogits(self._note_logits)
        self._outside: list[torch.nn.Module] = []
        self._is_blind = False
        self.count = 0

    def open(self) -> None:
        """Watch from now on."""
        self.close()
        self.count = 0
        if self._compiled is None:
            self._opening = self._model.register_forward_pre_hook(_Opening(self._before_eager))
        else:
            self._opening = self._compiled.register_forward_pre_hook(self._before_compiled, with_kwargs=True)

    def close(self) -> None:
        """Watch no more."""
        self._forget()
        if self._opening is not None:
            self._opening.remove()
        self._opening = None

    @contextlib.contextmanager
    def blind(self) -> Iterator[None]:
        """What runs meanwhile is no forward of the training."""
        self._is_blind = True
        try:
            yield
        finally:
            self._is_blind = False

    def _forget(self) -> None:
        """End a forward, also one that was interrupted."""
        self._leave_mode()
        self._hooks.close()
        self._seen, self._path, self._outside = None, [], []

    def _before_eager(self, args: tuple) -> None:
        """The model's own forward is about to run, with hooks of its own alone."""
        if self._begins(args, {}):
            self._path.append("")

    def _before_compiled(self, _: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Run the plain program on the arguments of the compiled one."""
        if torch.compiler.is_compiling():
            return
        with Surroundings(self._model, args, kwargs).undisturbed():
            if self._begins(args, kwargs):
                with torch.no_grad():
                    self._model(*args, **kwargs)
                torch.clear_autocast_cache()  # of copies of weights that were made without gradients

    def _begins(self, args: tuple, kwargs: dict) -> bool:
        if self._is_blind:
            return False
        self._forget()
        if not torch.is_grad_enabled() or self.count >= _MOST or _has_norms(args, kwargs):
            return False
        self._names = {id(m): name for name, m in self._model.named_modules()}
        hooked = [m for m in self._model.modules() if m._forward_hooks]
        self._hooked = frozenset(map(id, hooked))
        for m in hooked:  # after its own, which run after the global ones
            self._hooks.callback(m.register_forward_hook(self._after_hooks, with_kwargs=True).remove)
        self._seen = Seen(args, kwargs)
        self._hooks.enter_context(module_hooks(self._enter, self._leave, with_kwargs=True))
        self._mode.__enter__()
        return True

    # -- hooks ----------------------------------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: tuple) -> None:
        if self._seen is None or torch.compiler.is_compiling():
            return
        self._path.append(self._names.get(id(module), self._path[-1] if self._path else ""))
        if isinstance(module, _FUSED_IN_EVAL) and not module.training and not self._outside:
            self._outside.append(module)
            self._leave_mode()

    def _leave(self, module: torch.nn.Module, args: tuple, kwargs: Any, result: Any = None) -> None:
        """Torch calls it without kwargs where the forward raised."""
        if self._seen is None or torch.compiler.is_compiling():
            return
        seen, path = self._seen, self._path.pop()
        if self._outside and self._outside[-1] is module:
            self._outside.pop()
            self._mode.__enter__()
        is_hooked = id(module) in self._hooked
        if result is not None and id(module) in self._names and not is_hooked:
            self._note(path, result)
        if self._path:
            return
        self._leave_mode()
        if result is None:  # torch goes through the hooks right now, so these are removed later
            self._seen = None
        elif not is_hooked:
            self._end(seen, args, kwargs)

    def _after_hooks(self, module: torch.nn.Module, args: tuple, kwargs: Any, result: Any) -> None:
        seen = self._seen
        if seen is None or torch.compiler.is_compiling():
            return
        self._note(self._names[id(module)], result)
        if not self._path:
            self._end(seen, args, kwargs)

    def _end(self, seen: Seen, args: tuple, kwargs: Any) -> None:
        """The model has returned."""
        self._forget()
        self.count += 1
        self._done(replace(seen, args=args, kwargs=kwargs))

    def _leave_mode(self) -> None:
        """Take our mode off the stack: wherever it is, for a forward that was interrupted may have left it there."""
        above = []
        while self._mode in torch.overrides._get_current_function_mode_stack():
            top = torch.overrides._pop_mode()
            if top is self._mode:
                break
            above.append(top)
        for mode in reversed(above):
            torch.overrides._push_mode(mode)

    # -- numbers --------------------------------------------------------------------------------------------------------------

    def _note(self, path: str, result: Any) -> None:
        assert self._seen is not None
        for name, t in output_names(path, result):
            if not is_plain(t):
                continue
            spec = self._kinds.get(name) or NormSpec(RMSTensor, canonical_dims(RMSTensor, None, t.ndim))
            _keep_largest(self._seen.activations, name, norm_without_trace(spec, t))

    def _note_logits(self, largest: torch.Tensor) -> None:
        if self._seen is not None:
            name = (self._path[-1] if self._path else "") or MODEL
            _keep_largest(self._seen.attention, name_of_heads(name, len(largest), self._seen.attention), largest)


class _Opening:
    """The hook of a model that is watched: copies of the model, and pickles, are not, and know nothing of it."""

    def __init__(self, method: Callable[[tuple], None]):
        self._method = weakref.WeakMethod(method)

    def __call__(self, module: torch.nn.Module, args: tuple) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(args)

    def __reduce__(self) -> tuple[Any, ...]:
        # a hook that changes nothing, ``{}.get(module, args)``, which any process can make
        return getattr, ({}, "get")


def own_pre_hooks(module: torch.nn.Module) -> list[int]:
    """The handles of a module's forward pre-hooks, without ours."""
    return [handle for handle, hook in module._forward_pre_hooks.items() if not isinstance(hook, _Opening)]


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor has values of its own."""
    return not (isinstance(t, NormedTensor) or t.is_meta or t.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(t))


def norm_without_trace(spec: NormSpec, t: torch.Tensor) -> torch.Tensor:
    """The norm of a tensor, which neither autograd nor a mode nor autocast sees."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(t.device.type, enabled=False):
        return spec.kind.of(t.detach(), spec.elem_dims).norm_size


def _has_norms(args: tuple, kwargs: dict) -> bool:
    """Whether somebody runs the model on norms, not on data."""
    return any(isinstance(t, torch.Tensor) and not is_plain(t) for t in tree_leaves((args, kwargs)))


def name_of_heads(name: str, number: int, found: Mapping[str, Sized]) -> str:
    """The name of so many heads of a module, which may have another attention of other heads: both are kept."""
    return f"{name}, {number} heads" if name in found and len(found[name]) != number else name


def _keep_largest(found: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    before = found.get(name)
    found[name] = value if before is None else torch.maximum(before, value.to(before.device))  # NaN stays
