"""A device that programs are timed on: its clock, its kernels, what it is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """A CUDA device, timed with events; or the CPU, to see that everything runs."""

    name: str

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")

    def clock(self, call: Callable[[], Any], repeats: int) -> float:
        """Seconds a call, between events around `repeats` of them: launches that the host does in time cost nothing."""
        if not self.is_cuda:
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - started) / repeats
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def kernels(self, call: Callable[[], Any]) -> int | None:
        """How many kernels a call launches; None on CPU."""
        if not self.is_cuda:
            return None
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)

    def peak(self, call: Callable[[], Any], release: Callable[[], Any]) -> int | None:
        """The most bytes that a call has alive, above those before it, once all is warm; None on CPU.

        `release` frees what a call leaves behind.
        """
        if not self.is_cuda:
            call()
            return None
        for _ in range(2):
            call()
        release()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def describe(self) -> dict[str, Any]:
        """The device and what runs on it: clocks, driver, executors."""
        if not self.is_cuda:
            return {"device": "cpu"}
        properties = torch.cuda.get_device_properties(self.name)
        return {
            "device": properties.name,
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _reading(_driver),
            "clock_MHz": _reading(torch.cuda.clock_rate),
            "power_W": _reading(lambda: torch.cuda.power_draw() / 1e3),
            "temperature_C": _reading(torch.cuda.temperature),
            "nvfuser": _nvfuser_version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }


def _reading(read: Callable[[], Any]) -> Any:
    """A reading of the driver's, None where its Python bindings are not installed."""
    try:
        return read()
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError):
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def _nvfuser_version() -> str | None:
    from thunder.executors.nvfuserex import nvfuser_version

    return None if nvfuser_version() is None else str(nvfuser_version())
