"""Fewer looks for garbage while a program is compiled.

A compilation makes some hundred thousand objects, nearly all of which stay.  Python's collector looks at new objects after every 700, and
at all objects of the process, torch's and Thunder's modules included, whenever their number has grown by a quarter: a third of a first
call.  Meanwhile it waits for more; it is not switched off, so that a long compilation, and the other threads of the process, do
not go without.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# New objects before a look at the new ones, such looks before one at those that stayed, and those before one at all.
THRESHOLDS = (100_000, 50, 1000)

_lock = threading.RLock()  # a collection may come inside, and what it finalizes may compile
_num_users = 0
_before = _meanwhile = THRESHOLDS


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Let the collector look for cycles rarely meanwhile, in all threads.

    Who switched it off, or set other thresholds inside, finds what they did; one that looks even more rarely is left as it is.
    """
    global _num_users, _before, _meanwhile
    with _lock:
        if _num_users == 0:
            _before = gc.get_threshold()
            if _before[0] > 0:  # 0: it never looks
                gc.set_threshold(*map(max, _before, THRESHOLDS))
            _meanwhile = gc.get_threshold()  # a Python without an oldest generation keeps no third number
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0 and gc.get_threshold() == _meanwhile:
                gc.set_threshold(*_before)
