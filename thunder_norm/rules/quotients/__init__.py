"""Quotients, roots, logarithms and powers of what is known to stay away from 0, or typically does."""
