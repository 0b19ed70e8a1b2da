"""Normed tensors: a tensor and a bound on its norm; `kinds` says which norms there are.

A `NormedTensor` is a wrapper subclass that stands for the set of all tensors ``t`` of the shape of its *backing* with
``||t|| <= norm_size``.  Its class says which norm (the *kind*), `elem_dims` over which dimensions; over all others the norm
is the maximum.  Operations on it find their rule in `thunder_norm.core.dispatch`; this module knows no operation.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable
from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_any

from thunder_norm.core import elem_dims as ed
from thunder_norm.core.ranges import Range
from thunder_norm.core.running import runner
from thunder_norm.errors import NormMismatchError, UnsupportedOpError

# Norm sizes are float64: the product of 24 layers' worst sensitivities (1 / sqrt(eps) = 316 each) is 1e60, beyond float32.
NORM_DTYPE = torch.float64

# Shapes and dtypes are asked for without telling those who watch calls (`TorchFunctionMode`): there are ten for each operation.
unwatched = torch._C.DisableTorchFunction


class NormedTensor(torch.Tensor):
    """A tensor wrapper that carries a bound on its norm; the base class of all kinds.

    Args:
        norm_size: the bound, a number >= 0 or a 0-dim floating tensor (kept differentiable; stored as float64).  It may be infinite
            (nothing is known), and a tensor NaN: so is the norm of a tensor with NaN entries, and of all that is computed from it.
        backing: the tensor described, of any shape: real, meta or fake.  Without one the tensor is *unfinalized*.
        elem_dims: the dimensions the norm runs over; the kind's default if None.
        norm_size_requires_grad: make `norm_size` a leaf that requires grad (only for a norm_size given as a number).
        perturbation_size: optional 0-dim floating tensor or number: a bound on how far the tensor may move, in the same norm.
        sensitivity: only for what a rule returns: argument name -> Lipschitz constant with respect to that argument.
        multilinear: only for what a rule returns: the value is affine in each argument's norm_size, and the sensitivities
            are its partial derivatives.

    Raises:
        NormMismatchError: the size is negative, a number that is NaN, not a scalar or not floating, the backing is not a plain
            tensor, or elem_dims do not fit it.
    """

    # backing is None and elem_dims may be while unfinalized; operations refuse such a tensor, so rules rely on both
    backing: torch.Tensor
    norm_size: torch.Tensor
    perturbation_size: torch.Tensor | None
    elem_dims: ed.Dims
    _shape: torch.Size
    _ndim: int
    _dtype: torch.dtype
    _is_leaf_value: bool
    _aliases: list[weakref.ref]
    _sensitivity: dict[str, Any] | None
    _is_multilinear: bool
    _facts: Any
    _range: Range | None
    _sums: tuple
    _least: float
    _at_data: tuple[Any, NormedTensor | None] | None
    _spread: Any
    _away: NormedTensor | None
    _whole: NormedTensor | None
    _inside: torch.Tensor | None
    _is_of_parameters: bool
    _is_constant: bool
    _jump: NormMismatchError | None

    _undifferentiated: ClassVar[str] = "backing"  # derivatives have norms of their own, which those of norms are not
    _keeps_to_itself: ClassVar[bool] = True  # what rules know of it besides its norm

    # as torch knows them, without a call of `__torch_function__`: rules ask for them thirty times for each operation
    shape = property(attrgetter("_shape"), doc="As of any tensor.")  # pyright: ignore[reportAssignmentType]
    ndim = property(attrgetter("_ndim"), doc="As of any tensor.")  # pyright: ignore[reportAssignmentType]
    dtype = property(attrgetter("_dtype"), doc="As of any tensor.")  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls,
        norm_size: float | torch.Tensor,
        *,
        backing: torch.Tensor | None = None,
        elem_dims: int | Iterable[int] | None = None,
        norm_size_requires_grad: bool = False,
        perturbation_size: float | torch.Tensor | None = None,
        sensitivity: dict[str, Any] | None = None,
        multilinear: bool = False,
    ):
        if cls is NormedTensor:
            raise TypeError("NormedTensor is abstract: construct one of its kinds, such as RMSTensor")
        if backing is not None:
            _check_plain(backing)
        size = _as_size(norm_size, "norm_size")
        if norm_size_requires_grad:
            if isinstance(norm_size, torch.Tensor):
                raise NormMismatchError("norm_size_requires_grad is for a number; give a tensor that requires grad instead")
            size.requires_grad_()
        perturbation = None if perturbation_size is None else _as_size(perturbation_size, "perturbation_size")
        self = cls._wrap(backing, size, perturbation, None if elem_dims is None else _as_dims(elem_dims))
        self._is_leaf_value = True
        self._sensitivity = sensitivity
        self._is_multilinear = multilinear
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def _wrap(
        cls,
        backing: torch.Tensor | None,
        norm_size: torch.Tensor,
        perturbation_size: torch.Tensor | None,
        elem_dims: ed.Dims | None,
    ) -> NormedTensor:
        """Build without looking at values; `elem_dims` are made canonical as soon as there is a backing."""
        like = norm_size if backing is None else backing
        with unwatched():
            shape, dtype = torch.Size() if backing is None else backing.shape, like.dtype
            strides = _strides(backing)
            # what stands for an argument has one entry in memory; written into, it has the layout of what is written
            is_expanded = strides is not None and 0 in strides
            self = torch.Tensor._make_wrapper_subclass(
                cls,
                shape,
                strides=strides,
                storage_size=shape.numel() * dtype.itemsize if is_expanded else None,
                dtype=dtype,
                device=like.device,
                requires_grad=False,
            )
        ndim = len(shape)
        self._shape, self._ndim, self._dtype = shape, ndim, dtype
        if backing is not None:
            elem_dims = cls._canonical(cls.default_elem_dims(ndim) if elem_dims is None else elem_dims, ndim)
        self.backing = cast(torch.Tensor, backing)
        self.norm_size = _for_autograd(norm_size)
        self.perturbation_size = None if perturbation_size is None else _for_autograd(perturbation_size)
        self.elem_dims = cast(ed.Dims, elem_dims)
        self._is_leaf_value = False  # an operation's result, which an in-place operation may replace
        self._aliases = []  # the normed tensors in one storage with it, itself included: one list for all of them
        self._sensitivity = None
        self._is_multilinear = False
        self._facts = None  # what the rule that made it knows about it beyond its norm, for rules that come next
        self._range = None  # between which numbers all entries are, whatever the norm
        self._sums = ()  # of which tensors that are not negative it is a sum, and what is summed by them
        self._least = 0.0  # the norm of each group over elem_dims is no smaller
        self._at_data = None  # it with the norm of its entries (None: itself), and what that was found from
        self._spread = None  # in which ellipsoids it moves, inside `norm_sensitivity("composed")`
        self._away = None  # it as it moves away from the data alone, inside `norm_sensitivity("within")`
        self._whole = None  # it as one row, there
        self._inside = None  # how far it moves by what happened since the tensors that it is known as a function of
        self._is_of_parameters = False  # made by an operation from parameters alone, which move
        self._is_constant = False  # a plain tensor of the program, lifted: no other one is meant
        self._jump = None  # it jumps: what is made of it is refused with this, unless that makes the jump good
        return self

    @classmethod
    def default_elem_dims(cls, ndim: int) -> ed.Dims:
        """The elem_dims used when none are given: the last dimension (none for a scalar)."""
        return (-1,) if ndim else ()

    @classmethod
    def _canonical(cls, dims: ed.Dims, ndim: int) -> ed.Dims:
        return ed.canonical(dims, ndim)

    @classmethod
    def measure(cls, t: torch.Tensor, elem_dims: ed.Dims) -> torch.Tensor:
        """The exact norm of `t` in this kind over canonical `elem_dims`, a 0-dim tensor, differentiable in `t`."""
        raise NotImplementedError

    @classmethod
    def of(cls, t: torch.Tensor, elem_dims: int | Iterable[int] | None = None) -> NormedTensor:
        """Wrap the plain tensor `t` with its exact norm, differentiably.

        >>> RMSTensor.of(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).norm_size.item()
        3.5355339059327378

        Raises:
            NormMismatchError: `t` is not a floating tensor, or complex where the kind measures real ones, or elem_dims do not fit it.
        """
        if not isinstance(t, torch.Tensor) or isinstance(t, NormedTensor) or not has_norm(t):
            raise NormMismatchError(f"{cls.__name__}.of needs a plain floating tensor, got {describe(t)}")
        if is_complex(t) and not getattr(cls.measure, "takes_complex", False):
            raise NormMismatchError(f"{cls.__name__} is a norm of real tensors, got {describe(t)}")
        given = cls.default_elem_dims(t.ndim) if elem_dims is None else _as_dims(elem_dims)
        dims = cls._canonical(given, t.ndim)
        if t.numel() == 0:
            size = torch.zeros((), dtype=NORM_DTYPE, device=t.device)
        else:
            is_coarse = t.dtype.itemsize < 4 and not getattr(cls.measure, "takes_any_precision", False)
            entries = t if t.layout is torch.strided else t.to_dense()
            size = cls.measure(entries.float() if is_coarse else entries, dims).to(NORM_DTYPE)
        self = cls._wrap(t, size, None, dims)
        self._is_leaf_value = True
        return self

    @property
    def finalized(self) -> bool:
        """Whether there is a backing, and with it a shape and a dtype."""
        return self.backing is not None

    def finalize(self, backing: torch.Tensor) -> NormedTensor:
        """The same norm, attached to `backing` (real, meta or fake).

        Raises:
            NormMismatchError: there is a backing already, or elem_dims do not fit this one.
        """
        if self.finalized:
            raise NormMismatchError(f"{self!r} is already finalized")
        _check_plain(backing)
        out = type(self)._wrap(backing, self.norm_size, self.perturbation_size, self.elem_dims)
        out._is_leaf_value = self._is_leaf_value
        return out

    @property
    def numel_normed(self) -> int:
        """Number of elements the norm runs over, N in the formulas."""
        return ed.numel(self.shape, self.elem_dims)

    # -- the wrapper subclass protocol ---------------------------------------------------------------------------------

    def __tensor_flatten__(self):
        names = [n for n in ("backing", "norm_size", "perturbation_size") if getattr(self, n) is not None]
        return names, (self.elem_dims,)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], ctx: tuple, outer_size=None, outer_stride=None):
        (dims,) = ctx
        self = cls._wrap(inner.get("backing"), inner["norm_size"], inner.get("perturbation_size"), dims)
        self._is_leaf_value = isinstance(inner["norm_size"], FakeTensor)  # it stands for an input of the program being traced
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return runner().torch_function(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return runner().torch_dispatch(func, args, kwargs or {})

    def aliases(self) -> list[NormedTensor]:
        """The other normed tensors in its storage, as far as they are alive."""
        found = (ref() for ref in self._aliases)
        return [x for x in found if x is not None and x is not self]

    def _assign(self, result: NormedTensor) -> NormedTensor:
        """Take over `result`: what an in-place operation means."""
        self.__class__ = type(result)
        if self.shape != result.shape or self.stride() != result.stride():
            # of the wrapper, which has no entries
            with unwatched(), torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
                torch.Tensor.as_strided_(self, result.shape, result.stride())
        self._shape, self._ndim = result._shape, result._ndim
        self.backing, self.elem_dims = result.backing, result.elem_dims
        self.norm_size, self.perturbation_size = result.norm_size, result.perturbation_size
        self._facts, self._range, self._spread = result._facts, result._range, result._spread
        self._least, self._sums, self._away, self._whole = result._least, result._sums, result._away, result._whole
        self._inside, self._is_of_parameters, self._is_constant = result._inside, result._is_of_parameters, result._is_constant
        self._jump = result._jump
        return self

    def requires_grad_(self, requires_grad: bool = True):
        """Refused: a NormedTensor never requires grad itself; its `norm_size` may.

        Nothing happens where a model that is run or traced for its norms asks for it, of what its embedding returns for instance.
        """
        if requires_grad and not runner().runs_model():
            raise UnsupportedOpError("a NormedTensor never requires grad itself; use x.norm_size.requires_grad_()")
        return self

    def backward(self, *args: Any, **kwargs: Any):
        """Refused: differentiate the norm, ``x.norm_size.backward()``."""
        raise UnsupportedOpError("a NormedTensor has no backward of its own; use x.norm_size.backward()")

    def __deepcopy__(self, memo: dict[int, Any]) -> NormedTensor:
        if self.finalized:
            return super().__deepcopy__(memo)
        copied = memo[id(self)] = self._wrap(
            None, copy.deepcopy(self.norm_size, memo), copy.deepcopy(self.perturbation_size, memo), self.elem_dims
        )
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = list(self.shape) if self.finalized else "unfinalized"
        perturbation = "" if self.perturbation_size is None else f", perturbation_size={_show(self.perturbation_size)}"
        dims = "default" if self.elem_dims is None else self.elem_dims
        return f"{type(self).__name__}({_show(self.norm_size)}{perturbation}, elem_dims={dims}, shape={shape})"


def _strides(backing: torch.Tensor | None) -> tuple[int, ...] | None:
    """Contiguity decides which ATen operations a program becomes; sparse tensors have none."""
    if backing is None:
        return ()
    return backing.stride() if backing.layout is torch.strided else None


def is_complex(t: torch.Tensor) -> bool:
    """Whether the entries of a tensor are complex numbers; a norm is then that of their moduli."""
    if isinstance(t, NormedTensor):
        return t.dtype.is_complex
    with unwatched():
        return t.dtype.is_complex


def has_norm(t: torch.Tensor) -> bool:
    """Whether the entries of a tensor are real or complex numbers, of which there are norms: no integers, no bools."""
    with unwatched():
        return t.dtype.is_floating_point or t.dtype.is_complex


def _for_autograd(size: torch.Tensor) -> torch.Tensor:
    """A size that autograd can take: one made under `torch.inference_mode` it cannot."""
    with unwatched():
        if not size.is_inference() or isinstance(size, FakeTensor):
            return size
    with torch.inference_mode(False):
        return size.clone()


def _check_plain(backing: Any) -> None:
    if not isinstance(backing, torch.Tensor) or isinstance(backing, NormedTensor):
        raise NormMismatchError(f"the backing of a NormedTensor must be a plain tensor, got {describe(backing)}")


def _as_dims(dims: int | Iterable[int]) -> ed.Dims:
    if not isinstance(dims, int | Iterable):
        raise NormMismatchError(f"elem_dims must be an int or several, got {dims!r}")
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _as_size(size: Any, name: str) -> torch.Tensor:
    """A 0-dim float64 tensor from a number or tensor; refuses what cannot be a norm."""
    if isinstance(size, torch.Tensor):
        with unwatched():
            if size.ndim != 0 or not size.is_floating_point() or isinstance(size, NormedTensor):
                raise NormMismatchError(f"{name} must be a 0-dim floating tensor or a number, got {describe(size)}")
            if size.device.type == "cpu" and not isinstance(size, FakeTensor):
                _check_size(size.item(), name, may_be_nan=name == "norm_size")
            is_stored_so = size.dtype is NORM_DTYPE
        return size if is_stored_so else size.to(NORM_DTYPE)
    if isinstance(size, bool) or not isinstance(size, Real):
        raise NormMismatchError(f"{name} must be a 0-dim floating tensor or a number, got {type(size).__name__}")
    _check_size(float(size), name)
    return torch.tensor(float(size), dtype=NORM_DTYPE, device="cpu")


def _check_size(size: float, name: str, may_be_nan: bool = False) -> None:
    """A number that is NaN is a mistake; one that was computed is the norm of a tensor with NaN entries."""
    if size < 0 or math.isnan(size) and not may_be_nan:
        raise NormMismatchError(f"{name} must be >= 0, got {size}")


def _show(size: torch.Tensor) -> str:
    if size.device.type == "meta" or isinstance(size, FakeTensor):
        return "?"
    return f"{size.item():.6g}" + (", requires_grad" if size.requires_grad else "")


def describe(t: Any) -> str:
    """Short text for error messages: kind, shape and elem_dims of a tensor, or the type of anything else."""
    if isinstance(t, NormedTensor):
        shape = list(t.shape) if t.finalized else "[unfinalized]"
        numbers = f" {str(t.dtype).removeprefix('torch.')}" if is_complex(t) else ""
        return f"{type(t).__name__}{shape}{numbers} over dims {t.elem_dims}"
    if isinstance(t, torch.Tensor):
        return f"Tensor[{', '.join(map(str, t.shape))}] {str(t.dtype).removeprefix('torch.')}"
    if isinstance(t, list | tuple):
        return f"{type(t).__name__}({', '.join(map(describe, t))})"
    return type(t).__name__ if t is not None else "None"


def describe_call(args: tuple, kwargs: dict) -> str:
    """Short text for error messages: the arguments of a call."""
    shown = [describe(a) if _has_tensor(a) else repr(a) for a in args]
    shown += [f"{k}={describe(v) if _has_tensor(v) else repr(v)}" for k, v in kwargs.items()]
    return f"({', '.join(shown)})"


def _has_tensor(value: Any) -> bool:
    return tree_any(lambda v: isinstance(v, torch.Tensor), value)
