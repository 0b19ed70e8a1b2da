"""Function transforms: programs made from programs, trace to trace."""
