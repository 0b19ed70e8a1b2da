"""How operations are differentiated, pushed forward and batched: a file for each family, what belongs to one operation side by side.

Derivatives of functions element by element are written once and used in both directions.  Rules call Thunder's own operations, so that
what they write is transformed again by an outer transform; see `register_vjp`, `register_jvp` and `register_batching`.
"""

from thunder_norm.functions.rules import (  # noqa: F401 - registers the rules
    activations,
    class_losses,
    contractions,
    dropouts,
    elementwise,
    indexing,
    linear,
    neural,
    reductions,
    several_indices,
)
