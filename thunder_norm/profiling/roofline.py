"""How long operations take at least on a device of given speed: by its arithmetic or by its memory, whichever is slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thunder_norm.errors import ProfileError
from thunder_norm.profiling.rows import Kernel, ProfileRow
from thunder_norm.scalars import is_count, is_number


@dataclass(frozen=True)
class Device:
    """The two speeds that a roofline is made of.

    Attributes:
        name: what it is called.
        peak_flops: FLOP/s by dtype; a number holds for all.
        bandwidth: bytes/s between memory and processor.
        source: where the figures are from.

    Raises:
        ProfileError: a figure is no number > 0, or there is none.
    """

    name: str
    peak_flops: float | Mapping[torch.dtype, float]
    bandwidth: float
    source: str = ""

    def __post_init__(self) -> None:
        peaks = self.peak_flops.values() if isinstance(self.peak_flops, Mapping) else [self.peak_flops]
        if not peaks or not all(is_number(figure) and figure > 0 for figure in (*peaks, self.bandwidth)):
            raise ProfileError(
                f"a device's peak FLOP/s and bandwidth must be positive numbers, got {self.peak_flops} and {self.bandwidth}"
            )

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in a dtype; that of float32 where there is no figure."""
        if not isinstance(self.peak_flops, Mapping):
            return self.peak_flops
        return self.peak_flops.get(dtype) or self.peak_flops.get(torch.float32) or max(self.peak_flops.values())

    def seconds(self, kernels: Sequence[Kernel], read_and_written: int | None = None) -> tuple[float, float]:
        """Time for the arithmetic, and for the memory, of kernels."""
        arithmetic = sum((k.flops or 0) / self.peak(k.dtype) for k in kernels)
        moved = sum(k.bytes_read + k.bytes_written for k in kernels) if read_and_written is None else read_and_written
        return arithmetic, moved / self.bandwidth


_H200 = "NVIDIA H200 Tensor Core GPU datasheet (SXM; figures with sparsity halved; float32 without TF32)"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (80 GB SXM; figures with sparsity halved; float32 without TF32)"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (80 GB SXM; figures without sparsity; float32 without TF32)"
_CPU = "measured by measure_cpu: 2 cores of an AMD EPYC, torch 2.11.0, other work running"

