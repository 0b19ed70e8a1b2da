"""`docs/api.md`: a line for each public name, which is the first one of its docstring.

``python -m tests.api_page`` writes it; `tests/project/test_docs.py` insists that it is what this would write.
"""

from __future__ import annotations

import inspect
import re
import types

import thunder_norm
from tests import ROOT
from thunder_norm import audit, errors, executors, modular, transforms

PAGE = ROOT / "docs" / "api.md"
_HEAD = """# Public names

One line for each; `help(name)` says the rest: arguments with their shapes and units, formulas, errors, sources. This page is written by
`python -m tests.api_page` from the docstrings.
"""
_SECTIONS: tuple[tuple[types.ModuleType, str], ...] = (
    (
        thunder_norm,
        "Norms of tensors, of programs and of models: [README](../README.md), [reports](reports.md), [bounds](bounds.md).",
    ),
    (
        transforms,
        "What goes into `thunder.jit(..., transforms=[...])`, and transforms of functions: [subclasses](subclasses.md), "
        "[function transforms](function_transforms.md), [profiles](profile.md), [checkpointing](checkpoint.md), [tracing](tracing.md).",
    ),
    (
        modular,
        "Training in the modular norm, and what parameters are: [modular norm](modular_norm.md), [roles](roles.md), [monitor](monitor.md).",
    ),
    (executors, "For `thunder.jit(..., executors=[...])`: [executors](executors.md)."),
    (audit, "The search for tensors that exceed a rule's claim: [CONTRIBUTING](../CONTRIBUTING.md#adding-a-rule)."),
    (
        errors,
        "Every error is a `ThunderNormError`; those about a wrong type, value or name are Python's `TypeError`, `ValueError` or "
        "`KeyError` too. Warnings are `UserWarning`s.",
    ),
)  # fmt: skip

_CONSTANTS = {
    "__version__": "The version, a string.",
    "DEVICES": "`Device`s by name, from their makers' data sheets, and one CPU that was measured.",
    "inductor": "The executor that compiles what is traced with torch's inductor, without Dynamo.",
    "LONG": "The `Effort` of a long search.",
    "QUICK": "The `Effort` of `audit` where none is given.",
    "SOUND": "What found / claimed may be at most, for rounding.",
}


def names_of(module: types.ModuleType) -> list[str]:
    """What a module makes public."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return [name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]


def written() -> str:
    """The page."""
    parts = [_HEAD]
    for module, about in _SECTIONS:
        rows = [f"| `{name}` | {_line(module, name)} |" for name in names_of(module)]
        parts.append("\n".join([f"## {module.__name__}", "", about, "", "| name | what it is |", "| --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def _line(module: types.ModuleType, name: str) -> str:
    said = _CONSTANTS[name] if name in _CONSTANTS else inspect.getdoc(getattr(module, name)) or ""
    first = " ".join(said.partition("\n\n")[0].split())
    return re.sub("`+", "`", first).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(written())
