"""Reports in files, as `thunder_norm.norms.saving` has norm maps."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypeVar

from thunder_norm.norms.eager_environment import Argument
from thunder_norm.norms.lifts.inference import Candidate, Inferred, NormSpec, Use
from thunder_norm.norms.saving import files, values
from thunder_norm.report.rows import Findings, LowPrecision, ReportRow, Rounding
from thunder_norm.report.rules import RuleName

T = TypeVar("T", bound=Findings)

_KIND = "norm report"
_RECORDS: dict[str, type] = {
    c.__name__: c for c in (ReportRow, Argument, Inferred, Use, Candidate, NormSpec, RuleName, Rounding, LowPrecision)
}


def save(report: Findings, path: str | os.PathLike) -> None:
    """Write a report to a file.

    Raises:
        SavedFileError: it has a value that cannot be saved.
    """
    files.write(path, _KIND, [[f.name, values.encode(getattr(report, f.name), _record)] for f in dataclasses.fields(report)], {})


def load(path: str | os.PathLike, kind: type[T]) -> T:
    """The report in a file.

    Raises:
        SavedFileError: there is none, or it is damaged or of a newer format.
    """
    found = files.read(path, _KIND)
    return files.reading(path, lambda: kind(**{k: values.decode(v, _made) for k, v in found.data}))


def _record(value: Any) -> Any:
    if _RECORDS.get(type(value).__name__) is not type(value):
        return None
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, ReportRow):
        fields["rule"] = RuleName.of(value.rule)
    return {"record": type(value).__name__, "fields": [[k, values.encode(v, _record)] for k, v in fields.items()]}


def _made(data: dict) -> Any:
    if "record" not in data:
        return None
    fields = {k: values.decode(v, _made) for k, v in data["fields"]}
    if data["record"] == ReportRow.__name__ and fields["rule"] is not None:
        fields["rule"] = fields["rule"].find()
    return _RECORDS[data["record"]](**fields)
