"""Rows of the table, each made by a process of its own that may take only so much time and memory."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers  # noqa: F401 - once, and not by each process

from .case import Model, built
from .outcomes import one_line, outcome

SECONDS = 300
BYTES = 10 * 2**30  # of the process's own data


class NotRunError(RuntimeError):
    """Eager PyTorch cannot run a model, or not in the time."""


def made(model: Model, columns: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """The columns of one model: what they are when the process ends or its time is over.

    The process is a fork of this one, which has imported everything and run nothing.

    Raises:
        NotRunError: eager PyTorch cannot run it.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(model, columns, sender))
    process.start()
    sender.close()
    found, why = _received(receiver, time.monotonic() + seconds)
    if process.is_alive() and why:
        process.kill()
    process.join()
    why = why or f"the process ended with {process.exitcode}"
    if "model" not in found:
        raise NotRunError(f"{model.name} does not run in eager PyTorch: {found.get('why', why)}")
    missing = [column for column in columns if column not in found]
    for column in missing:
        found[column] = {"error": f"Ended: {why}" if column == missing[0] else f"NotReached: {why}"}
    return found


def _received(receiver: Connection, deadline: float) -> tuple[dict[str, Any], str]:
    """What came until the process closed its end, and why there is no more if it did not."""
    found: dict[str, Any] = {}
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            found |= receiver.recv()
        except EOFError:
            return found, ""
    return found, "out of time"


def _work(model: Model, columns: Sequence[str], sender: Connection) -> None:
    """What the process of a row does: hand over each column as it is done."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    try:
        b = built(model)
        with torch.no_grad():
            b()  # a model that eager PyTorch cannot run is no row of the table
    except Exception as e:
        sender.send({"why": one_line(e, longest=1000)})
        raise
    sender.send({"model": {"source": model.source, "parameters": sum(p.numel() for p in b.module.parameters())}})
    for column in columns:
        sender.send({column: outcome(model, column)})
