"""What `norm_report(..., precision=...)` predicts of models in low precision, and what PyTorch's results in it differ by."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_map

from benchmarks import first_calls_models, models, timing
from thunder_norm import RMSTensor, norm_report
from thunder_norm.transforms import NormTransform
import thunder

METHOD = (
    "The root mean square error of the results, over what is predicted of it. bfloat16 and float16 are run by PyTorch; with 8 bits the "
    "operands of matrix products and convolutions, and all results, are rounded while the model runs in float32. Random weights, eval mode."
)
PEER = "plain"
FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows of the suite."""
    names = [n for n in first_calls_models.CASES if n != "GPT-2, 12 layers"]
    return [row for name in (names[:1] if options.rounds < 10 else names) for row in _rows(name)]


def _rows(name: str) -> list[dict[str, Any]]:
    model, kwargs = first_calls_models.made(name)
    model.eval()
    plain = dict(kwargs)
    normed = tree_map(lambda t: RMSTensor.of(t) if t.is_floating_point() else t, plain)
    jm = thunder.jit(model, transforms=[NormTransform()])

    found: dict[str, Any] = {}

    def report(name: str) -> None:
        precision = None if name == PEER else getattr(torch, name)
        found[name] = norm_report(jm, **normed, precision=precision).precision

    candidates = {name: functools.partial(report, name) for name in (PEER, *FORMATS)}
    rows = timing.rows(name, timing.in_turns(candidates, 2, seconds=0, warm_up=0), PEER)
    return [{**row, **_found(found[row["candidate"]])} if row["candidate"] != PEER else row for row in rows]


def _found(precision: Any) -> dict[str, Any]:
    size = {name: getattr(precision, name) for name in ("typical", "measured_typical", "bound", "measured", "measured_by")}
    return {"precision": size}
