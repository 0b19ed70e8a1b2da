"""Activation checkpointing on traces: regions of a program whose insides are computed again in the backward."""
