"""What a program costs, before it runs: FLOPs, bytes, memory over time; see `thunder_norm.transforms.profile`."""

from thunder_norm.profiling.flops import register_flop_rule
from thunder_norm.profiling.rows import Kernel, ProfileRow
from thunder_norm.profiling.shapes import register_shape_rule

__all__ = ["Kernel", "ProfileRow", "register_flop_rule", "register_shape_rule"]
