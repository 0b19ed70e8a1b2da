"""Gradients of wrappers and of what a program does beside them: hooks, flags, objects that it makes or changes."""
