"""A program is run to learn something about it, and leaves nothing behind.

The runs of `norm_report`, `build_norm_map`, `ModularNorm` and `profile` are on normed tensors, on tensors without data, or on stand-ins for
parameters.  What a module keeps of such a run (a table it caches, running statistics, a counter) is nothing its owner wants.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from thunder_norm.core.tensors import NormedTensor
from thunder_norm.model_state.escapes import stand_in
from thunder_norm.model_state.reachable import Reachable
from thunder_norm.model_state.tensor_data import Leaves, WriteLog
from thunder_norm.random_states import remembered, state_of


def undisturbed(*roots: Any) -> contextlib.AbstractContextManager[None]:
    """What a program does inside to its surroundings is undone at the end, also if it raises: see `Surroundings`."""
    return Surroundings(*roots).undisturbed()


class Surroundings:
    """What a program can reach and change, as it is now; for runs of it that leave that as it is.

    That is: attributes of modules, of their classes and of other objects, containers reachable from them, global variables that their
    code mentions, the data, gradients and flags of tensors, and the states of random generators.  Caches of `functools.lru_cache`
    that took in a norm or a tensor without data are emptied.

    Args:
        *roots: the program, its arguments and what else it may change.
    """

    def __init__(self, *roots: Any):
        self._found = Reachable(roots)
        self._leaves = Leaves(self._found.tensors)
        self._set_back = [remembered(g) for g in self._found.generators]

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What a program does inside is undone at the end, also if it raises; what ``torch.compile`` wrapped runs as it was written."""
        caches = self._found.caches
        sizes = [c.cache_info().misses for c in caches]
        log = WriteLog()
        with _same_random_numbers(), _as_written():
            try:
                with log:
                    yield
            finally:
                self._restore(log)
                for cache, misses in zip(caches, sizes, strict=True):
                    if cache.cache_info().misses != misses and _holds_none_of_its_own(cache):
                        cache.cache_clear()

    def is_changed(self) -> bool:
        """Whether an attribute, a container or a global variable holds something else by now; of the data of tensors it knows nothing."""
        return any(place.is_changed for place in self._found.places)

    def random_states(self) -> list[Any]:
        """The states of all random generators that a program can reach, to compare: torch's, Python's, NumPy's and those it holds."""
        states: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
        if torch.cuda.is_initialized():
            states += [state.tolist() for state in torch.cuda.get_rng_state_all()]
        if (numpy := sys.modules.get("numpy")) is not None:
            states.append(
                [str(part) if isinstance(part, str) else list(map(float, numpy.ravel(part))) for part in numpy.random.get_state()]
            )
        return states + [state_of(g) for g in self._found.generators]

    def _restore(self, log: WriteLog) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for place in self._found.places:
                place.restore()
            self._leaves.restore()
            log.restore()
            for restore in self._set_back:
                restore()


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Numbers drawn inside are drawn again afterwards: torch's, Python's and NumPy's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy = sys.modules.get("numpy")
    own, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(numpys)


def _as_written() -> contextlib.AbstractContextManager[Any]:
    """Dynamo, if anything has loaded it, compiles nothing: it knows neither norms nor modes that watch operations."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _holds_none_of_its_own(cache: Any) -> bool:
    """Whether a result in an `lru_cache` is a norm or a tensor without data; CPython tells of its table to the garbage collector."""
    pending, seen = [cache], {id(cache.__wrapped__), id(cache.__dict__)}
    while pending:
        for v in gc.get_referents(pending.pop()):
            if id(v) in seen:
                continue
            seen.add(id(v))
            if isinstance(v, NormedTensor) or stand_in(v) is not None:
                return True
            if isinstance(v, dict | list | tuple) or type(v).__name__ == "_lru_list_elem":
                pending.append(v)
    return False
