"""Which torch and lightning-thunder the library works with; checked when `thunder_norm` is imported."""

from __future__ import annotations

import importlib.metadata
import warnings

from thunder_norm._thunder import import_thunder
from thunder_norm.errors import UntestedVersionWarning, VersionError, with_details

__version__ = "0.1.0"

# Thunder's acquisition is reached through two private functions, so that even its patch releases may matter; torch's
# interface to subclasses changes between minor versions only.  docs/versions.md has what the tests say of them (make test-versions).
TESTED_TORCH = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
TESTED_THUNDER = ("0.2.6", "0.2.7.dev20260201")

_TESTED = f"torch {TESTED_TORCH[0]} to {TESTED_TORCH[-1]} with lightning-thunder {', '.join(TESTED_THUNDER)}"
_INSTALL = f'pip install "torch=={TESTED_TORCH[-1]}.*" "lightning-thunder=={TESTED_THUNDER[0]}"'


def is_tested(torch_version: str, thunder_version: str) -> bool:
    """Whether both versions are among the tested ones; local labels (``+cpu``) do not matter, pre-releases of Thunder do.

    >>> is_tested("2.11.0+cpu", "0.2.6"), is_tested("2.16.0", "0.2.6"), is_tested("2.11.0", "0.2.7.dev20251101")
    (True, False, False)
    """
    torch_minor = ".".join(torch_version.split("+")[0].split(".")[:2])
    return torch_minor in TESTED_TORCH and thunder_version.split("+")[0] in TESTED_THUNDER


def check() -> None:
    """Import Thunder and compare its version and torch's with the tested ones.

    Warns:
        UntestedVersionWarning: it can be imported, but the versions are not tested together.

    Raises:
        VersionError: it cannot be imported.
    """
    import torch

    try:
        # what goes wrong under a torch that is too new is an AttributeError, somewhere inside
        thunder = import_thunder()
        thunder_version = thunder.__version__
    except Exception as e:
        raise VersionError(
            with_details(
                "thunder_norm needs lightning-thunder, which cannot be imported",
                why=f"{type(e).__name__}: {e}",
                installed=f"torch {torch.__version__}, lightning-thunder {_installed_thunder()}",
                works=_TESTED,
                to_install_it=_INSTALL,
            )
        ) from e
    if not is_tested(torch.__version__, thunder_version):
        here = f"torch {torch.__version__} and lightning-thunder {thunder_version}"
        # 3: the import statement that brought us here
        warnings.warn(f"thunder_norm is tested with {_TESTED}, not with {here}", UntestedVersionWarning, stacklevel=3)


def _installed_thunder() -> str:
    try:
        return importlib.metadata.version("lightning-thunder")
    except importlib.metadata.PackageNotFoundError:
        return "(none)"
