"""Norms through programs: eager and traced, norm maps, inference of kinds."""
