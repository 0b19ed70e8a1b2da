"""Interpretation of tensor wrapper subclasses while Thunder acquires a trace.

`protocol` says which classes can be interpreted, `proxy` what stands for their instances in a trace, `acquisition` holds
what is known during one acquisition, `record` runs an operation on fakes and logs what reached the inner tensors, `aten`
writes that log down as bound symbols, `operations` does both for a call of the program, `interpret` answers Thunder's interpreter,
`boundary` lets only plain tensors cross into and out of the computation, `differentiation` has torch's autograd write the backward
where wrappers require grad, `tensor_hooks` and `hooks_of_backward` are for hooks that programs give to tensors, `tape` and `tape_inputs` give gradients that are differentiated again, `effects` and `turns` are for operations that do more than return tensors, `equality` knows which
tensors are equal, `executors` is for executors with implementations of their own, `masked` takes torch's MaskedTensor apart,
`distributions` has the checks of torch.distributions run in every call, `opaque_objects` has torch run what cannot be taken apart (`opaque_lookasides` and `opaque_traces` are for it alone), and
`interception` is what answers `thunder_norm.tracing.hooks`: which calls are taken over, and what stands for inputs.
"""

from thunder_norm.subclass import assertions, distributions, masked  # noqa: F401 - register what they know
from thunder_norm.subclass.executors import register_implementation
from thunder_norm.subclass.trace import OperationId

__all__ = ["OperationId", "register_implementation"]
