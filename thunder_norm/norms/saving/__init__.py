"""Norm maps and reports in files: data only, from which programs are built again by operations known by name."""
