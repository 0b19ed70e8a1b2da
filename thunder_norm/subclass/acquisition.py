"""What is known while one trace is acquired: fakes, the proxies they stand for, and where the user's program is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import WrappedValue
from thunder.core.jit_ext import get_jit_ctx
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import NumberProxy, TensorProxy, Variable, variableify
from thunder.core.symbol import BoundSymbol
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.model_state.escapes import tracing_mode
from thunder_norm.subclass import activity
from thunder_norm.subclass.protocol import WrapperSpec, is_wrapper, outer_metadata
from thunder_norm.subclass.proxy import SubclassProxy
from thunder_norm.subclass.refused import Refused
from thunder_norm.tracing.data_dependence import data_dependent_on_wrapper
from thunder_norm.tracing.locations import location_of_user


@dataclass(frozen=True)
class LeafOrigin:
    """An input of the computation that is a norm given for a parameter."""

    name: str
    index: int


@dataclass(frozen=True)
class WrapperOrigin:
    """An input of the computation that is an inner tensor of an input wrapper."""

    wrapper: torch.Tensor
    leaf_name: str


class Replaced(NamedTuple):
    """What became of a plain proxy whose tensor the program changed in place."""

    proxy: TensorProxy
    fake: torch.Tensor
    position: int  # in the trace; from there on the proxy means what the fake stands for


class Acquisition:
    """The fakes of one acquisition and the trace proxies they stand for.

    A fake is known by identity; the table keeps it alive, so an id never comes back.  The table of a functionalised in-place
    operation simply points to the newer proxy.
    """

    recorder_kind: Any = None  # what logs its operations, if it is not `record.Recorder`
    roles: Mapping[str, str] = MappingProxyType({})  # inner tensors that are called by their role: the attribute, a letter

    def __init__(self) -> None:
        self.is_started = False
        self.is_finished = False
        self.mode = tracing_mode()
        self.watches = False  # whether every call of the program must be looked at: there are wrappers, or may be norms
        self.has_wrappers = False
        self.expects_wrappers = False  # some argument or parameter is one, although none was met yet
        self.differentiates = False  # whether torch's autograd runs on the fakes, see `differentiation`
        self.sources: dict[int, torch.Tensor] = {}  # the fakes it starts from, by identity
        self.intermediates: dict[int, tuple[torch.Tensor, TensorProxy]] = {}  # fakes inside composites
        # the recorded operation that made a fake, and the proxies of its arguments then, see `trace.emit_composite`
        self.made_by: dict[int, tuple[Any, dict[int, TensorProxy | None]]] = {}
        self._active: set[str] = set()  # proxies that depend differentiably on an input, as Thunder sees it
        self._num_scanned = 0
        self.is_transformed = False  # the program is a transformed function, which has its own place in torch's autograd
        self.num_levels = 0  # how many functions under function transforms are being interpreted, one in the other
        self.inside_levels: set[int] = set()  # the fakes of wrappers made in those
        self.mentions_wrappers = False  # the program's code names a wrapper class it may construct
        self.refused = Refused()
        self.inner_fakes: dict[int, bool] = {}  # the leaves of input wrappers, and which require grad
        self._held: dict[int, torch.Tensor] = {}  # fakes that the program may hold as plain tensors
        self.replaced: dict[str, Replaced] = {}  # plain proxies that the program holds although their tensor has changed since
        self.strides: dict[str, tuple[int, ...]] = {}  # of plain inputs, by proxy name
        self._proxy_of: dict[int, tuple[FakeTensor, TensorProxy]] = {}
        self._fake_of: dict[str, FakeTensor] = {}
        self._subclass_proxies: dict[int, SubclassProxy] = {}
        self.bound_leaves: dict[int, tuple[TensorProxy, ...]] = {}  # of each wrapper, as the trace knows them
        self.input_fakes: set[int] = set()
        self.user_names: dict[Variable, TensorProxy] = {}  # Thunder's table of proxies it names after the user's variables
        self.readable_names: dict[str, TensorProxy] = {}  # ours, by the name before; see `names`
        self.origins: dict[str, LeafOrigin | WrapperOrigin] = {}  # filled when the traces are lowered
        self._real_inputs: dict[int, torch.Tensor] = {}  # plain inputs by provenance, wrappers by their fakes
        self.side_effect_guards: list[Any] = []  # the places that the program writes into hold what they held
        self.input_specs: dict[int, WrapperSpec] = {}  # of input wrappers, by the identity of their fakes

    # -- what a transform may change ----------------------------------------------------------------------------------

    def begin(self, args: tuple, kwargs: dict) -> None:
        """Called once, with the arguments of the jitted function, before its first operation."""

    def run(self, recorder: Any, fn: Callable, args: Any, kwargs: Any) -> Any:
        """Run one operation on fakes while `recorder` logs."""
        return fn(*args, **kwargs)

    def fetching(self, names: Sequence[str]) -> Callable[[], tuple[torch.Tensor, ...]]:
        """What the prologue calls for inputs that are no arguments: all first tensors of these `names`, then all second ones."""
        raise NotImplementedError

    def wished_names(self, bsym: BoundSymbol) -> Iterator[tuple[TensorProxy, str]]:
        """Names for what an operation of the computation makes, besides those of inner tensors."""
        return iter(())

    def changing_with(self, tree: Any) -> list[torch.Tensor]:
        """Further wrappers that an operation on those in `tree` may change."""
        return []

    def write_hoisted(self, recorder: Any) -> None:
        """Write what must stand in the trace before the operation just recorded."""

    def beyond_no_grad(self) -> set[int]:
        """The fakes, by identity, that `torch.no_grad` is not about: what is computed from them is differentiated anyway."""
        return set()

    def kept(self, value: torch.Tensor) -> torch.Tensor:
        """What an attribute or a container of the user's holds when the program puts a wrapper there; called with fakes too."""
        return value

    def guards(self) -> list[Any]:
        """Bound symbols the prologue must run besides the checks of its inputs."""
        return list(self.side_effect_guards)

    @property
    def intercepts_plain(self) -> bool:
        """Whether operations on plain tensors may be taken over (`wants` says which)."""
        return self.differentiates

    def wants(self, fn: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether an operation without wrappers among its (interpreter-wrapped) arguments is taken over."""
        if not self.differentiates:
            return False
        values = tree_flatten(([value_of(a) for a in args], [value_of(v) for v in kwargs.values()]))[0]
        proxies = [v for v in values if isinstance(v, TensorProxy)]
        if any(p.name in self.replaced for p in proxies):
            return True
        if _is_in_place(fn) and proxies and proxies[0].name in self._fake_of:  # whose other aliases only its fake knows
            return True
        return is_grad_enabled() and any(self.requires_grad(p) for p in proxies)

    # -- differentiation ----------------------------------------------------------------------------------------------

    def differentiate(self) -> None:
        """From now on torch's autograd runs on the fakes: there is a wrapper that requires grad."""
        if self.differentiates or self.is_transformed:
            return
        self.differentiates = self.watches = self.has_wrappers = True
        for fake, proxy in list(self._proxy_of.values()):
            self._note_source(fake, proxy)

    def meets_gradient(self, args: tuple, kwargs: dict) -> bool:
        """Whether a plain tensor that requires grad meets wrappers without any: eager has a gradient, and it is the class's."""
        if self.num_levels or self.differentiates or not is_grad_enabled():  # transforms differentiate inner tensors
            return False
        proxies = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, TensorProxy)]
        fakes = [p.fake for p in proxies if isinstance(p, SubclassProxy)]
        leaves = [self.proxy_of(t) for fake in fakes for t in WrapperSpec.of(fake).leaves(fake)]
        plain = [p for p in proxies if not isinstance(p, SubclassProxy)]
        if not fakes or not any(self.requires_grad(p) for p in plain):
            return False
        return not any(p is None or p.requires_grad or self.requires_grad(p) for p in leaves)

    def requires_grad(self, proxy: TensorProxy) -> bool:
        """Whether the tensor a proxy stands for requires grad, for torch or for Thunder."""
        if isinstance(proxy, SubclassProxy):
            return outer_metadata(proxy.fake)[2]
        fake = self._fake_of.get(proxy.name) if self.differentiates else None
        return self._is_active(proxy) if fake is None else fake.requires_grad

    def _note_source(self, fake: torch.Tensor, proxy: TensorProxy) -> None:
        if (
            not fake.requires_grad
            and fake.dtype.is_floating_point
            and id(fake) not in self.inner_fakes
            and self._is_active(proxy)
        ):
            fake.requires_grad_()
            self.sources[id(fake)] = fake

    def _is_active(self, proxy: TensorProxy) -> bool:
        """Whether Thunder would differentiate what a plain proxy stands for."""
        if proxy.history is not None:
            return proxy.requires_grad
        bsyms = get_jit_ctx().computation_trace.bound_symbols
        for bsym in bsyms[self._num_scanned :]:
            inputs = (p for p in bsym.flat_proxy_args if isinstance(p, TensorProxy))
            self._active.update(p.name for p in inputs if p.history is not None and p.requires_grad)
            activity.propagate(bsym, self._active)
        self._num_scanned = len(bsyms)
        return proxy.name in self._active

    @property
    def meets_wrappers(self) -> bool:
        """Whether there are wrappers in the program, as far as can be known by now."""
        return self.has_wrappers or self.expects_wrappers

    # -- refusals -----------------------------------------------------------------------------------------------------

    def refuse(self, error: Exception) -> Exception:
        """Remember that this program cannot be traced; returns the error, with the user's line."""
        self.watches = True
        return self.refused.note(error)

    # -- fakes of inputs ----------------------------------------------------------------------------------------------

    def new_fake(self, t: torch.Tensor) -> FakeTensor:
        """A fake with the metadata of the real plain tensor `t`."""
        with self.mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    def fake_wrapper(self, x: torch.Tensor) -> torch.Tensor:
        """The wrapper `x` rebuilt over fake inner tensors."""
        spec = WrapperSpec.of(x)
        with torch.no_grad(), self.mode:
            fake = spec.build(tuple(self.new_fake(t) for t in spec.leaves(x)))
        if self.differentiates and spec.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                fake.requires_grad_()
            self.sources[id(fake)] = fake
        return fake

    def note_input(self, key: Any, real: torch.Tensor) -> None:
        """Remember the real tensor an input proxy (by its history) or fake wrapper stands for."""
        self._real_inputs[id(key)] = real

    def real_input(self, proxy: TensorProxy) -> torch.Tensor | None:
        """The real tensor an input proxy stands for."""
        key = proxy.fake if isinstance(proxy, SubclassProxy) else proxy.history
        return self._real_inputs.get(id(key))

    def check_not_own_fake(self, x: torch.Tensor) -> None:
        """Refuse to take one of our fakes for an input: it escaped in a result whose insides cannot be followed.

        Raises:
            UnsupportedOpError: `x` is a fake of this acquisition, or a wrapper around one.
        """
        leaves = WrapperSpec.of(x).leaves(x) if is_wrapper(x) else (x,)
        if any(isinstance(t, FakeTensor) and t.fake_mode is self.mode for t in leaves):
            raise UnsupportedOpError(
                "an operation on a wrapper subclass returned a tensor inside an object that cannot be followed"
            )

    # -- fakes and proxies --------------------------------------------------------------------------------------------

    def bind(self, fake: FakeTensor, proxy: TensorProxy, *, is_input: bool = False) -> None:
        """From now on `fake` stands for `proxy`."""
        before = self.proxy_of(fake)
        if before is not None and before is not proxy and self.is_held(fake):
            self.replaced[before.name] = Replaced(before, fake, len(get_jit_ctx().computation_trace.bound_symbols))
        self._proxy_of[id(fake)] = (fake, proxy)
        self._fake_of[proxy.name] = fake
        if is_input:
            self.input_fakes.add(id(fake))

    def proxy_of(self, fake: torch.Tensor) -> TensorProxy | None:
        """The proxy a plain fake stands for now."""
        found = self._proxy_of.get(id(fake))
        return found[1] if found is not None else None

    def fake_of(self, proxy: TensorProxy) -> torch.Tensor:
        """The fake for a proxy; a plain proxy met for the first time gets one (and counts as an input)."""
        if isinstance(proxy, SubclassProxy):
            return proxy.fake
        fake = self._fake_of.get(proxy.name)
        if fake is None:
            shape = tuple(int(s.value) if isinstance(s, NumberProxy) else int(s) for s in proxy.shape)
            dtype, device = dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device)
            with self.mode:
                stride = self.strides.get(proxy.name)
                fake = (
                    torch.empty(shape, dtype=dtype, device=device)
                    if stride is None
                    else torch.empty_strided(shape, stride, dtype=dtype, device=device)
                )
            self.bind(fake, proxy, is_input=True)
            if self.differentiates:
                self._note_source(fake, proxy)
        return fake

    def current(self, proxy: TensorProxy) -> TensorProxy:
        """What a proxy of the acquisition is called in the finished trace."""
        proxy = self.user_names.get(variableify(proxy), proxy)
        return self.readable_names.get(proxy.name, proxy)

    def fakes_by_name(self) -> dict[str, torch.Tensor]:
        """The fakes of plain proxies by the names they have in the finished trace."""
        original = {p.name: variable.proxy.name for variable, p in self.user_names.items()}
        original |= {p.name: original.get(name, name) for name, p in self.readable_names.items()}
        return self._fake_of | {new: self._fake_of[old] for new, old in original.items() if old in self._fake_of}

    def layout_of(self, proxy: TensorProxy) -> FakeTensor | None:
        """The fake whose strides are those `proxy` has in eager mode; None where only Thunder computed it."""
        return self._fake_of.get(proxy.name)

    def shares_storage_with_another(self, fake: torch.Tensor) -> bool:
        """Whether some other known fake is a view of the same storage."""
        storage = fake.untyped_storage()._cdata
        return any(other is not fake and other.untyped_storage()._cdata == storage for other, _ in list(self._proxy_of.values()))

    def may_write_back(self, fake: torch.Tensor) -> bool:
        """Whether `fake` is an inner tensor of an input that takes no part in differentiation; see `write_back`."""
        return not self.differentiates and self.inner_fakes.get(id(fake)) is False

    def hold(self, fake: torch.Tensor) -> None:
        """The program got hold of `fake` as a plain tensor."""
        self._held[id(fake)] = fake

    def is_held(self, fake: torch.Tensor) -> bool:
        """Whether the program may hold `fake` as a plain tensor; Thunder would not see it change."""
        return id(fake) in self._held

    def may_replace(self) -> bool:
        """Whether the program may change a plain tensor that it holds: all its later uses are met here, and mean the new value."""
        return self.differentiates and not self.num_levels and len(get_jit_ctx().computation_trace.scopes) == 1

    def subclass_proxy(self, fake: torch.Tensor) -> SubclassProxy | None:
        """The SubclassProxy made for this fake wrapper, if there is one."""
        return self._subclass_proxies.get(id(fake))

    def subclass_proxies(self) -> tuple[SubclassProxy, ...]:
        """The proxies of all wrappers met so far."""
        return tuple(self._subclass_proxies.values())

    def register(self, proxy: SubclassProxy) -> SubclassProxy:
        """Remember the proxy of a fake wrapper, so that one wrapper has one proxy."""
        self._subclass_proxies[id(proxy.fake)] = proxy
        if self.num_levels:
            self.inside_levels.add(id(proxy.fake))
        self.has_wrappers = self.watches = True
        return proxy

    def spec_of(self, proxy: SubclassProxy) -> WrapperSpec:
        """What the prologue must find in the input this proxy stands for (the interpreter may have renamed it)."""
        return self.input_specs[id(proxy.fake)]

    def to_fake(self, value: Any) -> Any:
        """An argument as the user's torch function should see it: fakes for proxies, torch's types for Thunder's."""
        if isinstance(value, TensorProxy):
            return self.fake_of(value)
        if isinstance(value, NumberProxy):
            if value.value is None:
                raise data_dependent_on_wrapper("a number read from a tensor was passed to an operation on a wrapper subclass")
            return value.value
        if isinstance(value, dtypes.dtype):
            return dtypes.to_torch_dtype(value)
        if isinstance(value, devices.Device):
            return devices.to_torch_device(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.to_fake(v) for v in value))
        if type(value) in (list, tuple, torch.Size):
            return type(value)(self.to_fake(v) for v in value)
        if isinstance(value, dict):
            return {k: self.to_fake(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(*(self.to_fake(v) for v in (value.start, value.stop, value.step)))
        if is_wrapper(value):
            raise UnsupportedOpError(f"a {type(value).__name__} that is not an input of the jitted function is used inside it")
        return value

    def check_cache_option(self) -> None:
        """Refuse wrappers in traces that are to serve other shapes and numbers: fakes are static.

        Raises:
            UnsupportedOpError: the function was jitted with ``cache="symbolic values"``.
        """
        if get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES:
            raise UnsupportedOpError(
                with_details(
                    'a wrapper subclass in a function jitted with cache="symbolic values"',
                    at=location_of_user(),
                    why="its trace would be used for other shapes and numbers, which a wrapper's operations may depend on",
                    instead='use cache="constant values" (the default) or cache="no caching"',
                )
            )


def _is_in_place(fn: Callable) -> bool:
    name = getattr(fn, "__name__", "")
    is_augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return is_augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def is_grad_enabled() -> bool:
    """Whether the program being traced is in a region that records gradients."""
    cd = get_compile_data()
    return torch.is_grad_enabled() if cd is None else cd.is_grad_enabled


@contextlib.contextmanager
def gradients_recorded(is_recorded: bool) -> Iterator[None]:
    """What is written into the trace inside the block has derivatives, or has none, whatever the program says there."""
    cd = get_compile_data()
    if cd is None:
        yield
        return
    was_enabled, cd.is_grad_enabled = cd.is_grad_enabled, is_recorded
    try:
        yield
    finally:
        cd.is_grad_enabled = was_enabled


def value_of(a: Any) -> Any:
    """What an argument wrapped by the interpreter is, lists and tuples of wrapped values included."""
    value = a.value if isinstance(a, WrappedValue) else a
    return [value_of(v) for v in value] if type(value) in (list, tuple) else value
