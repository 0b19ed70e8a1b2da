"""``python -m tests.versions``: the tests with other versions of Python, torch, lightning-thunder and transformers.

Each row of tests/versions/rows.py gets an environment of its own, made by pip in a temporary folder (6 GB, a few minutes), and runs the
tests in it, all or a third of them.  What came of it is kept in tests/versions/results, and the table of docs/versions.md written again.

    python -m tests.versions                               # every row: over an hour
    python -m tests.versions --only newest,oldest -- -n 2  # two of them; what follows -- is pytest's
    python -m tests.versions --only newest --keep /tmp/v   # the environment stays, and is used again
    python -m tests.versions --only newest --part 2/6      # a sixth of the tests, chosen by name
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.machines import outcome

from .page import RESULTS, file_of, write_page
from .rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
PARTS = {1: "all", 3: "a third", 6: "a sixth"}
SHOWN = ("torch", "lightning-thunder", "transformers", "torchao")


def interpreter(version: str) -> str:
    """A Python of that version that can make environments: the first on the PATH, or one of pyenv's.

    Raises:
        SystemExit: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}*/bin/python")))]
    for candidate in candidates:
        if (
            shutil.which(candidate)
            and subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
        ):
            return candidate
    raise SystemExit(f"no Python {version} with the modules venv and ensurepip on the PATH or in {pyenv}")


def environment(row: Row, folder: Path) -> str:
    """The Python of an environment with the row's packages in `folder`, made if there is none yet."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter(row.python), "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *row.requirements, "-e", f"{ROOT}[test,plot]"], check=True)
    return str(python)


def run(row: Row, folder: Path, arguments: Sequence[str]) -> dict:
    """The tests of a row, and what is kept of them."""
    python = environment(row, folder)
    begin = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", *arguments]
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "THUNDER_NORM_PART": row.part or "0/1",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout, flush=True)
    counts, failed = outcome(done.stdout)
    ask = f"import json, platform, importlib.metadata as m; print(json.dumps([platform.python_version(), *map(m.version, {SHOWN})]))"
    versions = json.loads(subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "row": row.name,
        "commit": commit,
        "versions": dict(zip(("python", *SHOWN), versions, strict=True)),
        "tests": PARTS[int(row.part.partition("/")[2] or 1)],
        "status": done.returncode,
        "counts": counts,
        "failed": sorted(failed),
        "minutes": round((time.monotonic() - begin) / 60, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0 if every row passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", metavar="NAMES", help="these rows, separated by commas: " + ", ".join(r.name for r in ROWS))
    parser.add_argument("--keep", metavar="FOLDER", help="keep the environments there")
    parser.add_argument("--part", metavar="I/N", help="this part of the tests, not the row's own; N is 1, 3 or 6")
    options, rest = parser.parse_known_args(arguments)
    names = options.only.split(",") if options.only else [r.name for r in ROWS]
    unknown = set(names) - {r.name for r in ROWS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if options.part and not re.fullmatch(r"0/1|[0-2]/3|[0-5]/6", options.part):
        parser.error(f"no such part: {options.part}")
    rest = [a for a in rest if a != "--"] or ["-n", "2", "--dist", "worksteal"]
    passed = True
    for row in (dataclasses.replace(r, part=options.part or r.part) for r in ROWS if r.name in names):
        with tempfile.TemporaryDirectory() as temporary:
            result = run(row, Path(options.keep or temporary) / row.name.replace(" ", "-").replace("'", ""), rest)
        RESULTS.mkdir(exist_ok=True)
        file_of(row).write_text(json.dumps(result, indent=1) + "\n")
        write_page()
        print(row.name, result["counts"], f"{result['minutes']} min", *result["failed"], sep="\n  ", flush=True)
        passed = passed and result["status"] == 0
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
