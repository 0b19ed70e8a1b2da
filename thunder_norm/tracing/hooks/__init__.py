"""Every change made to Thunder, in one place: put there by the first use of a transform, inert in compilations without one.

A file for each part of Thunder: `autocast`, `cuda_graphs`, `jit` (``thunder``), `interpretation` (``thunder.core.jit_ext``), `interpreter`, `nvfuser`,
`printing` (``thunder.core.baseutils``), `promotion` (``thunder.core.utils``), `proxies` and `symbols`; `replaced` puts things in place, `participants` says who has a part, `lookups` what
is called instead of a function.

*Use* is making a transform of ours (a `Participant`), or a function that one makes (``grad(f)``).  `import thunder_norm` changes nothing.
A compilation has a part of ours if a `Participant` is in its list of transforms, if what it compiles or an executor in its list brings
one (`brings`), or while the function of a function transform is being
interpreted.  In all others the replaced functions call the original with the same arguments.

Each replaced function names the line of Thunder that it relies on (lightning-thunder 0.2.6) and says why there is no official hook.

Besides, each for as long as it says and no longer:

- while a trace is acquired with a participant, native equivalents stand in for parts of Thunder's interpreter (`native`, a table in each
  file), and what the program looks at is noted (`guards`); until the program is compiled others stand in for parts of Thunder's passes
  (`native.passes`);
- while a rule that a user registered for a function transform runs, ``TensorProxy`` has a ``__torch_function__``, so that the rule can be
  written in torch's functions;
- a compilation that is under way at the first use (``grad`` called by a program that is being traced) asks us from there on:
  ``InterpreterCompileCtx._fn_lookaside`` holds what it was begun with;
- what a user registers with `register_lookaside` goes into ``_general_jit_lookaside_map``, Thunder's table for that.

Symbols of ours have rules and tags in Thunder's own tables (``register_grad``, ``NON_FUNCTIONAL_OPS``, ``_syms_returning_views``) under ids
of ours, from when they are made.
"""

from __future__ import annotations

import thunder_norm.tracing.python.callers  # noqa: F401
import thunder_norm.tracing.torch_functions.experts  # noqa: F401
import thunder_norm.tracing.torch_functions.fast_paths  # noqa: F401 - have lookasides
import thunder_norm.tracing.torch_functions.foreach_groups  # noqa: F401
import thunder_norm.tracing.torch_functions.hook_handles  # noqa: F401
import thunder_norm.tracing.torch_functions.libraries  # noqa: F401
import thunder_norm.tracing.torch_functions.modules  # noqa: F401
from thunder_norm.tracing.hooks import (  # noqa: F401 - have what is replaced
    autocast,
    cuda_graphs,
    interpretation,
    interpreter,
    jit,
    nvfuser,
    printing,
    promotion,
    symbols,
)
from thunder_norm.tracing.hooks.autocast import disable_autocast
from thunder_norm.tracing.hooks.lookups import is_replaced_for_all, lookaside_for, register_for_all
from thunder_norm.tracing.hooks.participants import (
    Participant,
    brings,
    inside_function,
    joins_tied_parameters,
    leader,
    leads,
    thunders_proxy,
)
from thunder_norm.tracing.hooks.proxies import torch_functions_on_proxies
from thunder_norm.tracing.hooks.replaced import REPLACED, check_patch_points, first_use, install

__all__ = [
    "REPLACED",
    "Participant",
    "brings",
    "check_patch_points",
    "disable_autocast",
    "first_use",
    "inside_function",
    "install",
    "is_replaced_for_all",
    "joins_tied_parameters",
    "leader",
    "leads",
    "lookaside_for",
    "register_for_all",
    "thunders_proxy",
    "torch_functions_on_proxies",
]
