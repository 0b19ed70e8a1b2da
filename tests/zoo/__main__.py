"""The table in docs/subclasses.md: ``python -m tests.zoo --write`` runs every case and rewrites it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.parts import exchanged
from tests.subclasses import assert_same
from thunder_norm.errors import ThunderNormError
from thunder_norm.transforms import SubclassTransform
import thunder

from . import ZOO, Case, built, gradients
from .page import BEGIN, PAGE, Row, render


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")


def ours(options: dict[str, Any]) -> Callable:
    return lambda function: thunder.jit(function, transforms=[SubclassTransform(**options)])


def forward(entry: Case, compile: Callable) -> str:
    """``yes``, or what went wrong."""
    with torch.no_grad():
        function, args = built(entry)
        expected = function(*args)
        own, own_args = built(entry)
        return outcome(lambda: assert_same((compile(own)(*own_args), own_args), (expected, args)))


def backward(entry: Case, compile: Callable) -> str:
    """The same for gradients; a dash where eager has none."""
    if not entry.backward:
        return "-"
    function, args = built(entry)
    expected = gradients(function, args, function)
    own, own_args = built(entry)
    return outcome(lambda: assert_same(gradients(own, own_args, compile(own)), expected))


def outcome(run: Callable[[], None]) -> str:
    try:
        run()
    except ThunderNormError as e:
        return "refused: " + str(e).splitlines()[0]
    except AssertionError as e:
        return "wrong" if is_comparison(e) else "fails: AssertionError"
    except Exception as e:  # noqa: BLE001 - that is what the table says
        return f"fails: {type(e).__name__}"
    return "yes"


def is_comparison(error: AssertionError) -> bool:
    """Whether it is `assert_same` that failed, and not an assertion of the program."""
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
        if frame.tb_frame.f_code.co_name == "assert_same":
            return True
    return False


def measured(entry: Case) -> Row:
    """Ours first: where torch.compile fails it may leave fake meshes in the caches of DTensors, which eager mode cannot do with either."""
    by_us = forward(entry, ours(entry.options)), backward(entry, ours(entry.options))
    return Row(entry.name, ", ".join(entry.roles), (forward(entry, compiled), backward(entry, compiled)), by_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"rewrite the table in {PAGE}")
    parser.add_argument("-k", default="", help="only cases whose names contain this; prints, cannot write")
    arguments = parser.parse_args()
    if arguments.write and arguments.k:
        parser.error("--write needs all cases")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for entry in ZOO.values():
        if arguments.k in entry.name:
            rows.append(measured(entry))
            print(rows[-1].markdown(), flush=True)
    if arguments.write:
        PAGE.write_text(exchanged(PAGE.read_text(), BEGIN, render(rows)))


if __name__ == "__main__":
    main()
