"""Interpretation of tensor wrapper subclasses while Thunder acquires a trace.

From the ground up, each package imports from those before it: `classes` says which classes can be interpreted and what stands for
their instances (`protocol`, `proxy`), `acquiring` holds what is known during one acquisition (`acquisition`: fakes, sizes and answers
that are values, memory, operations with effects), `recording` runs an operation on fakes, logs what reached the inner tensors (`record`)
and writes that log down as bound symbols (`aten`, `trace`), `backward` has torch's autograd write the backward where wrappers require
grad (`differentiation`), and keeps hooks and objects that the program makes or changes, `interpreting` answers Thunder's interpreter
(`interpret`, `operations`, and `interception`, which the hooks of `thunder_norm.tracing.hooks` ask; `opaque_objects` for what cannot be
taken apart), `crossing` lets only plain tensors cross into and out of the computation (`boundary`).
"""

from thunder_norm.subclass.interpreting import assertions, distributions, masked  # noqa: F401 - register what they know
from thunder_norm.subclass.interpreting.executors import register_implementation
from thunder_norm.subclass.recording.trace import OperationId

__all__ = ["OperationId", "register_implementation"]
