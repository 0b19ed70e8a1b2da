"""What a program spells in many operations and is one function: normalizations, softmax and activations written out."""
