"""Modules as users write them, which random modules are made of; the source of those that a program uses is part of what is printed.

Each takes tensors and submodules of one argument, `body`, so that they nest; `c` is the size of the last dimension.
"""

from types import FunctionType

from . import gradients, kept, torch_modules, weights, wiring, written

CLASSES = {
    name: thing
    for module in (torch_modules, wiring, gradients, weights, kept, written)
    for name, thing in vars(module).items()
    if isinstance(thing, type | FunctionType) and thing.__module__ == module.__name__
}
