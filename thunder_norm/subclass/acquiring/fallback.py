"""Opaque primitives: operations that torch runs, differentiated by torch's own formula.

Thunder registers such operations too (``thunder.torch.default_torch_ops``), but loses the gradients of tensors in lists and of
keyword arguments, and computes gradients of results that nobody used.

Those that torch can write in simpler operations (`decompositions`) are composites instead: torch still runs them as one kernel,
and an executor that fuses may claim what is inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from thunder_norm.errors import UnsupportedOpError, with_details
from thunder_norm.op_names import identifier, op_name
from thunder_norm.subclass.acquiring.effects import OfOperator, is_effect
from thunder_norm.subclass.acquiring.functional_forms import WITHOUT_HISTORY, rewritten
from thunder_norm.subclass.acquiring.lengths import Late
from thunder_norm.subclass.acquiring.sized import Sized
from thunder_norm.tracing.activity import differentiated_in_first
from thunder_norm.tracing.inferred import Inferred
from thunder_norm.tracing.locations import location_of_user
from thunder_norm.tracing.recording import print_without_module
from thunder_norm.tracing.translation import all_for_torch
from thunder_norm.tracing.undefined_gradients import gradients_by_torch
import thunder.torch as ltorch
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.transform_common import NON_FUNCTIONAL_OPS
from thunder.core.transforms import register_grad
from thunder.executors.torch_compile import torch_compile_ex
from thunder.executors.torchex import ex as torch_ex
from thunder.extend import OperatorExecutor

# Runs the operations Thunder has no symbol for.  Never in an executor list: only what is written here carries it.
fallback_executor = OperatorExecutor("thunder_norm_aten", version="1")


# They draw numbers: each call is made once, in its place, by torch, so that the numbers are those of eager under a seed.
_RANDOM = (prims.OpTags.RANDOM_OP, prims.OpTags.DONT_DCE, prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD)

# What they do besides is done once, in its place.
_EFFECTS = (prims.OpTags.DONT_DCE, prims.OpTags.DONT_RECOMPUTE_IN_BACKWARD)

# They update running statistics without saying so in their schemas.
_UPDATES_ARGUMENTS = frozenset({torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default})


_NOT_RANDOM = frozenset({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default})  # on CPU it has no dropout
_ALSO_RANDOM = frozenset({torch.ops.aten.normal_functional.default})  # torch forgot the tag
_DROPOUT = torch.ops.aten.native_dropout.default

# What they return has derivative zero, whatever the parameters of the distribution.
_CONSTANT = frozenset(
    "bernoulli cauchy exponential geometric log_normal multinomial normal normal_functional poisson rand rand_like randint "
    "randint_like randn randn_like random randperm uniform".split()
)


def is_random(func: Callable) -> bool:
    """Whether `func` draws from a generator."""
    return func in _ALSO_RANDOM or (torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and func not in _NOT_RANDOM)


def is_kept(func: Callable) -> bool:
    """Whether `func` runs once and in its place, used or not."""
    return is_effect(func) or is_random(func)


class Written(NamedTuple):
    """How an operation, and its gradients to its floating inputs if that is possible, are written in other operations."""

    results: Callable[[Callable, tuple, dict], list[TensorProxy]]
    gradients: Callable[
        [Callable, tuple, dict, Sequence[TensorProxy], Sequence[TensorProxy | None]], list[TensorProxy | None] | None
    ]


class Made(NamedTuple):
    """What a symbol of ours stands for: a function, the results that are used, and which of the symbols for them it is."""

    function: Callable
    used: tuple[bool, ...]
    form: str


FORMS = ("kernel", "gradient", "composite")
_symbols: dict[Made, Symbol] = {}
_made: dict[Symbol, Made] = {}
_joints: dict[Symbol, Callable] = {}  # of operators of others, for what moves


def made_for(symbol: Symbol) -> Made | None:
    """What a symbol stands for; None if it is none of ours."""
    return _made.get(symbol)


def symbol_for(made: Made, written: Written) -> Symbol:
    """The symbol that stands for this; a composite is written so."""
    fallback(made.function, made.used, written if made.form == "composite" else None)
    return _symbols[made]


def _note(symbol: Symbol, made: Made) -> None:
    _symbols[made], _made[symbol] = symbol, made


# Products on a GPU that take the second matrix by columns, and say so when there are no data too; proxies have no strides.
_BY_COLUMNS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_scaled_mm", "_scaled_mm_v2") if hasattr(torch.ops.aten, name)
)


def _laid_out(func: Callable) -> Callable:
    """`func` for what is inferred of it: its arguments lie in memory as it asks for."""
    if func not in _BY_COLUMNS:
        return func

    @functools.wraps(func)
    def called(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(a.contiguous(), b.mT.contiguous().mT, *args, **kwargs)

    return called


def _no_part_of_a_trace(func: Callable, e: NotImplementedError) -> UnsupportedOpError:
    """What Thunder says where it cannot work out what an operation returns: of layouts and of objects that it does not know."""
    return UnsupportedOpError(
        with_details(
            f"{op_name(func)} cannot be part of a trace",
            at=location_of_user(),
            why=str(e.__context__ or e).partition("\n")[0],
            instead="tensors of the strided layout, and numbers",
        )
    )


@functools.cache
def fallback(func: Callable, used: tuple[bool, ...], written: Written | None = None) -> Symbol:
    """One symbol for `func`, that returns the tensors of its result marked in `used`, as a tuple.

    With `written` it is a composite of other operations.
    """
    name = _fallback_name(func) + _which(func, used)
    is_index = (func.func if isinstance(func, Sized) else func) is torch.Tensor.__getitem__
    infer = functools.partial(_infer_once_each, func) if is_effect(func) or is_index else ltorch.meta_adaptor(_laid_out(func))
    infer = Inferred(infer) if _is_torchs_or_ours(func) else infer

    def meta(*args: Any, **kwargs: Any) -> tuple[TensorProxy, ...]:
        try:
            inferred = infer(*args, **kwargs)
        except NotImplementedError as e:
            raise _no_part_of_a_trace(func, e) from e
        return _select(tree_flatten(inferred)[0], used, TensorProxy)

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if kwargs or not _PLAIN.issuperset(map(type, args)):
            # only the computation trace is translated, the backward is not
            args, kwargs = all_for_torch((args, kwargs))
        result = _LSTM[func](*args) if func in _LSTM else func(*args, **kwargs)
        if type(result) is torch.Tensor:
            return (result,) if used[0] else ()
        return _select(tree_flatten(result)[0], used, torch.Tensor)

    def vjp(
        arguments: tuple[tuple, dict], cotangents: Sequence[torch.Tensor | None], moving: Sequence[bool] | None = None
    ) -> tuple[torch.Tensor, ...]:
        if func in _UPDATES_ARGUMENTS:  # once is enough
            arguments = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, arguments)
        return gradients_by_torch(run, arguments, cotangents, _without_history(func, *arguments), moving)

    vjp.takes_undefined = True  # pyright: ignore[reportFunctionMemberAccess]

    def vjp_meta(
        arguments: tuple[tuple, dict], cotangents: Sequence[TensorProxy], moving: Sequence[bool] | None = None
    ) -> tuple[TensorProxy, ...]:
        return tuple(TensorProxy(like=p, requires_grad=False) for p in _differentiable(arguments))

    tags = list(_RANDOM) if is_random(func) else list(_EFFECTS) if is_effect(func) else None
    symbol = fallback_executor.register_operator(name, meta=meta, fn=run, tags=tags)
    vjp_symbol = fallback_executor.register_operator(f"{name}_vjp", meta=vjp_meta, fn=vjp)
    _note(symbol, Made(func, used, "kernel"))
    _note(vjp_symbol, Made(func, used, "gradient"))
    if written is not None:
        kernel = symbol
        symbol = Symbol(
            name=name,
            id=f"thunder_norm.{name}",
            meta=lambda *args, **kwargs: _select(written.results(func, args, kwargs), used, TensorProxy),
            _bind_postprocess=print_without_module,
        )
        torch_ex.register_implementation(symbol.id, kernel)
        _note(symbol, Made(func, used, "composite"))
    if func is rewritten:
        differentiated_in_first(symbol.id)
    if is_kept(func):
        NON_FUNCTIONAL_OPS.add(symbol.id)
    elif isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":  # torch.compile knows them all
        torch_compile_ex.register_supported(symbol.id)

    joint = functools.partial(_gradient, func, used, written, symbol, vjp_symbol)
    register_grad(symbol.id, joint())  # the id is ours: nothing else is differentiated by it
    if not (_is_torchs_or_ours(func) or is_random(func) or is_effect(func)):
        _joints[symbol] = joint
    return symbol


def joint_of(bsym: BoundSymbol, moving: Set[str]) -> Callable | None:
    """What differentiates an operator of somebody else by those of its arguments alone that are named in `moving`.

    Its formula asks which gradients are wanted (``ctx.needs_input_grad``), and may have none for others.  None where that is what
    `fallback` has registered already.
    """
    joint = _joints.get(bsym.sym)
    wanted = tuple(p.name in moving for p in _differentiable((bsym.args, bsym.kwargs)))
    return None if joint is None or all(wanted) else joint(wanted)


def _gradient(
    func: Callable,
    used: tuple[bool, ...],
    written: Written | None,
    symbol: Symbol,
    vjp_symbol: Symbol,
    moving: tuple[bool, ...] | None = None,
) -> Callable:
    """What Thunder calls in place of `symbol` where it is differentiated; `moving` says by which of its arguments, None for all."""

    def grad(*args: Any, **kwargs: Any) -> tuple[TensorProxy, ...]:
        inputs = _differentiable((args, kwargs))
        if written is None or not inputs:
            results, returned = (symbol(*args, **kwargs),) * 2
        else:  # also those results that only the backward needs
            results = fallback(func, (True,) * len(used), written)(*args, **kwargs)
            returned = _select(results, used, TensorProxy)
        outputs = _differentiable(returned)
        if inputs and outputs:
            cotangents = tuple(prims.get_grad(p) for p in outputs)
            if isinstance(func, OfOperator):
                found = _effect_vjp(func, args, kwargs, inputs, results, cotangents)
            elif func is rewritten:  # which keeps nothing for it: the tensor is written into
                found = [cotangents[0] if p.name == args[0].name else None for p in inputs]
            elif is_random(func):
                found = _random_vjp(func, args, inputs, results, cotangents)
            else:
                of = {p.name: g for p, g in zip(outputs, cotangents, strict=True)}
                found = written.gradients(func, args, kwargs, results, [of.get(p.name) for p in results]) if written else None
                if found is None:
                    found = vjp_symbol((args, kwargs), cotangents, moving)
            for p, g, moves in zip(inputs, found, moving or (True,) * len(inputs), strict=True):
                if moves:
                    prims.put_grad(p, ltorch.zeros_like(p) if g is None else g)
        return returned

    return grad


def _random_vjp(
    func: Callable, args: tuple, inputs: Sequence[TensorProxy], results: Sequence[TensorProxy], cotangents: Sequence[TensorProxy]
) -> list[TensorProxy]:
    """Gradients that use what was drawn; running the operation again would draw other numbers."""
    if func is _DROPOUT:
        _, p, train = args
        scale = 1.0 if not train else 0.0 if p == 1 else 1 / (1 - p)
        return [ltorch.mul(ltorch.mul(cotangents[0], ltorch.to(results[1], cotangents[0].dtype)), scale)]
    if func.overloadpacket.__name__ in _CONSTANT:
        return [ltorch.zeros_like(p) for p in inputs]
    if func is torch.ops.aten._standard_gamma.default:  # implicit reparametrization: how what was drawn moves with the argument
        (slope,) = fallback(torch.ops.aten._standard_gamma_grad.default, (True,))(inputs[0], results[0])
        return [ltorch.mul(cotangents[0], slope)]
    raise UnsupportedOpError(
        with_details(
            f"a gradient through {op_name(func)}, which draws random numbers",
            at=location_of_user(),
            why="the backward would draw others: it is not known how those that were drawn move with the arguments",
            instead="detach what is drawn, or draw from a distribution with a gradient (rsample of torch.distributions)",
        )
    )


def _effect_vjp(
    func: OfOperator,
    args: tuple,
    kwargs: dict,
    inputs: Sequence[TensorProxy],
    results: Sequence[TensorProxy],
    cotangents: Sequence,
) -> list[TensorProxy]:
    """Gradients as torch's autograd has them, which knows nothing of what an operator writes: a tensor keeps its history."""
    written = list(dict.fromkeys(p.name for p in func.written_tensors(args[1:], kwargs)))
    if len(results) != 1 + len(written):
        raise UnsupportedOpError(f"{func.func} returns a tensor that is to be differentiated, and has no gradient")
    of = {p.name: g for p, g in zip(_differentiable(results), cotangents, strict=True)}
    gradients = dict(zip(written, (of.get(p.name) for p in results[1:]), strict=True))
    # `pop`: gradients to a tensor that was given twice add up
    return [g if (g := gradients.pop(p.name, None)) is not None else ltorch.zeros_like(p) for p in inputs]


