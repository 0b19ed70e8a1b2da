"""Functions of each entry: sums and products of tensors, powers, activations, special functions."""
