"""Norm rules, one file per family of operations; importing the package registers them.

Within one operation the rule registered first is tried first, hence the fixed order.
"""

from thunder_norm.rules import attention, linear, softmax

__all__ = ["attention", "linear", "softmax"]