# H100 and H200 are the same processor, with other memory.
_HOPPER = {
    torch.float64: 67e12, torch.float32: 67e12, torch.bfloat16: 989.5e12, torch.float16: 989.5e12,
    torch.float8_e4m3fn: 1979e12, torch.float8_e5m2: 1979e12, torch.int8: 1979e12,
}  # fmt: skip
DEVICES: Mapping[str, Device] = {
    "H200": Device(
        "H200",
        _HOPPER,
        4.8e12,
        _H200,
    ),
    "H100": Device(
        "H100",
        _HOPPER,
        3.35e12,
        _H100,
    ),
    "A100": Device(
        "A100",
        {torch.float64: 19.5e12, torch.float32: 19.5e12, torch.bfloat16: 312e12, torch.float16: 312e12, torch.int8: 624e12},
        2.039e12,
        _A100,
    ),
    "CPU": Device("CPU", {torch.float32: 1e11, torch.float64: 5e10}, 1e10, _CPU),
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """The least time of one operation.

    Attributes:
        row: the operation.
        seconds: the longer of both times, summed over its kernels.
        bound: which of both that is: "compute" or "memory"; "none" for what runs no kernel.
        intensity: FLOPs for each byte that is moved.
    """

    row: ProfileRow
    seconds: float
    bound: Literal["compute", "memory", "none"]
    intensity: float


@dataclass(frozen=True)
class Roofline:
    """The least time of each operation of a profile on a device.

    Attributes:
        device: which.
        rows: the operations, in the order of the schedule.
    """

    device: Device
    rows: tuple[Timed, ...]

    @property
    def seconds(self) -> float:
        """For all operations, one after the other."""
        return sum(t.seconds for t in self.rows)


def device_of(device: str | Device) -> Device:
    """A device, or the preset of a name.

    Raises:
        ProfileError: there is no such preset.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ProfileError(f"no device {device!r}; there are {', '.join(DEVICES)}, and thunder_norm.transforms.Device for others")
    return DEVICES[device]


def roofline(rows: Sequence[ProfileRow], device: str | Device) -> Roofline:
    """The least time of each of `rows`."""
    found = device_of(device)
    return Roofline(found, tuple(_timed(row, found) for row in rows))


def _timed(row: ProfileRow, device: Device) -> Timed:
    moved = row.bytes_read + row.bytes_written
    if row.is_fused:
        pairs = [device.seconds(row.kernels, moved)]
    else:
        pairs = [device.seconds([k]) for k in row.kernels]
    counted = sum(k.flops or 0 for k in row.kernels)
    if row.flops > counted:  # by a rule for the whole operation
        arithmetic = row.flops / device.peak(row.dtype or torch.float32)
        pairs = [(arithmetic, moved / device.bandwidth)]
    seconds = sum(max(pair) for pair in pairs)
    compute = sum(a for a, _ in pairs)
    memory = sum(m for _, m in pairs)
    bound = "none" if not pairs else "compute" if compute > memory else "memory"
    return Timed(row, seconds, bound, row.flops / moved if moved else 0.0)


def measure_cpu(*, size: int = 1024, repeats: int = 5) -> Device:
    """The speeds of this machine's processor: of a float32 and a float64 matrix product, and of a copy of 256 MB.

    Args:
        size: of the square matrices.
        repeats: the fastest of so many runs counts.

    Raises:
        ProfileError: size or repeats is not positive.
    """
    _check_amount(size, repeats)
    peaks = {}
    for dtype in (torch.float32, torch.float64):
        a = torch.rand(size, size, dtype=dtype)
        peaks[dtype] = 2 * size**3 / _fastest(lambda a=a: a @ a, repeats)
    source = torch.rand(2**25)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return Device("this CPU", peaks, moved / _fastest(lambda: target.copy_(source), repeats), "measured by measure_cpu")


def measure_gpu(device: str | torch.device = "cuda", *, size: int = 8192, repeats: int = 10) -> Device:
    """The speeds of a CUDA device: of a matrix product in each dtype that it multiplies, and of a copy of 1 GiB within its memory.

    Products are of random matrices and run as the program's do: those of float32 in TF32 where
    `torch.backends.cuda.matmul.allow_tf32` is on; those of float8 by `torch._scaled_mm`, of int8 by `torch._int_mm`.

    Args:
        device: which, if there are several.
        size: of the square matrices.
        repeats: the fastest of so many runs counts.

    Raises:
        ProfileError: size or repeats is not positive, or there is no such device.
    """
    _check_amount(size, repeats)
    where = torch_device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise ProfileError(f"measure_gpu needs a CUDA device, got {where}; measure_cpu measures the processor")
    peaks = {}
    with torch.cuda.device(where), torch.no_grad():
        for dtype in _MULTIPLIED:
            try:
                peaks[dtype] = 2 * size**3 / _fastest_on_gpu(_product(dtype, size, where), repeats)
            except RuntimeError:  # a device, or a build of torch, that has no such product
                continue
        source = torch.rand(2**28, device=where)
        target = torch.empty_like(source)
        moved = 2 * source.numel() * source.element_size()
        bandwidth = moved / _fastest_on_gpu(lambda: target.copy_(source), repeats)
        return Device(torch.cuda.get_device_name(where), peaks, bandwidth, "measured by measure_gpu")


_MULTIPLIED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def _product(dtype: torch.dtype, size: int, device: torch.device) -> Callable[[], object]:
    """A product of two random matrices; the second lies in memory by columns, as products of 8 bits ask for."""
    if dtype is torch.int8:
        a, b = (torch.randint(-128, 128, (size, size), dtype=dtype, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.mT)
    if dtype is torch.float8_e4m3fn:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return lambda: a @ b.mT


def _fastest_on_gpu(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the device's, between events."""
    run()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def torch_device(device: Any) -> torch.device:
    """What a user calls a device.

    Raises:
        ProfileError: torch knows none of that name.
    """
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as e:
        raise ProfileError(f"a device is a torch.device or the name of one, got {device!r}") from e


def _check_amount(size: int, repeats: int) -> None:
    if not (is_count(size) and is_count(repeats)):
        raise ProfileError(f"size and repeats must be positive integers, got {size!r} and {repeats!r}")


def _fastest(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
