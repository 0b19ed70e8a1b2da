"""Norm rules, one file per family of operations; importing the package registers them."""
