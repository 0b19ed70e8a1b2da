"""Programs that draw random numbers, and running one again with those that it drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from thunder.core import prims
from thunder.core.symbol import BoundSymbol, has_tags

States = tuple[torch.Tensor, list[torch.Tensor]]


# Operations that Thunder has without the tag of those that draw.
_UNTAGGED = frozenset(
    "randn randn_like randint randint_like randperm normal poisson binomial gumbel_softmax alpha_dropout feature_alpha_dropout "
    "dropout1d dropout2d dropout3d fractional_max_pool2d fractional_max_pool3d".split()
)


def draws_numbers(bsym: BoundSymbol) -> bool:
    """Whether an operation draws random numbers, or may."""
    return _draws(bsym) or any(draws_numbers(s) for s in bsym.subsymbols)


def _draws(bsym: BoundSymbol) -> bool:
    return has_tags(bsym, {prims.OpTags.RANDOM_OP}) or bsym.sym.name in _UNTAGGED


def count_draws(bsym: BoundSymbol) -> int:
    """How many operations that draw random numbers an operation consists of."""
    return sum(map(count_draws, bsym.subsymbols)) or _draws(bsym)


def states() -> States:
    """Those of torch's generators, of the CPU and of all GPUs."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


@contextlib.contextmanager
def restored(found: States | None) -> Iterator[None]:
    """What runs here draws what was drawn from these states on, without disturbing what is drawn later."""
    if found is None:
        yield
        return
    on_cpu, on_devices = found
    with torch.random.fork_rng(range(len(on_devices)), device_type="cuda"):
        torch.set_rng_state(on_cpu)
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        yield
