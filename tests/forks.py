"""Where processes come from that tests start: from one that has imported what they need, once, and done nothing else."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "thunder_norm.modular",
        "thunder_norm.transforms",
        "torch.distributed.checkpoint.state_dict",
        "torch.testing",
        "hypothesis",
        "pytest",
        "sklearn.datasets",
    ]
)
