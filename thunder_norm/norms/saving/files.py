"""The files that norm maps and reports are saved in: a line that names the format, a checksum, JSON, and the bytes of tensors.

Nothing in a file is run: there is no pickle, and JSON is read by name into what is known.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from thunder_norm._versions import __version__
from thunder_norm.errors import SavedFileError, ThunderNormError, with_details

T = TypeVar("T")

FORMAT = 1
_FIRST_LINE = re.compile(rb"thunder_norm file, format (\d{1,9})\n")
_LENGTH = struct.Struct("<Q")
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    kind: str
    made_with: dict[str, str]
    data: Any
    tensors: dict[str, torch.Tensor]


def versions() -> dict[str, str]:
    """What a file is made with."""
    thunder = importlib.metadata.version("lightning-thunder")
    found = {"thunder_norm": __version__, "torch": torch.__version__, "lightning-thunder": thunder}
    return {name: str(version) for name, version in (found | {"python": platform.python_version()}).items()}


def write(path: str | os.PathLike, kind: str, data: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put a file in place of what is there, or leave that alone if something fails.

    Raises:
        SavedFileError: a tensor that is not a plain one.
        OSError: the file cannot be written.
    """
    entries, parts, offset = {}, [], 0
    for name, t in tensors.items():
        entry, part = _packed(name, t)
        entries[name] = entry | {"offset": offset}
        parts.append(part)
        offset += len(part)
    header = json.dumps({"kind": kind, "made_with": versions(), "data": data, "tensors": entries}, allow_nan=False).encode()
    digest = hashlib.sha256()
    for part in (body := [_LENGTH.pack(len(header)), header, *parts]):
        digest.update(part)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.writelines([b"thunder_norm file, format %d\n" % FORMAT, digest.digest(), *body])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read(path: str | os.PathLike, kind: str) -> Contents:
    """What a file holds.

    Raises:
        SavedFileError: no file of ours, of a newer format, damaged, or of something else than a `kind`.
        OSError: the file cannot be read.
    """
    raw = Path(path).read_bytes()
    first = _FIRST_LINE.match(raw)
    if first is None:
        raise SavedFileError(f"{path} is no file of thunder_norm, or its beginning is damaged")
    if int(first[1]) > FORMAT:
        raise SavedFileError(
            with_details(
                f"{path} is of a newer format than this thunder_norm reads",
                format=int(first[1]),
                reads=f"up to {FORMAT}",
                instead=f"load it with a newer thunder_norm than {__version__}",
            )
        )
    digest, body = raw[first.end() : first.end() + _DIGEST], raw[first.end() + _DIGEST :]
    if int(first[1]) < 1 or hashlib.sha256(body).digest() != digest:
        raise SavedFileError(f"{path} is damaged: its checksum is not that of its contents")
    return reading(path, lambda: _contents(path, body, kind))


def reading(path: str | os.PathLike, read: Callable[[], T]) -> T:
    """What ``read()`` makes of a file.

    Raises:
        SavedFileError: it fails: the file does not say what it should.
    """
    try:
        return read()
    except ThunderNormError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever a wrong file leads to
        raise SavedFileError(f"{path} is damaged: what it says cannot be read ({type(e).__name__}: {e})") from e


def _contents(path: str | os.PathLike, body: bytes, kind: str) -> Contents:
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    header = json.loads(body[_LENGTH.size : start], parse_constant=_no_constant)
    if header["kind"] != kind:
        raise SavedFileError(f"{path} holds a {header['kind']}, not a {kind}")
    tensors = {name: _unpacked(entry, body[start:]) for name, entry in header["tensors"].items()}
    return Contents(kind, {str(k): str(v) for k, v in header["made_with"].items()}, header["data"], tensors)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} in JSON")


# -- tensors ------------------------------------------------------------------------------------------------------------


_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")
}


def dtype_named(name: str) -> torch.dtype:
    """The dtype ``torch.<name>``."""
    return _DTYPES[name]


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements of memory a tensor spans."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _packed(name: str, t: torch.Tensor) -> tuple[dict, bytes]:
    """Metadata and memory of a tensor; its strides too, because sums over it are rounded in their order."""
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided and not t.is_quantized
    if not is_plain or t.device.type == "meta" or t.is_conj() or t.is_neg():
        raise SavedFileError(f"{name!r} is a {type(t).__name__} ({t.layout}, on {t.device}), and only plain tensors are saved")
    extent = _extent(tuple(t.shape), t.stride())
    flat = t.detach().as_strided((extent,), (1,)).cpu().contiguous()
    entry = {
        "dtype": str(t.dtype).removeprefix("torch."),
        "device": str(t.device),
        "shape": list(t.shape),
        "stride": list(t.stride()),
        "requires_grad": t.requires_grad,
        "is_parameter": isinstance(t, torch.nn.Parameter),
    }
    return entry, flat.view(torch.uint8).numpy().tobytes() if extent else b""


def _unpacked(entry: dict, memory: bytes) -> torch.Tensor:
    dtype, shape, stride = dtype_named(entry["dtype"]), tuple(entry["shape"]), tuple(entry["stride"])
    if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in (*shape, *stride, entry["offset"])):
        raise SavedFileError("a tensor in the file has a shape that no tensor has")
    extent = _extent(shape, stride)
    part = memory[entry["offset"] : entry["offset"] + extent * dtype.itemsize]
    if len(part) != extent * dtype.itemsize:
        raise SavedFileError("the file ends before its last tensor does")
    flat = torch.frombuffer(bytearray(part), dtype=dtype).clone() if extent else torch.empty(0, dtype=dtype)
    try:
        t = flat.to(entry["device"]).as_strided(shape, stride)
    except (RuntimeError, AssertionError) as e:
        raise SavedFileError(f"a tensor of the file lives on {entry['device']!r}, which is not there: {e}") from e
    return torch.nn.Parameter(t, entry["requires_grad"]) if entry["is_parameter"] else t.requires_grad_(entry["requires_grad"])
