"""What crosses the boundary of the computation: only plain tensors inside, wrappers and writes outside."""
