"""Where plain tensors become normed ones: parameters, buffers, constants, and what a program writes into them."""
