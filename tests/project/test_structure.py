"""Imports point one way: which room may use which, no circles, and `subclass/` without a word of norms."""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

# From the ground up: a room imports from those before it, and from itself.
_LAYERS = (
    (
        "errors",
        "user_code",
        "op_names",
        "trees",
        "context_variables",
        "numbered_generators",
        "random_states",
        "higher_order_operators",
    ),
    ("_thunder", "progress", "tables", "padded_sequences", "scalars"),
    ("_versions", "first_calls", "wrapper_classes"),
    ("model_state", "tracing"),
    ("core",),
    ("rules",),
    ("subclass",),
    ("functions",),
    ("norms",),
    ("profiling", "report", "modular"),
    ("checkpointing",),
    ("executors",),
    ("transforms",),
    ("audit",),
)
# an executor is of use without all else; values and writes are watched, and gradients torch's, with it alone too
_NOT_BETWEEN = {("executors", room) for layer in _LAYERS[4:11] for room in layer if room not in ("subclass", "functions")}
_NOT_BETWEEN |= {("subclass", "core"), ("functions", "core"), ("functions", "rules"), ("subclass", "rules"), ("tracing", "core")}


def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in ((ROOT / "thunder_norm", "thunder_norm"), (ROOT / "transforms", "thunder_norm.transforms")):
        for path in folder.rglob("*.py"):
            name = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
            found[name.removesuffix(".__init__")] = path
    return found


_MODULES = _modules()


def _imported(name: str) -> Iterator[str]:
    """The modules of ours that a module imports, anywhere in it, also for types alone."""
    for node in ast.walk(ast.parse(_MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thunder_norm"):
            assert node.level == 0
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in _MODULES else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("thunder_norm"))


@functools.cache
def _imports() -> dict[str, set[str]]:
    return {name: set(_imported(name)) - {name} for name in _MODULES}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_every_room_has_its_place():
    assert {_room(m) for m in _MODULES} == {"", *(room for layer in _LAYERS for room in layer)}


def test_rooms_import_from_those_below_them():
    height = {room: i for i, layer in enumerate(_LAYERS) for room in layer}
    wrong = []
    for module, imported in _imports().items():
        for other in imported if _room(module) else ():
            pair = _room(module), _room(other)
            if pair[0] != pair[1] and (not pair[1] or height[pair[1]] >= height[pair[0]] or pair in _NOT_BETWEEN):
                wrong.append((module, other))
    assert not wrong


def test_tests_lie_as_what_they_test():
    """In folders that the library has; `project` is about what is around it."""
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert [f for f in folders if f.name != "project" and (f == Path() or not (ROOT / "thunder_norm" / f).is_dir())] == []


def test_no_modules_import_each_other():
    remaining = {m: {o for o in imported if o != "thunder_norm"} for m, imported in _imports().items() if m != "thunder_norm"}
    while free := {m for m, imported in remaining.items() if not imported & remaining.keys()}:
        for m in free:
            del remaining[m]
    assert not remaining


def test_no_packages_of_a_room_import_each_other():
    """The modules beside them, in the room's own folder, are no package: some are below all of them, some above."""
    used: dict[str, set[str]] = {}
    for module, imported in _imports().items():
        package = _package(module)
        used.setdefault(package, set()).update(
            o for m in imported if (o := _package(m)) != package and _room(o) == _room(package)
        )
    between = {p: set(_all_below(p, used)) for p in used}
    assert {(a, b) for a in used for b in between[a] if a in between[b]} == set()


def _package(module: str) -> str:
    """``room.package`` of what is in one, else the module."""
    return ".".join(module.split(".")[:3])


def _all_below(package: str, used: dict[str, set[str]]) -> Iterator[str]:
    seen, ahead = {package}, [package]
    while ahead:
        for other in used.get(ahead.pop(), set()) - seen:
            seen.add(other)
            ahead.append(other)
            yield other


def test_folders_can_be_taken_in_at_a_glance():
    found = collections.Counter(path.parent for path in _MODULES.values())
    assert {str(folder): n for folder, n in found.items() if n > 40} == {}


_ALONE = """
import importlib, os, pathlib, sys, types
package = types.ModuleType("thunder_norm")
package.__path__ = [sys.argv[1]]
sys.modules["thunder_norm"] = package

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:1] == ["thunder_norm"] and name.split(".")[1] in absent.split(","):
            raise ModuleNotFoundError(f"{name} is not there")

importlib.import_module("thunder_norm._thunder").import_thunder()  # as the package does
sys.meta_path.insert(0, Absent())
for room, absent in zip(sys.argv[2::2], sys.argv[3::2]):
    if child := os.fork():
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(room)
        continue
    for path in sorted(pathlib.Path(sys.argv[1], room).rglob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(".".join(["thunder_norm", *path.relative_to(sys.argv[1]).with_suffix("").parts]))
    break
"""


@pytest.mark.usefixtures("without_imports")
def test_two_rooms_stand_without_norms():
    """Each in a fork of a process that has imported Thunder alone."""
    rooms = {"subclass": "core,rules,norms,functions", "functions": "core,rules,norms"}
    arguments = [argument for room in rooms.items() for argument in room]
    done = subprocess.run([sys.executable, "-c", _ALONE, str(ROOT / "thunder_norm"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_map_of_contributing_has_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    map_of_rooms = text[text.index("| room | holds |") : text.index("## Adding a rule\n")]
    rooms = {room for layer in _LAYERS for room in layer} - {"_thunder", "_versions"}
    assert {room for room in rooms if f"{room}/`" not in map_of_rooms and f"{room}.py`" not in map_of_rooms} == set()
