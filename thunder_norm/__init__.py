"""Norm bounds, sensitivities and the modular norm for PyTorch programs, on lightning-thunder's traces.

A `NormedTensor` is a tensor together with a bound on its norm.  Torch operations on it compute both; a norm rule, registered
with `normed_op`, says how.
"""

from pathlib import Path as _Path

from thunder_norm import _versions

_versions.check()  # before anything that would fail with a less helpful message

# In a source tree thunder_norm.transforms is the folder transforms/ beside this one; in an installation it is inside.
if not (_Path(__file__).parent / "transforms").is_dir():
    __path__.append(str(_Path(__file__).parents[1]))

from thunder_norm import errors
from thunder_norm import rules as _rules  # registers the norm rules  # noqa: F401
from thunder_norm._versions import __version__
from thunder_norm.core.context import norm_mode, norm_sensitivity
from thunder_norm.core.kinds import L1Tensor, L2Tensor, LinfTensor, RMSTensor, RMSToRMSConvTensor, RMSToRMSTensor
from thunder_norm.core.registry import normed_op
from thunder_norm.core.tensors import NormedTensor
from thunder_norm.norms.annotations import annotate
from thunder_norm.norms.norm_map import build_norm_map
from thunder_norm.norms.sensitivity import sensitivities, with_perturbation
from thunder_norm.norms.transform import normed
from thunder_norm.report.norm_report import norm_report

__all__ = [
    "L1Tensor",
    "L2Tensor",
    "LinfTensor",
    "NormedTensor",
    "RMSTensor",
    "RMSToRMSConvTensor",
    "RMSToRMSTensor",
    "__version__",
    "annotate",
    "build_norm_map",
    "errors",
    "norm_mode",
    "norm_report",
    "norm_sensitivity",
    "normed",
    "normed_op",
    "sensitivities",
    "with_perturbation",
]
