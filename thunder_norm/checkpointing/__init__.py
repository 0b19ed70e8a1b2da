"""Activation checkpointing on traces: regions of a program whose insides are computed again on the way back."""