def _is_torchs_or_ours(func: Callable) -> bool:
    """Whether nobody else says what its results are."""
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace == "aten"
    return isinstance(func, FunctionType) and func.__module__.partition(".")[0] == "thunder_norm"


def _infer_once_each(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """What `func` returns, as proxies; a tensor given twice is one tensor for it, as it is when the program runs.

    Thunder's adaptor takes no Ellipsis.
    """
    leaves, spec = tree_flatten((args, kwargs))
    first: dict[str, int] = {}
    places = [first.setdefault(v.name, i) if isinstance(v, TensorProxy) else i for i, v in enumerate(leaves)]

    def of_leaves(*given: Any) -> Any:
        own_args, own_kwargs = tree_unflatten([Ellipsis if leaves[i] is Ellipsis else given[i] for i in places], spec)
        return func(*own_args, **own_kwargs)

    return ltorch.meta_adaptor(of_leaves)(*(None if v is Ellipsis else v for v in leaves))


def _which(func: Callable, used: tuple[bool, ...]) -> str:
    """The part of the name that tells apart symbols of one operation: names are what the generated program calls them by."""
    counted = f"_{len(used)}" if len(used) != len(getattr(getattr(func, "_schema", None), "returns", "1")) else ""
    return counted + ("" if all(used) else "_" + "_".join(str(i) for i, u in enumerate(used) if u))


def _select(values: Sequence[Any], used: tuple[bool, ...], kind: type) -> tuple:
    """The tensors marked in `used`, which has an entry for each; a kernel may leave out one that it is not asked for (None)."""
    tensors = values if len(values) == len(used) else [v for v in values if isinstance(v, kind)]
    return tuple(t for t, u in zip(tensors, used, strict=True) if u)


def _lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """The layer of an LSTM by oneDNN: it has a workspace, for its backward, only where gradients are recorded as it runs."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        results = torch.ops.aten.mkldnn_rnn_layer.default(*args)
    return results if is_recorded else tuple([t.detach() for t in results])


def _lstm_layer_backward(*args: Any) -> tuple[torch.Tensor, ...]:
    """Its backward, which reads the memory of gradients as if they were contiguous."""
    given = [t.contiguous() if isinstance(t, torch.Tensor) else t for t in args]
    return torch.ops.aten.mkldnn_rnn_layer_backward.default(*given)


_LSTM = {
    torch.ops.aten.mkldnn_rnn_layer.default: _lstm_layer,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
}


def _differentiable(tree: Any) -> list[TensorProxy]:
    return [p for p in tree_flatten(tree)[0] if isinstance(p, TensorProxy) and dtypes.is_inexact_dtype(p.dtype)]


def _without_history(func: Callable, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments that torch has no derivative for, and refuses to have one."""
    schema = getattr(func, "_schema", None)
    named = {} if schema is None else {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    return [t for name in WITHOUT_HISTORY if isinstance(t := named.get(name), torch.Tensor)]


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, type(None)})  # arguments with nothing to translate


def _fallback_name(func: Callable) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return identifier(func)
    if is_effect(func) or isinstance(func, Sized | Late):
        return func.__name__
    if func.__name__ == "__get__":  # a property of torch.Tensor
        return f"Tensor_get_{func.__self__.__name__}"
    owner = getattr(func, "__module__", None) or "Tensor"  # methods written in C have no module
    return f"{owner}_{func.__name__}".replace(".", "_")
