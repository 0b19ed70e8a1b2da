"""Operations of torch's that write into what they are given, and those that return it instead."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from thunder_norm.numbered_generators import Numbered, name_with, numbered
from thunder_norm.op_names import identifier

aten = torch.ops.aten

# They write into several arguments, or into one that is not the first; the functional form returns what these become after its results.
_WITH_RESULTS = {
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default: aten._batch_norm_with_update_functional.default,
    aten.rrelu_with_noise.default: aten.rrelu_with_noise_functional.default,
    aten.rrelu_with_noise_.default: aten.rrelu_with_noise_functional.default,
}


def without_outs(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """For an overload that writes what it computes into arguments named for it (``out=``): the one that returns it, and their names."""
    arguments = func._schema.arguments
    outs = tuple([a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write])
    wanted = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
    if (
        not outs
        or func.namespace != "aten"
        or any(a.alias_info is not None and a.alias_info.is_write for a in arguments[: -len(outs)])
    ):
        return None
    for overload in func.overloadpacket.overloads():
        found = getattr(func.overloadpacket, overload)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found, outs
    return None


# Arguments that torch's autograd does not differentiate: they stay without history whatever is written into them.
WITHOUT_HISTORY = frozenset({"running_mean", "running_var", "noise"})


def declared(func: Any, args: tuple) -> Any:
    """For a batch normalization that writes running statistics without saying so in its schema, the one on a CPU that says it."""
    writes_unsaid = func is aten.native_batch_norm.default and args[5] and args[3] is not None and args[4] is not None
    return aten._native_batch_norm_legit.default if writes_unsaid and args[0].device.type == "cpu" else func


def returning_what_it_writes(func: Any) -> Any | None:
    """The overload that returns the results of `func`, and then what becomes of each argument that this writes into."""
    return _WITH_RESULTS.get(func)


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, which is not differentiated; see `trace.composite`."""
    return tensor.detach()


def rewritten(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What a tensor becomes that is written into under `torch.no_grad`: the value, with the history that the tensor has."""
    result = tensor.clone()
    with torch.no_grad():
        return result.copy_(value)


@dataclass(frozen=True)
class Drawn:
    """The function ``(tensor, strides, ...) -> tensor`` that draws numbers into a new one of these strides, on which their order hangs.

    Attributes:
        func: draws into what it is given, whatever is in there (``uniform_``), or what is like it (``rand_like``).
    """

    func: torch._ops.OpOverload

    @property
    def __name__(self) -> str:
        """What the operation is called in traces."""
        return identifier(self.func) + "_with_strides"

    @property
    def tags(self) -> list[torch.Tag]:
        """Those of torch's operation."""
        return self.func.tags

    @property
    def overloadpacket(self) -> Any:
        """Torch's functions of the name without the underscore."""
        return getattr(aten, self.func.overloadpacket.__name__.rstrip("_"))

    def __call__(self, tensor: torch.Tensor, strides: tuple[int, ...], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A tensor of the shape of `tensor`; of the rest of what torch's operation is given the format in memory is left out."""
        return self.func(tensor.new_empty_strided(tensor.shape, strides), *args, **kwargs)


@dataclass(frozen=True)
class FromGenerator:
    """An operation that draws numbers, from a generator of the program's: no argument of it, so that each has operations of its own.

    Attributes:
        func: torch's operation, or one that is `Drawn`.
        source: the generator.
    """

    func: Any
    source: Numbered

    @property
    def __name__(self) -> str:
        """What the operation is called in traces."""
        name = str(self.func) if isinstance(self.func, torch._ops.OpOverload) else self.func.__name__
        return name_with(identifier(name), self.source)

    @property
    def tags(self) -> list[torch.Tag]:
        """Those of torch's operation."""
        return self.func.tags

    @property
    def overloadpacket(self) -> Any:
        """Torch's functions of that name."""
        return self.func.overloadpacket

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch's operation returns; tensors without data take no numbers."""
        is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        return self.func(*args, **kwargs, generator=None if is_fake else self.source.generator)


def with_generator(func: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """An operation and its arguments, with the generator among these in the operation."""
    if args and isinstance(args[-1], torch.Generator):  # of poisson and binomial
        return FromGenerator(func, numbered(args[-1])), args[:-1], kwargs
    generator = kwargs.get("generator")
    if not isinstance(generator, torch.Generator):
        return func, args, kwargs
    return FromGenerator(func, numbered(generator)), args, {name: v for name, v in kwargs.items() if name != "generator"}


LIKE = frozenset({aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype})


def is_view(func: Any) -> bool:
    """Whether an overload returns its first argument as another view, as ``t``, of which ``t_`` is the form in place."""
    if not isinstance(func, torch._ops.OpOverload) or len(func._schema.returns) != 1:
        return False
    alias = func._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def functional_variant(func: Any) -> Any | None:
    """The out-of-place overload of an in-place aten overload, if there is one with the same arguments."""
    if func is aten.normal_.default:
        return aten.normal_functional.default  # whose first argument has another name
    name = func.overloadpacket.__name__
    if not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_"), None)  # __ior__ is x |= y
    if func.namespace != "aten" or packet is None:
        return None
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in packet.overloads():  # pow_.Scalar(Tensor, Scalar) goes with pow.Tensor_Scalar
        found = getattr(packet, overload)
        if not found._schema.is_mutable and [(a.name, str(a.type)) for a in found._schema.arguments] == wanted:
            return found
    return None


def with_defaults(func: Any, args: tuple, kwargs: dict) -> tuple:
    """All positional arguments: those left out may have no default in the functional variant (bernoulli's p)."""
    rest = func._schema.arguments[len(args) :]
    given = itertools.takewhile(lambda a: not a.kwarg_only and a.name not in kwargs and a.has_default_value(), rest)
    return (*args, *(a.default_value for a in given))
