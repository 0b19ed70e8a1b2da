"""What a program may change besides its results: attributes, containers, tensors' data, random generators."""
