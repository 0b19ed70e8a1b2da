"""Programs that raise: what each call raises, and what is in objects, inputs and random generators then, is eager mode's (more: ``tests.fuzz state``)."""

import pytest
import torch

import thunder_norm.errors as errors
from tests.fuzz.state import State
from thunder_norm.transforms import NormTransform
import thunder

_KEPT = ("self.mem = self.mem * 2 + x", "self.sub.count += 1", "self.held.items.append(y)")
PROGRAMS = {
    "known": (*_KEPT, "raise OverflowError(self.sub.count)"),
    "known, after what is asserted": (
        *_KEPT,
        "assert x.sum() > 0, 'small'",
        "self.count += 1",
        "raise OverflowError(self.count)",
    ),
    "asserted, with numbers before and after": (
        "y = y + torch.rand(2) + torch.rand(2, generator=self.generator)",
        *_KEPT,
        "assert x.sum() > 0, 'small'",
        "y = y + torch.rand(2) + torch.rand(2, generator=self.generator)",
        "self.count += 1",
    ),
    "asserted, with writes in place": (
        "self.list[0].mem.add_(1)",
        "x.add_(1)",
        "self.mem.data = self.mem * 2",
        "torch.add(x, 1, out=self.sub.mem)",
        "if x.sum() > 3: raise ValueError('large')",
        "x.mul_(2)",
    ),
    "of an operation": ("self.sub.count += 1", "y = y + torch.ones(2)[(y.detach() * 0 + 7).long()]"),
    "of what an operation is given": (*_KEPT, "y = y + torch.ones(3)"),
    "numbers without a tensor": (
        "self.past.append(1)",
        "assert x.sum() > 0, 'small'",
        "self.past.insert(0, x)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_done_before_an_exception_stays(name):
    outcome = State(PROGRAMS[name], "NormTransform()", has_gradients=name != "known").run()
    assert outcome.kind == "right", outcome.detail


def test_what_cannot_be_written_is_said():
    """An input is written into before an operation raises: the program cannot run again."""

    class Model(torch.nn.Module):
        count = 0

        def forward(self, x, i):
            x.add_(1)
            self.count += 1
            return x * 2 + torch.ones(3)[i]

    jm = thunder.jit(Model(), transforms=[NormTransform()])
    with pytest.raises(
        errors.UnsupportedOpError, match=r"has raised IndexError(.|\n)*at .*torch.ones\(3\)\[i\](.|\n)*written twice"
    ):
        jm(torch.ones(2), torch.tensor([0, 5]))


def test_a_call_whose_trace_alone_raises_is_run_by_python():
    """An operator fails once; what the program keeps is kept once."""
    failures = [MemoryError("none left")]

    @torch.library.custom_op("test_raising::scarce", mutates_args=())
    def scarce(x: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return x * 2

    scarce.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        count = 0

        def forward(self, x):
            self.count += 1
            return scarce(x) * self.count

    jm = thunder.jit(model := Model(), transforms=[NormTransform()])
    with pytest.warns(errors.RunByPythonWarning, match="MemoryError(.|\n)*none left"):
        assert jm(torch.ones(2)).tolist() == [2, 2]
    assert jm(torch.ones(2)).tolist() == [4, 4] and model.count == 2
