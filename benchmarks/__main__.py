"""``python -m benchmarks``: run suites, print their tables, write what was measured and the page in docs/ that shows it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # Thunder's and torch's own, on import and on calls

import torch  # noqa: E402 - the environment comes first

from benchmarks import (  # noqa: E402
    bounds,
    certified,
    first_calls,
    function_transforms,
    machine,
    margins,
    models,
    modular,
    monitor,
    normed,
    optimizer_steps,
    orthogonalization,
    other_sizes,
    page,
    precision,
    profile,
    real_mode,
    subclasses,
    timing,
)

SUITES = {
    "real_mode": real_mode,
    "first_calls": first_calls,
    "other_sizes": other_sizes,
    "normed": normed,
    "subclasses": subclasses,
    "modular": modular,
    "orthogonalization": orthogonalization,
    "optimizer_steps": optimizer_steps,
    "profile": profile,
    "function_transforms": function_transforms,
    "bounds": bounds,
    "precision": precision,
    "margins": margins,
    "certified": certified,
    "monitor": monitor,
}

_QUICK = models.Options(
    rounds=5,
    first_calls=2,
    mlp_layers=4,
    gpt2_layers=1,
    depths=(4, 16),
    wrapper_depths=(4,),
    wrapper_widths=(64,),
    sample_batches=(8,),
    gpts=(models.GPTShape(4, 256),),
    matrices=((256, 1024), (256, 256)),
    rounds_of_steps=3,
    modula_gpts=((4, 128),),
    first_call_models=("GPT-2, 2 layers", "ResNet-18"),
    first_call_rounds=1,
)


def main() -> None:
    options = _options()
    if options.tables:
        page.write()
        return
    amount = _QUICK if options.quick else models.Options()
    if options.rounds is not None:
        amount = dataclasses.replace(
            amount, rounds=options.rounds, rounds_of_steps=options.rounds, first_call_rounds=options.rounds
        )
    amount = dataclasses.replace(amount, modula_python=options.modula)
    torch.set_num_threads(1)
    folder = options.into or (None if options.quick else page.RESULTS)
    places = {str(options.modula): "PYTHON", str(options.into): "FOLDER"}
    command = shlex.join(["python", "-m", "benchmarks", *(places.get(a, a) for a in sys.argv[1:])])
    described = machine.describe()
    print(json.dumps(described, indent=1), flush=True)
    for name in options.suites or SUITES:
        started = time.perf_counter()
        rows = SUITES[name].run(amount)
        print(f"\n== {name} ({time.perf_counter() - started:.0f} s): {SUITES[name].__doc__.splitlines()[0]}\n", flush=True)
        print(timing.table(rows), flush=True)
        result = {"command": command, "machine": described, "rows": rows}
        if hasattr(SUITES[name], "METHOD"):
            result["method"] = SUITES[name].METHOD
        if name == "profile":
            result["peers"] = profile.peer_versions()
            print("\n" + profile.counts(rows))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(f"\nwritten to {folder / name}.json", flush=True)
        if folder == page.RESULTS:
            page.write()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What thunder_norm costs, as ratios between peers.")
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)} (all if none is named)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, GPT-2 with one layer: a few minutes")
    parser.add_argument("--rounds", type=int, help="how often each candidate is timed")
    parser.add_argument("--into", type=Path, help=f"a folder for SUITE.json (default: {page.RESULTS.name}; with --quick nowhere)")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables in docs/ anew")
    parser.add_argument("--modula", type=Path, metavar="PYTHON", help="an interpreter with jax and modula, for the suite modular")
    options = parser.parse_args()
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    return options


if __name__ == "__main__":
    main()
