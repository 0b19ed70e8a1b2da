"""What ``thunder.jit`` gives for a module, as a module: its parameters, buffers, modules and attributes are those of the model.

A ``ThunderModule`` reads attributes of the model that it runs, and keeps to itself what is set: ``jitted.head = Linear(...)``,
``jitted.scale = 2`` and ``register_buffer`` change nothing in what is computed, and inside of another module its parameters have other
names in ``state_dict`` than anywhere else.  Under a transform of ours it is a `JittedModule`: what a user sets, registers, loads or
converts is the model's, whose changes calls follow (`replaced`).  Hooks on calls stay with the jitted module, which is what is called.

With transforms of others that put tensors of their own in the place of the model's (quantization, sharding) it stays as Thunder made it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

import thunder
from thunder.core.module import ThunderModule
from thunder.core.transform_common import Transform
from thunder.extend import TemporaryExecutor


class JittedModule(ThunderModule):
    """A jitted model with the members of the model, which is ``_model``.

    It is an instance of the model's class too, which `torch.nn.utils.parametrize` changes.
    """

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """That of the model."""
        return type(self._model)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model; of the jitted module itself what it has of its own, as ``forward``."""
        if _is_own(self, name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        """As `__setattr__`."""
        if _is_own(self, name):
            object.__delattr__(self, name)
        else:
            delattr(self._model, name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the model, in whose place this one stands."""
        for name, module in self._model.named_modules(*args, **kwargs):
            yield name, self if module is self._model else module

    def modules(self) -> Iterator[nn.Module]:
        """As `named_modules`."""
        return (module for _, module in self.named_modules())

    def __dir__(self) -> list[str]:
        """Names of the jitted module and of the model."""
        return sorted({*object.__dir__(self), *dir(self._model)})

    def __repr__(self) -> str:
        """The model inside of the class."""
        return f"{ThunderModule.__name__}(\n  (_model): " + "\n  ".join(repr(self._model).split("\n")) + "\n)"

    def __deepcopy__(self, memo: dict[int, Any]) -> ThunderModule:
        """A copy of the model, jitted in the same way, with copies of hooks on calls; it is compiled anew."""
        new = _jitted(copy.deepcopy(self._model, memo), copy.deepcopy(self._lc_transforms, memo), _options(self))
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(_hooks(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """The model, how it is jitted, and hooks on calls."""
        options = _options(self)
        options["executors"] = [e.name for e in options["executors"]]
        return _jitted, (self._model, self._lc_transforms, options, _hooks(self))


def _is_own(jitted: JittedModule, name: str) -> bool:
    is_of_calls = name.startswith("_") and not name.startswith("__") and hasattr(nn.Module, name)  # of `nn.Module.compile`
    return name in vars(jitted) or name in _OWN or name in vars(ThunderModule) or is_of_calls


def _options(jitted: JittedModule) -> dict[str, Any]:
    """How ``thunder.jit`` was called, but for the transforms."""
    cd = jitted._lc_cd
    return {
        "executors": [e for e in cd.executors_list if not isinstance(e, TemporaryExecutor)],
        "sharp_edges": cd.sharp_edges,
        "cache": cd.cache_option,
        "disable_torch_autograd": cd.disable_torch_autograd_support,
        "debug_options": cd.debug_options,
        **cd.compile_options,
    }


def _hooks(jitted: JittedModule) -> dict[str, Any]:
    """What it keeps of hooks on its calls."""
    return {name: kept for name, kept in vars(jitted).items() if name in _HOOKS}


def _jitted(
    model: nn.Module, transforms: list[Transform], options: dict[str, Any], hooks: Mapping[str, Any] = MappingProxyType({})
) -> ThunderModule:
    new = thunder.jit(model, transforms=transforms, **options)
    vars(new).update(hooks)
    return new


# -- what is the model's --------------------------------------------------------------------------------------------------

# What is called is the jitted module, and Thunder asks it for the tensors of a call.
_OWN = frozenset(
    "forward compile register_forward_hook register_forward_pre_hook register_backward_hook register_full_backward_hook "
    "register_full_backward_pre_hook get_parameter get_buffer get_submodule named_modules modules".split()
)
_HOOKS = frozenset(
    "_forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs "
    "_backward_hooks _backward_pre_hooks _is_full_backward_hook".split()
)
_TABLES = frozenset(
    "_parameters _buffers _modules _non_persistent_buffers_set _state_dict_hooks _state_dict_pre_hooks "
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks".split()
)
_PRIVATE = frozenset("_apply _load_from_state_dict _save_to_state_dict _named_members _get_name".split())
_OF_CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__")


class _OfModel:
    """An attribute that is the model's, also where a class of jitted modules has one of that name."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, jitted: JittedModule | None, kind: type) -> Any:
        if jitted is None:
            return getattr(nn.Module, self._name)
        model = jitted._model
        value = getattr(model, self._name)
        if not isinstance(value, MethodType):
            return value

        @functools.wraps(value)
        def method(jitted: JittedModule, *args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return jitted if result is model else result

        return MethodType(method, jitted)  # as torch.compile takes methods of modules to be


_public = {name for name, member in vars(nn.Module).items() if callable(member) and not name.startswith("_")} - _OWN
for name in sorted(_public | _TABLES | _PRIVATE):
    setattr(JittedModule, name, _OfModel(name))


@functools.cache
def _class_with(names: tuple[str, ...]) -> type[JittedModule]:
    """Of jitted modules whose models have these methods of containers: ``jitted[0]``, ``len(jitted)``."""
    members = {"__module__": __name__, "__doc__": JittedModule.__doc__, **{name: _of_container(name) for name in names}}
    return type(JittedModule.__name__, (JittedModule,), members) if names else JittedModule


def _of_container(name: str) -> Any:
    return lambda jitted, *args: getattr(jitted._model, name)(*args)


def present(jitted: ThunderModule) -> None:
    """Make a jitted module one with the members of its model."""
    model = jitted._model
    if isinstance(jitted, JittedModule) or isinstance(model, torch.jit.ScriptModule):
        return
    members = vars(jitted)
    for table in _TABLES:
        members.pop(table, None)
    members["_model"] = model
    jitted.__class__ = _class_with(tuple(name for name in _OF_CONTAINERS if hasattr(type(model), name)))
