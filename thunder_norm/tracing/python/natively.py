"""Functions of Python's standard library that look at code and at no tensor: they run as they are, where interpreting them fails."""

from __future__ import annotations

import dataclasses
import inspect

from thunder_norm.tracing.lookasides import instead_of
from thunder.core.interpreter import interpreter_needs_wrap

for _function in (inspect.signature, dataclasses._process_class):  # type: ignore[attr-defined]
    instead_of(_function)(interpreter_needs_wrap(_function))
