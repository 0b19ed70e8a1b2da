"""What `import thunder_norm` imports, and what it leaves until it is asked for."""

import subprocess
import sys

import pytest

import thunder_norm
from tests.seeds import seeded

EAGER = f"""
import sys
import torch
import thunder_norm

def norms():
    torch.manual_seed({seeded(0)})
    x, w = thunder_norm.RMSTensor(1.5, backing=torch.randn(2, 6)), torch.randn(4, 6)
    hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, torch.randn(4)))
    hidden += hidden.softmax(-1).sum(-1, keepdim=True)
    return float(torch.nn.functional.layer_norm(hidden[:, :3] @ torch.randn(3, 3), (3,)).norm_size)

early = norms()
loaded = {{name.split(".")[1] for name in sys.modules if name.startswith("thunder_norm.")}}
assert loaded.isdisjoint({{"norms", "functions", "subclass", "report", "modular", "transforms"}}), loaded
missing = set(thunder_norm.__all__) - set(dir(thunder_norm))
assert not missing, missing
for name in thunder_norm.__all__:
    getattr(thunder_norm, name)
assert thunder_norm.transforms.NormTransform and thunder_norm.modular.ModularNorm
assert norms() == early
"""


def test_what_traces_programs_is_imported_when_it_is_asked_for():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", EAGER], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'norm_maps'"):
        thunder_norm.norm_maps  # noqa: B018
    with pytest.raises(ImportError, match="norm_maps"):
        from thunder_norm import norm_maps  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
