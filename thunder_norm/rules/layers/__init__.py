"""Layers of networks that torch has as one operation: attention, softmax, normalizations, recurrent layers."""
