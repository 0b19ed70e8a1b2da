"""Random programs against an oracle.

    python -m tests.fuzz                                     every subject, as many programs as the project asks for
    python -m tests.fuzz derivatives --programs 500          500 programs of one subject
    python -m tests.fuzz derivatives --seed 0 --only 137     one program again, shrunk and shown
    python -m tests.fuzz --minutes 30 --write                half an hour for each subject; keep the results in tests/fuzz/results
    python -m tests.fuzz modules --only 500-999 --add        put the results to those that are kept of other programs of this seed
    python -m tests.fuzz --again                             what was found once more, for its place in what is kept

Ctrl-C, or the end of the time, shows what was done. Exit status 1 if a program was wrong or ended in an error that is not ours.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from .program import BAD
from .results import add, kept, write
from .runner import SUBJECTS, Job, everything, indices_of, of_ranges, run_job, run_many

# How many random programs of each subject have to be right; the others are lists, and are run whole.
PROGRAMS = {
    "derivatives": 4000,
    "wrappers": 1000,
    "modules": 20_000,
    "changes": 5000,
    "writes": 5000,
    "wrapper_writes": 5000,
    "made_wrappers": 5000,
    "bounds": 5000,
    "networks": 2000,
    "real": 5000,
    "draws": 2000,
    "regions": 2000,
    "python": 2000,
    "refusals": 1000,
    "state": 1000,
    "optimizers": 2000,
    "maps": 2000,
    "calls": 2000,
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("subjects", nargs="*", metavar="subject", help=f"of {', '.join(SUBJECTS)}; all by default")
    parser.add_argument("--programs", type=int, help="how many of each")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("THUNDER_NORM_SEED", "0")))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", type=of_ranges, help="programs by number: 3,7,10-12; one alone runs in this process")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a program")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time for each subject")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the results in tests/fuzz/results, and write docs/fuzz.md")
    parser.add_argument("--add", action="store_true", help="as --write, together with what is kept of other programs of the seed")
    parser.add_argument("--again", action="store_true", help="the programs that are kept as found; what becomes of them is kept")
    options = parser.parse_intermixed_args()
    unknown = sorted(set(options.subjects) - set(SUBJECTS))
    if unknown:
        parser.error(f"no subject {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    found = False
    for subject in options.subjects or SUBJECTS:
        if options.again:
            before = kept().get(subject, {"found": []})
            options.only = [f["index"] for f in before["found"]]
            if not options.only:
                continue
            options.seed, options.add = before["seed"], True
        found |= _run(subject, options)
    return int(found)


def _run(subject: str, options: argparse.Namespace) -> bool:
    if options.only and len(options.only) == 1 and not options.add:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        job = Job(subject, options.seed, options.only[0])
        result = run_job(job, shrink=not options.no_shrink)
        print(f"{subject} {result.index}: {result.kind}  {result.detail}\n{result.source or job.program().source()}")
        return result.kind in BAD
    report = run_many(
        subject,
        options.only or indices_of(subject, options.programs or (PROGRAMS.get(subject) if everything(subject) is None else None)),
        options.seed,
        jobs=options.jobs,
        limit=options.limit,
        seconds=60 * options.minutes,
        shrink=not options.no_shrink,
        show=lambda text: print(text, flush=True),
    )
    print("\n" + report.table(), flush=True)
    if options.write or options.add:
        (add if options.add else write)(report)
    return bool(report.bad)


if __name__ == "__main__":
    sys.exit(main())
