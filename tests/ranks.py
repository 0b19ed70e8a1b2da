"""Run a function in several processes that talk over gloo, as the ranks of one program."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import FORKS
from tests.seeds import seeded


def run_ranks(world: int, check: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """``check(*args)`` in each of `world` ranks: what they return, in order.

    Raises:
        AssertionError: a rank failed, with its traceback; or one did not finish in time.
    """
    outcomes = FORKS.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            FORKS.Process(target=_run, args=(rank, world, Path(folder), outcomes, check, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(outcomes, world, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.terminate()
                process.join()


def _collect(outcomes: Any, world: int, deadline: float) -> list[Any]:
    results, failures = {}, {}
    while len(results) + len(failures) < world:
        try:
            # those that wait for a rank that failed are given a moment to fail by themselves
            rank, failure, result = outcomes.get(timeout=5.0 if failures else max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            break
        (failures if failure else results)[rank] = failure or result
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    late = sorted(set(range(world)) - results.keys())
    assert not late, f"ranks {late} did not finish"
    return [results[rank] for rank in range(world)]


def _run(rank: int, world: int, folder: Path, outcomes: Any, check: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seeded(rank))  # no two ranks draw the same numbers by chance
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    try:
        outcomes.put((rank, None, check(*args)))
    except BaseException:  # noqa: BLE001 - the parent fails with it
        outcomes.put((rank, traceback.format_exc(), None))
    outcomes.close()
    outcomes.join_thread()
    time.sleep(600)  # until the parent ends it: a rank that left would be an error to those still working
