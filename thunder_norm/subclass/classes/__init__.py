"""Which classes of tensors are interpreted, how they are taken apart, and what stands for an instance in a trace."""
