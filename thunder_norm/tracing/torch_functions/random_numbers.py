"""Programs that draw random numbers, and running one again with those that it drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from thunder_norm.tracing.tags import has_any_tag
from thunder.core import prims
from thunder.core.proxies import ProxyTag
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx

States = tuple[torch.Tensor, list[torch.Tensor]]


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


def states() -> States:
    """Those of torch's generators, of the CPU and of all GPUs."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def have_drawn_since(found: States) -> bool:
    """Whether torch's generators have others by now."""
    on_cpu, on_devices = states()
    return not torch.equal(on_cpu, found[0]) or any(not torch.equal(a, b) for a, b in zip(on_devices, found[1], strict=False))


def set_states(found: States) -> None:
    """Have torch's generators go on from these."""
    torch.set_rng_state(found[0])
    if found[1]:
        torch.cuda.set_rng_state_all(found[1])


@contextlib.contextmanager
def restored(found: States | None) -> Iterator[None]:
    """What runs here draws what was drawn from these states on, without disturbing what is drawn later."""
    if found is None:
        yield
        return
    with torch.random.fork_rng(range(len(found[1])), device_type="cuda"):
        set_states(found)
        yield
