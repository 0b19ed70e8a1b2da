"""Tensors of a trace that share memory, what writes into one of them is for the others, and what a backward keeps."""
