"""Norm maps: a program cut down to its norms, what it takes and returns, and how it is called."""
