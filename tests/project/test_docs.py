"""The Markdown files: their Python runs and prints what they say, their links and make commands exist.

In README.md and docs/*.md every ```python block runs unless it is marked ```python no-run; elsewhere only those marked
```python run do.  The blocks of one file share a namespace.  If the next block after a Python block is ```text, that is the
output expected from it; ``...`` stands for any text, as in doctest.
"""

from __future__ import annotations

import contextlib
import copy
import doctest
import importlib.metadata
import io
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

from tests import ROOT, api_page
from thunder_norm.core import registry
from thunder.core.jit_ext import _general_jit_lookaside_map

RUN_BY_DEFAULT = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = [*RUN_BY_DEFAULT, ROOT / "CONTRIBUTING.md"]
# What docs/upstream.md shows is what these do; others may have mended it.
UPSTREAM = {"torch": "2.11.0", "lightning-thunder": "0.2.6", "transformers": "4.52.4"}


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its text, the line its text starts on."""

    info: tuple[str, ...]
    text: str
    line: int


@dataclass(frozen=True)
class Example:
    """Python code, and the output that the file shows for it."""

    code: Block
    expected: Block | None


def blocks(markdown: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text.

    Raises:
        ValueError: the last fence is not closed.
    """
    lines = enumerate(markdown.splitlines(), start=1)
    for number, line in lines:
        opened = re.match(r"(`{3,})(.*)", line)
        if opened is None:
            continue
        fence, info = opened.groups()
        body = []
        for _, inner in lines:
            if inner.rstrip() == fence:
                break
            body.append(inner + "\n")
        else:
            raise ValueError(f"the fence on line {number} is not closed")
        yield Block(tuple(info.split()), "".join(body), number + 1)


def examples(markdown: str, *, run_by_default: bool) -> list[Example]:
    """The Python blocks to run, each with its expected output."""
    found = list(blocks(markdown))
    result = []
    for block, following in zip_longest(found, found[1:]):
        runs = "run" in block.info or (run_by_default and "no-run" not in block.info)
        if block.info[:1] == ("python",) and runs:
            result.append(Example(block, following if following and following.info[:1] == ("text",) else None))
    return result


@pytest.fixture(autouse=True)
def lookasides() -> Iterator[None]:
    """Lookasides registered by a file's examples are gone after the test."""
    saved = dict(_general_jit_lookaside_map)
    yield
    _general_jit_lookaside_map.clear()
    _general_jit_lookaside_map.update(saved)


@pytest.fixture(autouse=True)
def norm_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm rules registered by a file's examples are gone after the test."""
    copies = {key: copy.copy(op) for key, op in registry._registry.items()}
    for op in copies.values():
        op.rules = list(op.rules)
    monkeypatch.setattr(registry, "_registry", copies)


def run(path: Path, markdown: str, *, run_by_default: bool) -> None:
    """Run the examples of a file one after the other, and compare what each prints."""
    # a module of its own, because classes, pickle and type hints look theirs up by name
    module = types.ModuleType("doc_" + re.sub(r"\W", "_", path.stem))
    sys.modules[module.__name__] = module
    try:
        for example in examples(markdown, run_by_default=run_by_default):
            # as many lines before the code as in the file: tracebacks and inspect.getsource then find it there
            source = "\n" * (example.code.line - 1) + example.code.text
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
            if example.expected is not None:
                check_output(path, example.expected, printed.getvalue())
    finally:
        del sys.modules[module.__name__]


def check_output(path: Path, expected: Block, printed: str) -> None:
    """Compare, up to spaces at the end of lines."""
    got = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    want = doctest.Example("", "".join(line.rstrip() + "\n" for line in expected.text.splitlines()))
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.DONT_ACCEPT_BLANKLINE
    if not checker.check_output(want.want, got, options):
        pytest.fail(f"{path.name}:{expected.line}: {checker.output_difference(want, got, options)}", pytrace=False)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def installed(distribution: str) -> str:
    """Its version, without a local label (``+cpu``)."""
    return importlib.metadata.version(distribution).split("+")[0]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_python_in_markdown_runs_and_prints_what_it_says(path: Path):
    if path.name == "upstream.md" and UPSTREAM != {name: installed(name) for name in UPSTREAM}:
        pytest.skip(f"its outputs are those of {UPSTREAM}")
    run(path, path.read_text(), run_by_default=path in RUN_BY_DEFAULT)


@pytest.mark.parametrize("path", [*FILES, ROOT / "CHANGELOG.md"], ids=named)
def test_relative_links_exist(path: Path):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_make_commands_in_markdown_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named_targets = {t for path in FILES for t in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE)}
    assert named_targets <= targets


# -- the checks above, checked ------------------------------------------------------------------------------------------

SHARED = """
```python
x = 2
print("x is", x)
```

which prints

```text
x is {output}
```

```python no-run
this is not Python
```

```python
print(x + 1)
```
"""


def test_blocks_share_a_namespace_and_marked_ones_are_skipped():
    run(Path("shared.md"), SHARED.format(output="2"), run_by_default=True)
    run(Path("shared.md"), SHARED.format(output="..."), run_by_default=True)


def test_other_output_fails():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)shared.md:10: Expected:\s+x is 3\s+Got:\s+x is 2"):
        run(Path("shared.md"), SHARED.format(output="3"), run_by_default=True)


def test_only_marked_blocks_run_where_that_is_the_rule():
    found = examples("```python\n1\n```\n```python run\n2\n```\n````text\n```\n````\n", run_by_default=False)
    assert [(e.code.text, e.expected and e.expected.text) for e in found] == [("2\n", "```\n")]


def test_a_block_that_is_not_closed_is_refused():
    with pytest.raises(ValueError, match="line 2 is not closed"):
        list(blocks("text\n```python\nx = 1\n"))


def test_an_error_names_the_line_in_the_file():
    with pytest.raises(ZeroDivisionError) as info:
        run(Path("error.md"), "text\n\n```python\nx = 1\n1 / 0\n```\n", run_by_default=True)
    assert (str(info.traceback[-1].path), info.traceback[-1].lineno + 1) == ("error.md", 5)


def test_the_page_of_public_names_has_them_all_as_their_docstrings_say_it():
    assert api_page.PAGE.read_text() == api_page.written(), "python -m tests.api_page writes it anew"
