"""A monitor of training: norms, updates, gradients, activations, attention logits, and bounds, every so many steps."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import OptimizedModule

from thunder_norm.core.tensors import describe
from thunder_norm.errors import (
    DeadWeightWarning,
    DivergenceWarning,
    MissingBoundsWarning,
    NormMismatchError,
    ThunderNormError,
    with_details,
)
from thunder_norm.modular.monitoring import outputs
from thunder_norm.modular.monitoring.bounds import LayerBounds, as_arguments, plain_arguments
from thunder_norm.modular.monitoring.dead import Dead
from thunder_norm.modular.monitoring.forwards import Forwards, Seen, name_of_heads
from thunder_norm.modular.monitoring.growth import Growth
from thunder_norm.modular.monitoring.outputs import Record
from thunder_norm.modular.monitoring.parameters import (
    Spectrum,
    difference,
    dual_norms,
    measured_names,
    natural_norms,
    norm_of,
)
from thunder_norm.modular.monitoring.steps import Steps, Tensors
from thunder_norm.modular.unit_norms import UnitNorms
from thunder_norm.modular.wrappers import layers
from thunder_norm.norms.lifts.inference import NormSpec
from thunder.core.module import ThunderModule


class TrainingMonitor:
    """Watches a training loop that stays as it is.

    Of every step whose number is a multiple of `every`, a record says

    - of each parameter: its ``norm`` in its own kind (the operator norm RMS to RMS of a matrix, the largest RMS of a row of a table, ...;
      the kinds are those of `ModularNorm`), the norm of its ``update``, their ``ratio``, the dual norm of its ``gradient``
      (``max <G, D> over |D| <= 1``), and of a matrix the extreme singular values ``sigma_max`` and ``sigma_min`` and the ``stable_rank``
      ``|W|_F^2 / sigma_max^2``;
    - of what each module returns: its ``norm``, the largest in the batch, the ``bound`` on it at the norms that parameters and inputs
      have then, and their quotient, the ``tightness``;
    - of each attention head: the largest logit that goes into its softmax.

    Nothing about training changes: parameters, gradients, buffers, random numbers and results are to the bit what they are without it.
    Nothing is put into the model, so it can be copied and pickled.  In steps that are sampled there is a copy of the parameters in memory.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> monitor = TrainingMonitor(model, x, every=10, optimizer=optimizer)
    >>> model(x).square().mean().backward()
    >>> optimizer.step()
    >>> sorted(monitor.latest["parameters"]["0.weight"])
    ['gradient', 'norm', 'ratio', 'sigma_max', 'sigma_min', 'stable_rank', 'update']

    Args:
        model: the module that is trained.  Of one that `torch.compile` or `thunder.jit` made the plain module is run once more, in steps
            that are sampled, for activations and logits.
        example: a batch: an argument of the model, a tuple of them, or a dict of them by name.  Bounds are for batches of its shapes;
            others have no ``bound``, and ``notes`` say why.  None: no bounds, and kinds of parameters by the modules they are in.
        every: how many steps from one record to the next; the first step has one.
        optimizer: whose steps are watched, or several that step one after the other; `attach` gives it later.
        activations: whether forwards are watched, for activations and attention.
        bounds: whether there are bounds; to derive them takes some seconds, once.
        warn: whether `DivergenceWarning` is given.
        keep: how many records `history` holds, the last ones; all if None.

    Attributes:
        model: the plain module.
        step: how many steps there have been.
        history: the records, nested dicts with "step" (how many steps there had been), "parameters", "activations", "attention"
            and "notes".

    Warns:
        DivergenceWarning: something is not finite, or grows as it does before a run diverges; said once, and again when it has doubled.
        DeadWeightWarning: the gradient of a parameter was 0 in six samples without a break, in which others had one.
        MissingBoundsWarning: no bounds can be derived, or no kinds of parameters; everything else works.

    Raises:
        NormMismatchError: no such model or optimizer, parameters that are sharded or on the meta device, or a model compiled in place.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        example: Any = None,
        *,
        every: int = 50,
        optimizer: Any = None,
        activations: bool = True,
        bounds: bool = True,
        warn: bool = True,
        keep: int | None = None,
    ):
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise NormMismatchError(f"every must be a whole number of steps >= 1, got {every!r}")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise NormMismatchError(f"keep must be None or a number of records, got {keep!r}")
        self.model, compiled = _plain(model, activations)
        self.every, self.step = every, 0
        self.history: deque[Record] = deque(maxlen=keep)
        self._warns, self._growth, self._dead = warn, Growth(), Dead()
        self._args, self._kwargs = ((), {}) if example is None else as_arguments(example)
        self._has_example = example is not None
        self._norms: dict[str, NormSpec] = {}
        self._inputs: tuple[tuple, dict] | None = None
        self._derive_norms(measured_names(self.model))
        self._bounds = self._layer_bounds() if bounds and activations and self._inputs is not None else None
        kinds = {} if self._bounds is None else self._bounds.kinds
        self._forwards = Forwards(self.model, compiled, kinds, self._see) if activations else None
        self._subscribers: list[Callable[[Record], None]] = []
        self._steps: Steps | None = None
        self._record = _empty(0)
        if optimizer is not None:
            self.attach(optimizer)

    # -- what it is for -----------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Any) -> TrainingMonitor:
        """Watch the steps of an optimizer, or of several that step one after the other, in place of those watched so far.

        Raises:
            NormMismatchError: it is no `torch.optim.Optimizer`.
        """
        several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not several:
            raise NormMismatchError("optimizer is an empty sequence")
        steps = Steps(several, self._is_sampled, self._before_step, self._see_gradients, self._after_step)
        if self._steps is not None:
            self._steps.close()
        self._steps = steps
        self._open()
        return self

    def remove(self) -> None:
        """Watch no more; what was recorded stays."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        if self._forwards is not None:
            self._forwards.close()

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def latest(self) -> Record:
        """The last record.

        Raises:
            NormMismatchError: there is none yet.
        """
        if not self.history:
            raise NormMismatchError(
                "there is no record yet: one is made when the optimizer steps"
                if self._steps is not None
                else "there is no record yet, and no optimizer to wait for: attach(optimizer)"
            )
        return self.history[-1]

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on from a checkpoint as if it had not stopped: steps, records, and what warnings go by; strings and numbers."""
        growth, dead = self._growth.state(), dict(self._dead.counts)
        return {"step": self.step, "history": copy.deepcopy(list(self.history)), "growth": growth, "dead": dead}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, of a monitor of the same model.

        Raises:
            NormMismatchError: it is of something else; nothing was changed.
        """
        names = {"step", "history", "growth", "dead"}
        if not isinstance(state_dict, Mapping) or set(state_dict) != names:
            has = ", ".join(sorted(map(str, state_dict))) if isinstance(state_dict, Mapping) else describe(state_dict)
            raise NormMismatchError(f"a state of a TrainingMonitor has {', '.join(sorted(names))}; this has {has}")
        unknown = {name for record in state_dict["history"][-1:] for name in record["parameters"]}.difference(self._shapes)
        if unknown:
            raise NormMismatchError(f"the state is of another model: there is no parameter {min(unknown)!r}")
        state = copy.deepcopy(dict(state_dict))
        self._growth, self._dead, self.step = Growth.of(state["growth"]), Dead(state["dead"]), state["step"]
        self.history = deque(state["history"], maxlen=self.history.maxlen)
        if self._steps is not None:
            self._open()

    def dataframe(self) -> Any:
        """A pandas DataFrame of `history`, by step (needs pandas, the extra `dataframe`).

        Raises:
            ImportError: pandas is not installed.
        """
        return outputs.dataframe(self.history)

    def log_to(self, logger: Any, prefix: str = "") -> TrainingMonitor:
        """Give the numbers of every record to a logger, flattened to names such as ``parameters/0.weight/norm``.

        Args:
            logger: a function ``log(numbers, step=...)`` such as ``wandb.log``; or an object with ``add_scalar(name, value, step)``
                (a SummaryWriter), ``log_metrics(numbers, step=...)`` (a logger of Lightning) or ``log`` (a run of wandb).
            prefix: before every name.

        Raises:
            NormMismatchError: it is none of these.
        """
        log = outputs.log_function(logger, prefix)
        self._subscribe(lambda record: log(outputs.flat(record), record["step"]))
        return self

    def live(self) -> contextlib.AbstractContextManager[None]:
        """A table of the last record, on standard error while the block runs; nothing where that is no terminal."""
        return outputs.live_table(self._subscribe)

    def __repr__(self) -> str:
        return f"TrainingMonitor({type(self.model).__name__}, every={self.every}, step {self.step}, {len(self.history)} records)"

    # -- norms --------------------------------------------------------------------------------------------------------------------

    def _derive_norms(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        """The kinds of parameters: from the program, or from modules where it cannot say."""
        self._norms, self._inputs = natural_norms(self.model), None
        if self._has_example:
            try:
                found = UnitNorms.of(self.model, self._args, self._kwargs, "bound")
            except ThunderNormError as e:
                self._say_missing("no norms of parameters can be derived from the program: each has that of its module's kind", e)
            else:
                self._norms, self._inputs = found.norms, found.inputs
        self._shapes = {name: p.shape for name, p in parameters.items()}

    def _layer_bounds(self) -> LayerBounds | None:
        assert self._inputs is not None
        try:
            return LayerBounds(self.model, *plain_arguments(self._args, self._kwargs), self._inputs)
        except Exception as e:  # noqa: BLE001 - Thunder's own errors for what it cannot trace have no common class
            self._say_missing("no bounds on activations: there is no norm map of the model", e)
            return None

    def _say_missing(self, headline: str, why: Exception) -> None:
        first = str(why).partition("\n")[0]
        warnings.warn(with_details(headline, why=f"{type(why).__name__}: {first}"), MissingBoundsWarning, stacklevel=4)

    # -- what hooks call ----------------------------------------------------------------------------------------------------------

    def _is_sampled(self) -> bool:
        return self.step % self.every == 0

    def _open(self) -> None:
        """Look at the step that comes, if it is one to sample."""
        self._record = _empty(self.step)
        if self._forwards is not None:
            if self._is_sampled():
                self._forwards.open()
            else:
                self._forwards.close()

    def _see(self, seen: Seen) -> None:
        record = self._record
        bounds: dict[str, float] = {}
        if self._bounds is not None:
            if self._is_as_known():
                self._measure_parameters()  # bounds ask for the norms of the same parameters, which are remembered then
            problem = self._bounds.misfit(seen.args, seen.kwargs)
            if problem is None:
                bounds = self._bounds(seen.args, seen.kwargs)
            else:
                _note(record, f"no bounds: {problem}")
        for name, size in seen.activations.items():
            numbers = {"norm": size.item()}
            if name in bounds:
                numbers |= {"bound": bounds[name], "tightness": numbers["norm"] / bounds[name] if bounds[name] else 0.0}
            _keep_largest(record["activations"].setdefault(name, {}), numbers)
        for name, heads in seen.attention.items():
            values, of_record = heads.tolist(), record["attention"]
            name = name_of_heads(name, len(values), of_record)
            of_record[name] = list(map(_larger, of_record.get(name, values), values))

    def _before_step(self) -> None:
        if not self._is_as_known():
            with contextlib.nullcontext() if self._forwards is None else self._forwards.blind():
                self._derive_norms(measured_names(self.model))
        self._record["parameters"] = self._measure_parameters()

    def _is_as_known(self) -> bool:
        """Whether the model has the parameters that norms were derived of."""
        return {name: p.shape for name, p in measured_names(self.model).items()} == self._shapes

    def _measure_parameters(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, p in measured_names(self.model).items():
            spectrum = Spectrum.of(self._norms[name], p)  # first: the norm is among what it knows
            numbers = {"norm": norm_of(self._norms[name], p)}
            if spectrum is not None:
                numbers |= {"sigma_max": spectrum.largest, "sigma_min": spectrum.smallest, "stable_rank": spectrum.stable_rank}
            found[name] = numbers
        return found

    def _see_gradients(self, gradients: Tensors) -> None:
        names = {name: gradients[id(p)] for name, p in measured_names(self.model).items() if id(p) in gradients}
        for name, size in dual_norms(self._norms, names).items():
            self._record["parameters"].setdefault(name, {})["gradient"] = size

    def _after_step(self, old: Tensors) -> None:
        record = self._record
        if old:
            for name, p in measured_names(self.model).items():
                numbers = record["parameters"].get(name)
                if id(p) in old and numbers is not None:
                    numbers["update"] = norm_of(self._norms[name], difference(p, old[id(p)]))
                    if numbers["norm"]:
                        numbers["ratio"] = numbers["update"] / numbers["norm"]
            if self._forwards is not None and not self._forwards.count:
                _note(record, "no forward of the model with gradients was seen before this step")
            self.history.append(record)
        self.step += 1
        self._open()
        if old:
            self._publish(record)

    def _publish(self, record: Record) -> None:
        texts = self._growth.judge(record)
        dead = self._dead.judge(record)
        if self._warns:
            for text in texts:
                warnings.warn(text, DivergenceWarning, stacklevel=2)
            if dead is not None:
                warnings.warn(dead, DeadWeightWarning, stacklevel=2)
        for subscriber in list(self._subscribers):
            subscriber(record)

    def _subscribe(self, subscriber: Callable[[Record], None]) -> Callable[[], None]:
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)


def _empty(step: int) -> Record:
    return {"step": step, "parameters": {}, "activations": {}, "attention": {}, "notes": []}


def _note(record: Record, text: str) -> None:
    if text not in record["notes"]:
        record["notes"].append(text)


def _keep_largest(found: dict[str, float], numbers: dict[str, float]) -> None:
    for what, value in numbers.items():
        found[what] = _larger(found[what], value) if what in found else value


def _larger(a: float, b: float) -> float:
    """The larger one; NaN if one is."""
    return a if a != a or a > b else b


def _plain(model: Any, activations: bool) -> tuple[torch.nn.Module, torch.nn.Module | None]:
    """The plain module, and the outermost one that a compiler made of it.

    Raises:
        NormMismatchError: it is no module, or compilers work inside of it, where forwards cannot be watched.
    """
    if not isinstance(model, torch.nn.Module):
        raise NormMismatchError(f"TrainingMonitor needs a torch.nn.Module, got {describe(model)}")
    *outside, model = layers(model)
    compiled = next((m for m in outside if isinstance(m, ThunderModule | OptimizedModule)), None)
    inside = [name for name, m in model.named_modules() if _is_compiled(m)]
    if activations and inside:
        raise NormMismatchError(
            with_details(
                f"{inside[0] or 'the model'!r} is compiled inside of the model, where its forward cannot be watched",
                instead="torch.compile(model) or thunder.jit(model) of the whole model, and that as `model`; or activations=False, "
                "which watches parameters, updates and gradients",
            )
        )
    return model, compiled


def _is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, ThunderModule | OptimizedModule | torch.jit.ScriptModule):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None
