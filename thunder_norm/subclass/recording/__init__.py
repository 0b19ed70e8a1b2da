"""Running an operation on fakes, and writing what reached the inner tensors into the trace."""
