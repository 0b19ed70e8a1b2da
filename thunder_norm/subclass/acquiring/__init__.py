"""What is known while one trace is acquired: fakes, values, sizes, memory, what autograd follows."""
