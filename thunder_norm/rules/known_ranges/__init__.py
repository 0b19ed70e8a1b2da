"""Between which numbers the entries of results are, and rules of operations that need to know."""
