"""Programs that draw random numbers, and running one again with those that it drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch

from thunder_norm.context_variables import setting
from thunder_norm.numbered_generators import drawn_from
from thunder_norm.random_states import remembered
from thunder_norm.tracing.tags import has_any_tag
from thunder.core import prims
from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx


class States(NamedTuple):
    """Of random generators.

    Attributes:
        on_cpu: of torch's for the CPU.
        on_devices: of torch's for each GPU.
        own: of a program's own generators.
    """

    on_cpu: torch.Tensor
    on_devices: list[torch.Tensor]
    own: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()


# Operations that torch or Thunder has, some of which are without the tag of those that draw.
NAMES = frozenset(
    "_sample_dirichlet _standard_gamma alpha_dropout bernoulli binomial dropout dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout fractional_max_pool2d "
    "fractional_max_pool3d gumbel_softmax multinomial native_dropout normal poisson rand rand_like randint randint_like randn "
    "randn_like randperm rrelu".split()
)
RANDOM = frozenset({prims.OpTags.RANDOM_OP})
_UNTAGGED = NAMES - {"dropout", "rrelu"}  # those of torch.nn.functional draw where a part of them does
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})  # draw where they have dropout between layers


def draws_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation draws random numbers, or may."""
    return draws(bsym) or any(map(draws_numbers, bsym.subsymbols))


def draws(bsym: BoundSymbol) -> bool:
    """Whether an operation draws random numbers itself, whatever it consists of: Thunder's normal and integer ones have no tag."""
    if bsym.sym.name in RECURRENT:
        return _drops_between_layers(bsym)
    return has_any_tag(bsym, RANDOM) or bsym.sym.name in _UNTAGGED or bsym.sym.id == "torch.dropout"


def _drops_between_layers(bsym: BoundSymbol) -> bool:
    """Of torch.lstm and its like, packed or not: ``has_biases, num_layers, dropout, train`` come after the tensors."""
    first = next((i for i, a in enumerate(bsym.args) if isinstance(a, bool)), None)
    if first is None:
        return False
    num_layers, dropout, is_training = bsym.args[first + 1 : first + 4]
    return bool(is_training and dropout > 0 and num_layers > 1)


def keep_draws(trace: TraceCtx) -> None:
    """Have what draws numbers in regions that are computed again in the backward run once: it would draw others there.

    Relies on ``thunder.core.jit_ext`` and ``thunder.transforms.autodiff``: what is computed again is known by a tag of its results.
    """
    for bsym in trace.bound_symbols:
        if draws_numbers(bsym):
            _keep(bsym)


def _keep(bsym: BoundSymbol) -> None:
    bsym.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
    for p in bsym.flat_proxy_outs:
        p.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)
    for part in bsym.subsymbols:
        _keep(part)


def count_draws(bsym: BoundSymbol) -> int:
    """How many operations that draw random numbers an operation consists of."""
    return sum(map(count_draws, bsym.subsymbols)) or draws(bsym)


def own_generators(bsyms: Iterable[BoundSymbol]) -> tuple[torch.Generator, ...]:
    """Those that operations, or what they consist of, draw from beside torch's, each once."""
    return tuple(
        {id(g): g for b in bsyms for g in (drawn_from(b.sym.name), *own_generators(b.subsymbols)) if g is not None}.values()
    )


# of a program that is run again, which draws from them where it is differentiated once more
_drawn_again: ContextVar[Sequence[torch.Generator]] = ContextVar("thunder_norm_drawn_again", default=())


def states(own: Sequence[torch.Generator] = ()) -> States:
    """Those of torch's generators, of the CPU and of all GPUs, and of a program's own: of one that is run again, or of which they are given."""
    own = own or _drawn_again.get()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return States(torch.get_rng_state(), on_devices, tuple((g, g.get_state()) for g in own))


def have_drawn_since(found: States) -> bool:
    """Whether torch's generators have others by now."""
    now = states()
    pairs = ((now.on_cpu, found.on_cpu), *zip(now.on_devices, found.on_devices, strict=False))
    return any(not torch.equal(a, b) for a, b in pairs)


def set_states(found: States) -> None:
    """Have the generators go on from these."""
    torch.set_rng_state(found.on_cpu)
    if found.on_devices:
        torch.cuda.set_rng_state_all(found.on_devices)
    for generator, state in found.own:
        generator.set_state(state)


@contextlib.contextmanager
def restored(found: States | None) -> Iterator[None]:
    """What runs here draws what was drawn from these states on, without disturbing what is drawn later."""
    if found is None:
        yield
        return
    put_back = [remembered(g) for g, _ in found.own]
    try:
        with (
            setting(_drawn_again, [g for g, _ in found.own]),
            torch.random.fork_rng(range(len(found.on_devices)), device_type="cuda"),
        ):
            set_states(found)
            yield
    finally:
        for put in put_back:
            put()
