"""The version check that runs when thunder_norm is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import thunder_norm
from benchmarks.parts import exchanged
from tests.versions.page import BEGIN, PAGE, file_of, render
from tests.versions.rows import ROWS
from thunder_norm import _thunder, _versions
from thunder_norm.errors import UntestedVersionWarning
import thunder

ROOT = Path(thunder_norm.__file__).parents[1]


@pytest.mark.parametrize(
    ("torch_version", "thunder_version", "tested"),
    [
        ("2.9.0", "0.2.6", True),
        ("2.11.0+cpu", "0.2.6", True),
        ("2.12.1", "0.2.6", True),
        ("2.8.0", "0.2.6", False),
        ("2.15.0", "0.2.6", True),
        ("2.16.0", "0.2.6", False),
        ("2.110.0", "0.2.6", False),
        ("3.9.0", "0.2.6", False),
        ("2.11.0", "0.2.5", False),
        ("2.11.0", "0.2.7.dev20251101", False),
        ("2.11.0", "0.2.60", False),
    ],
)
def test_tested_versions(torch_version: str, thunder_version: str, tested: bool):
    assert _versions.is_tested(torch_version, thunder_version) is tested


def test_tested_versions_do_not_warn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    monkeypatch.setattr(thunder, "__version__", "0.2.6")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _versions.check()


@pytest.mark.parametrize(("module", "version"), [(torch, "2.16.0"), (thunder, "0.3.0")])
def test_untested_version_warns_with_the_versions(monkeypatch: pytest.MonkeyPatch, module, version: str):
    monkeypatch.setattr(module, "__version__", version)
    with pytest.warns(
        UntestedVersionWarning, match=rf"tested with torch 2\.9 to 2\.15 .* 0\.2\.6, 0\.2\.7\.dev\d+, not with .*{version}"
    ):
        _versions.check()


def import_with_stubs(tmp_path: Path, **sources: str) -> subprocess.CompletedProcess[str]:
    """Import thunder_norm in a new process where the named top-level modules have the given source."""
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    return subprocess.run([sys.executable, "-c", "import thunder_norm"], env=env, capture_output=True, text=True, cwd=tmp_path)


TORCH = """
__version__ = "2.16.0"

class Tensor: pass

class autograd:
    class Function:
        @classmethod
        def apply(cls): pass
"""


@pytest.mark.parametrize(
    "failure",
    [
        "AttributeError(\"type object 'Tensor' has no attribute 'align_as'\")",  # what torch 2.13 did to Thunder 0.2.6
        "ImportError('cannot import name')",
    ],
)
def test_thunder_that_cannot_be_imported_is_a_version_error(tmp_path: Path, failure: str):
    result = import_with_stubs(tmp_path, torch=TORCH, thunder=f"raise {failure}")
    assert result.returncode == 1
    assert "thunder_norm.errors.VersionError" in result.stderr
    headline = result.stderr[result.stderr.rindex("VersionError") :]
    assert failure.split("(")[0] in headline  # the cause
    assert "torch 2.16.0" in headline  # what is installed
    assert "torch 2.9 to 2.15 with lightning-thunder 0.2.6" in headline  # what works
    assert 'pip install "torch==' in headline  # how to get it


def test_pyproject_allows_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {
        (r := Requirement(d)).name: r.specifier for d in [*project["dependencies"], *project["optional-dependencies"]["test"]]
    }
    assert not any(allowed["torch"].contains(f"2.{n}.0") for n in range(9))
    tested = {"torch": [f"{v}.0" for v in _versions.TESTED_TORCH], "lightning-thunder": list(_versions.TESTED_THUNDER)}
    tested["transformers"] = [row.transformers.replace("*", "0") for row in ROWS]
    for name, versions in tested.items():
        assert [v for v in versions if not allowed[name].contains(v, prereleases=True)] == []


def test_each_tested_minor_version_of_torch_at_an_end_has_a_row():
    """A version is called tested once the tests passed there (docs/versions.md)."""
    rows = {row.torch.removesuffix(".*") for row in ROWS}
    assert {_versions.TESTED_TORCH[0], _versions.TESTED_TORCH[-1]} <= rows <= set(_versions.TESTED_TORCH)
    assert set(_versions.TESTED_THUNDER) <= {row.thunder for row in ROWS}


def test_the_page_of_versions_is_what_the_runs_left():
    page = PAGE.read_text()
    assert page == exchanged(page, BEGIN, render())
    assert any(file_of(row).exists() for row in ROWS)


def test_transforms_are_found_in_a_source_tree_without_an_installation():
    """As after a plain install, with the repository's root as the current folder: there the source hides what is installed."""
    spec = PathFinder.find_spec("thunder_norm.transforms", thunder_norm.__path__)
    assert spec is not None and spec.origin == str(ROOT / "transforms" / "__init__.py")


def test_every_package_is_listed_in_pyproject():
    """Packages are listed by hand because of transforms/: one that is missing would be missing from a wheel only."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "thunder_norm").rglob("__init__.py")}
    found |= {f"thunder_norm.{'.'.join(p.parent.relative_to(ROOT).parts)}" for p in (ROOT / "transforms").rglob("__init__.py")}
    assert set(packages) == found


AS_NEWER_TORCH = """
import torch
torch.autograd.Function.apply = torch._C._FunctionBase.__dict__["apply"]  # as in torch 2.14

import thunder_norm
import thunder
from thunder_norm.transforms import SubclassTransform

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]  # twice what it is, to be seen

for function in (
    Exp.apply, thunder.jit(lambda x: Exp.apply(x)), thunder.jit(lambda x: Exp.apply(x), transforms=[SubclassTransform()])
):
    x = torch.ones(3, requires_grad=True)
    function(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.ones(3).exp())
"""


def test_what_thunder_only_names_is_there_while_it_is_imported(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(_thunder, "_REMOVED_METHODS", ("size", "taken_away"))
    size = torch.Tensor.size
    monkeypatch.setattr(_thunder.importlib, "import_module", lambda name: seen.append((name, torch.Tensor.taken_away)))
    apply = torch.autograd.Function.__dict__["apply"]
    _thunder.import_thunder()
    assert [name for name, _ in seen] == ["thunder"] and not hasattr(torch.Tensor, "taken_away")
    assert torch.Tensor.size is size and torch.autograd.Function.__dict__["apply"] is apply
    with pytest.raises(AttributeError, match=r"taken_away does not exist in torch 2\."):
        seen[0][1](torch.ones(1))


def test_functions_of_autograd_are_traced_where_apply_is_one_of_c(tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", AS_NEWER_TORCH], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
