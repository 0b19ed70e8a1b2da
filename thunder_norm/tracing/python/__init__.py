"""Python as it is, where Thunder's interpreter has another: of lists and dicts, callbacks of functions in C, operators, patterns, exceptions.

What is here was silently another result than eager mode's (``if d.keys()``, ``l.index(v, 2)``, ``Counter.get``, a closure that
``sorted`` calls), or an error of the interpreter's own (``l.sort()``, ``d.popitem()``).  It acts in compilations in which a transform of ours
has a part; attributes are in `tracing/attributes.py`, generators in `tracing/generators.py`.
"""

from __future__ import annotations

from thunder_norm.tracing.python import (
    assertions,
    callbacks,
    comparisons,
    constructors,
    conversions,
    derived,
    derived_mappings,
    derived_merging,
    derived_sequences,
    exception_groups,
    identities,
    imports,
    lists,
    local_variables,
    mappings,
    methods_in_c,
    methods_of_classes,
    misused,
    natively,
    operators,
    patterns,
    raised,
    special_methods,
    stack,
    states,
    subscripts,
    threads,
    type_parameters,
)
from thunder_norm.tracing.replacement import Replacements

__all__ = [
    "AS_IT_IS",
    "callbacks",
    "constructors",
    "derived",
    "derived_mappings",
    "derived_merging",
    "derived_sequences",
    "lists",
    "natively",
    "special_methods",
    "states",
    "threads",
]

AS_IT_IS = Replacements(
    (
        *mappings.REPLACEMENTS,
        *assertions.REPLACEMENTS,
        *comparisons.REPLACEMENTS,
        *identities.REPLACEMENTS,
        *local_variables.REPLACEMENTS,
        *conversions.REPLACEMENTS,
        *exception_groups.REPLACEMENTS,
        *operators.REPLACEMENTS,
        *imports.REPLACEMENTS,
        *methods_in_c.REPLACEMENTS,
        *methods_of_classes.REPLACEMENTS,
        *misused.REPLACEMENTS,
        *patterns.REPLACEMENTS,
        *raised.REPLACEMENTS,
        *stack.REPLACEMENTS,
        *subscripts.REPLACEMENTS,
        *type_parameters.REPLACEMENTS,
    )
)
