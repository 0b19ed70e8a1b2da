"""The executor `inductor` against torch.compile: calls of both in turns in one process, first calls in processes of their own.

Both give the same kernels to the same compiler; what differs is who finds the program, what is kept for the backward, and what a call
does around the kernels.  All times are the processor's: compilers that inductor starts are counted with the process that started them.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import models, timing

COMPILED, OURS = "torch.compile", "executors.inductor"
WHAT = ("forward", "forward and backward")
MODELS = {"gpt2": "GPT-2, 4 layers, width 256", "resnet": "ResNet-18"}

_WITH_A_CACHE = 2  # first calls

Case = tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor]]


def case(name: str) -> Case:
    """A model, its input, and a loss of its result."""
    torch.manual_seed(0)
    if name == "gpt2":
        return models.gpt2_of(models.GPTShape(4, 256)), torch.randint(0, 512, (1, 128)), lambda y: y.logits.square().mean()
    x = torch.randn(2, 3, 64, 64)
    try:
        from torchvision.models import resnet18
    except ImportError:
        from transformers import ResNetConfig, ResNetModel

        shape = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
        return ResNetModel(ResNetConfig(**shape)), x, lambda y: y.pooler_output.square().mean()
    return resnet18(), x, lambda y: y.square().mean()


def compiled_by(candidate: str, model: nn.Module) -> Callable[..., Any]:
    """The model, compiled when it is called."""
    if candidate == COMPILED:
        return torch.compile(model)
    import thunder_norm
    from thunder_norm.transforms import NormTransform
    import thunder

    return thunder.jit(model, transforms=[NormTransform()], executors=[thunder_norm.executors.inductor])


def run(options: models.Options) -> list[dict[str, Any]]:
    """All rows: calls, and first calls with nothing in inductor's cache and with all of it."""
    rows = []
    for name, title in MODELS.items():
        for what, measured in _calls(name, options.rounds).items():
            rows += timing.rows(f"{title}: {what}", measured, COMPILED)
        for what, measured in _first_calls(name).items():
            rows += timing.rows(f"{title}: {what}", measured, COMPILED)
    return rows


def _calls(name: str, rounds: int) -> dict[str, timing.Measured]:
    model, x, loss = case(name)
    own = {candidate: copy.deepcopy(model) for candidate in (OURS, COMPILED)}
    compiled = {candidate: compiled_by(candidate, m) for candidate, m in own.items()}

    def forward(candidate: str) -> None:
        with torch.no_grad():
            compiled[candidate](x)

    def both(candidate: str) -> None:
        own[candidate].zero_grad()
        loss(compiled[candidate](x)).backward()

    found = {}
    for what, call in zip(WHAT, (forward, both), strict=True):
        for m in own.values():
            m.train(what != "forward")
        candidates = {candidate: lambda candidate=candidate, call=call: call(candidate) for candidate in own}
        found[what] = timing.in_turns(candidates, rounds, seconds=0.1, clock=_cpu_seconds_a_call)
    torch._dynamo.reset()
    return found


def _cpu_seconds_a_call(call: Callable[[], Any], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - started) / repeats


def _first_calls(name: str) -> dict[str, timing.Measured]:
    found = {candidate: _in_processes(candidate, name) for candidate in (OURS, COMPILED)}
    empty = {candidate: seconds[:1] for candidate, seconds in found.items()}
    full = {candidate: seconds[1:] for candidate, seconds in found.items()}
    kind = "first call with its backward"
    return {kind: timing.Measured(empty), f"{kind}, inductor's cache full": timing.Measured(full)}


def _in_processes(candidate: str, name: str) -> list[float]:
    """What the first call takes with inductor's cache empty, then `_WITH_A_CACHE` times with what that left there."""
    command = [sys.executable, "-m", "benchmarks.inductor", candidate, name]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        options = {"env": environment, "cwd": Path(__file__).parents[1], "capture_output": True, "text": True, "check": True}
        done = [subprocess.run(command, **options) for _ in range(1 + _WITH_A_CACHE)]
    return [json.loads(process.stdout.splitlines()[-1]) for process in done]


def _cpu_time() -> float:
    """Seconds of the processor's, of this process and of those it started and waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


def main() -> None:
    """The first call of a candidate, of which both have their imports and inductor its compiler behind them."""
    candidate, name = sys.argv[1:]
    torch.set_num_threads(1)
    small = nn.Linear(4, 4)
    with torch._inductor.config.patch(compile_threads=1):  # what another process compiles is not counted here
        compiled_by(candidate, small)(torch.randn(2, 4)).tanh().sum().backward()
        torch.compile(lambda x: x.sin() + x.cos())(torch.randn(3))
        model, x, loss = case(name)
        started = _cpu_time()
        loss(compiled_by(candidate, model)(x)).backward()
        print(json.dumps(_cpu_time() - started))


if __name__ == "__main__":
    main()
