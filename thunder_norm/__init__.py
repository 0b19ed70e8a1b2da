"""Norm bounds, sensitivities and the modular norm for PyTorch programs, on lightning-thunder's traces.

A `NormedTensor` is a tensor together with a bound on its norm.  Torch operations on it compute both; a norm rule, registered
with `normed_op`, says how.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from thunder_norm import _versions

_versions.check()  # before anything that would fail with a less helpful message

# In a source tree thunder_norm.transforms is the folder transforms/ beside this one; in an installation it is inside.
if not (_Path(__file__).parent / "transforms").is_dir():
    __path__.append(str(_Path(__file__).parents[1]))

from thunder_norm import errors
from thunder_norm import rules as _rules  # registers the norm rules  # noqa: F401
from thunder_norm._versions import __version__
from thunder_norm.core.context import norm_mode, norm_sensitivity
from thunder_norm.core.initializing import initialize
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.progress import show_progress

if _TYPE_CHECKING:
    from thunder_norm import executors as executors
    from thunder_norm import modular as modular
    from thunder_norm import transforms as transforms
    from thunder_norm.norms.lifts.annotations import annotate
    from thunder_norm.norms.maps.norm_map import build_norm_map, load_norm_map
    from thunder_norm.norms.margins import LipschitzMargin, certified_radii
    from thunder_norm.norms.norm_vector import NormVector
    from thunder_norm.norms.sensitivity import sensitivities, with_perturbation
    from thunder_norm.norms.transform import normed
    from thunder_norm.report.norm_report import load_norm_report, norm_report

# What traces programs is imported when it is asked for: eager norms need none of it, and it takes longer than all the rest.
_LAZY = {
    "LipschitzMargin": "thunder_norm.norms.margins",
    "NormVector": "thunder_norm.norms.norm_vector",
    "annotate": "thunder_norm.norms.lifts.annotations",
    "build_norm_map": "thunder_norm.norms.maps.norm_map",
    "certified_radii": "thunder_norm.norms.margins",
    "load_norm_map": "thunder_norm.norms.maps.norm_map",
    "load_norm_report": "thunder_norm.report.norm_report",
    "norm_report": "thunder_norm.report.norm_report",
    "normed": "thunder_norm.norms.transform",
    "sensitivities": "thunder_norm.norms.sensitivity",
    "with_perturbation": "thunder_norm.norms.sensitivity",
}
_LAZY_MODULES = ("executors", "modular", "transforms")


def __getattr__(name: str) -> _Any:
    if name in _LAZY_MODULES:
        return _import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(_import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


__all__ = [
    "L1Tensor",
    "L2Tensor",
    "LinfTensor",
    "LipschitzMargin",
    "NormVector",
    "NormedTensor",
    "RMSTensor",
    "RMSToRMSConvTensor",
    "RMSToRMSTensor",
    "__version__",
    "annotate",
    "build_norm_map",
    "certified_radii",
    "errors",
    "initialize",
    "load_norm_map",
    "load_norm_report",
    "norm_mode",
    "norm_report",
    "norm_sensitivity",
    "normed",
    "normed_op",
    "sensitivities",
    "show_progress",
    "with_perturbation",
]
