"""Modula's jitted dualize, timed when asked: run by ``python -m benchmarks modular --modula PYTHON`` with another interpreter.

That one's environment needs JAX and Modula: ``pip install jax git+https://github.com/modula-systems/modula``.  For each line it reads
the program calls dualize once and writes the seconds it took.
"""

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if hasattr(os, "sched_setaffinity"):  # XLA has threads of its own besides
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

import jax  # noqa: E402 - the environment comes first
from modula.compound import GPT  # noqa: E402


def main() -> None:
    layers, width = map(int, sys.argv[1:])
    heads = max(1, width // 64)
    model = GPT(65, heads, width, width // heads, width // heads, layers)
    model.jit()
    grads = [
        jax.random.normal(key, w.shape) for w, key in zip(model.initialize(jax.random.PRNGKey(0)), _keys(1000), strict=False)
    ]
    jax.block_until_ready(model.dualize(grads, 1.0))
    for _ in sys.stdin:
        started = time.perf_counter()
        jax.block_until_ready(model.dualize(grads, 1.0))
        print(time.perf_counter() - started, flush=True)


def _keys(count: int):
    return jax.random.split(jax.random.PRNGKey(1), count)


if __name__ == "__main__":
    main()
