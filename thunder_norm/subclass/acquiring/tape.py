"""What a program does with wrappers, kept to be done again on real ones: for gradients that are differentiated again.

The backward of a program with wrappers that require grad is torch's, recorded once, on inner tensors.  Derivatives of higher order go
through the classes again, each operation anew.  So the operations of the program are remembered as it called them; where somebody asks
for a graph of the backward, they run on the inputs of the call under torch's autograd, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.subclass.classes.protocol import WrapperSpec
from thunder_norm.wrapper_classes import is_wrapper
from thunder.core.proxies import TensorProxy


@dataclass(frozen=True)
class _Call:
    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    records_gradients: bool


@dataclass(frozen=True)
class Constant:
    """A plain tensor without a gradient that Thunder computes, a mask or a table say.

    Attributes:
        fake: what stands for it in the operations.
        given: the inputs of the program that it is computed from.
        compute: from tensors for these.
    """

    fake: torch.Tensor
    given: Sequence[TensorProxy]
    compute: Callable[..., torch.Tensor]


class Tape:
    """The operations of one program, on fakes.

    Attributes:
        given: the fakes of inputs that gradients are for, or that the operations use.
        constants: what the operations use besides.
        given_for_constants: the inputs that these are computed from.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._is_whole = True
        self.given: list[torch.Tensor] = []
        self.constants: list[Constant] = []
        self.given_for_constants: list[TensorProxy] = []

    @property
    def num_inputs(self) -> int:
        """How many tensors it runs on."""
        return len(self.given) + len(self.given_for_constants)

    def note(self, function: Callable, args: tuple, kwargs: dict[str, Any], result: Any, records_gradients: bool) -> None:
        """Remember an operation."""
        self._calls.append(_Call(function, args, kwargs, result, records_gradients))

    def tear(self) -> None:
        """It cannot be run again: the program has something else in it."""
        self._is_whole = False

    def covers(
        self,
        inputs: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        constant: Callable[[torch.Tensor], Constant | None],
    ) -> bool:
        """Whether it computes all `results`, and each tensor that an operation takes, from `inputs`, the `sources` among them.

        Others that an operation takes may be a `constant`.
        """
        known, used = {i for t in inputs for i, _ in _parts(t, t)}, {id(t) for t in sources}
        for call in self._calls:
            leaves = tree_leaves((call.args, call.kwargs))
            tensors = [v for v in leaves if isinstance(v, torch.Tensor) and (is_wrapper(v) or isinstance(v, FakeTensor))]
            found = [constant(t) for t in {id(t): t for t in tensors if id(t) not in known}.values()]
            if None in found or any(isinstance(v, torch.SymInt) for v in leaves):
                return False
            self.constants += (c for c in found if c is not None)
            used |= {id(t) for t in tensors}
            made = [v for v in tree_leaves(call.result) if isinstance(v, torch.Tensor)]
            known |= {i for t in (*tensors, *made) for i, _ in _parts(t, t)}
        self.given = [t for t in inputs if any(i in used for i, _ in _parts(t, t))]
        self.given_for_constants = list({p.name: p for c in self.constants for p in c.given}.values())
        return self._is_whole and all(id(t) in known for t in (*sources, *results))

    def gradients(
        self, result: torch.Tensor, cotangent: torch.Tensor, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of `inputs`, the real tensors in place of those given, for the cotangent of the fake `result`.

        With a history where a graph of the backward is asked for.
        """
        has_history = torch.is_grad_enabled()
        with torch.enable_grad():
            own = [_Own.apply(t) if t.requires_grad else t for t in inputs]
            out = self._run(own)[id(result)]
            leaves = [t for t in own if t.requires_grad]
            found = iter(torch.autograd.grad(out, leaves, cotangent, create_graph=has_history, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in own]

    def _run(self, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        given, others = inputs[: len(self.given)], inputs[len(self.given) :]
        values = dict(part for fake, t in zip(self.given, given, strict=True) for part in _parts(fake, t))
        named = {p.name: t for p, t in zip(self.given_for_constants, others, strict=True)}
        with torch.no_grad():
            values |= {id(c.fake): c.compute(*(named[p.name] for p in c.given)) for c in self.constants}
        for call in self._calls:
            args, kwargs = tree_map(lambda v: values.get(id(v), v), (call.args, call.kwargs))
            # a derivative of wrappers is taken where their classes are not asked about functions of torch's any more
            with torch._C._EnableTorchFunction(), torch.set_grad_enabled(call.records_gradients):
                made = call.function(*args, **kwargs)
            fakes, tensors = tree_leaves((call.args, call.kwargs, call.result)), tree_leaves((args, kwargs, made))
            if len(fakes) != len(tensors) or any(
                type(f) is not type(t) for f, t in zip(fakes, tensors, strict=True) if is_wrapper(f)
            ):
                raise UnsupportedOpError(
                    with_details(
                        "create_graph=True through a jitted program with wrappers",
                        why=f"{getattr(call.function, '__name__', call.function)} returns something else than while it was traced",
                    )
                )
            for fake, t in zip(fakes, tensors, strict=True):
                values.update(_parts(fake, t) if isinstance(fake, torch.Tensor) else ())
        return values


def _parts(fake: torch.Tensor, t: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The identities of a fake and of its inner tensors, and what stands for these."""
    found = [(id(fake), t)]
    if is_wrapper(fake):
        found += [(id(f), inner) for f, inner in zip(WrapperSpec.of(fake).leaves(fake), WrapperSpec.of(t).leaves(t), strict=True)]
    return found


class Again(torch.autograd.Function):
    """A plain result, with gradients of the tape where they are to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradients: Callable, t: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        """`gradients` are `Tape.gradients` of the result; `given` are the real tensors that the tape runs on."""
        ctx.gradients, ctx.num_given = gradients, len(given)
        ctx.save_for_backward(*given)
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The cotangent handed on, or the gradients of all that was given."""
        if torch.is_grad_enabled():
            return None, None, *ctx.gradients(grads[0], ctx.saved_tensors)
        return None, grads[0], *(None,) * ctx.num_given


class _Own(torch.autograd.Function):
    """An input as a tensor of its own: gradients for it are not those for what it was computed from."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        if not is_wrapper(t):
            return t.detach()
        spec = WrapperSpec.of(t)  # what is not asked of the class, which may count what it is asked for
        return spec.build(tuple([inner.detach() if inner.is_floating_point() else inner for inner in spec.leaves(t)]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]
