"""The table in docs/models.md: ``python -m tests.models_zoo`` runs every model and writes it, and docs/models.json."""

from __future__ import annotations

import argparse
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows alone; the others stay as they are")
    parser.add_argument("--missing", action="store_true", help="the rows alone that lack one of the columns")
    parser.add_argument("--columns", help="these columns alone, separated by commas; of a row that is there the others stay")
    parser.add_argument("--page", action="store_true", help="write the page from the file and run nothing")
    arguments = parser.parse_args()

    from . import MODELS, page
    from .columns import COLUMNS
    from .runner import made

    columns = arguments.columns.split(",") if arguments.columns else list(COLUMNS)
    rows = page.load()
    names = [] if arguments.page else arguments.only or list(MODELS)
    if arguments.missing:
        names = [name for name in names if not set(columns) <= set(rows.get(name, {}))]
    for number, name in enumerate(names, 1):
        start = time.perf_counter()
        before = rows.get(name, {}) if arguments.columns else {}
        rows[name] = {**before, **made(MODELS[name], columns)}
        page.save(rows, page.installed())
        print(f"{number}/{len(names)} {page.summary(name, rows[name])} ({time.perf_counter() - start:.0f} s)", flush=True)
    page.write(page.load())


if __name__ == "__main__":
    main()
