"""Random programs against an oracle that knows nothing of this project; ``python -m tests.fuzz --help`` says how to run them."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

if str(TESTS) not in sys.path:  # as under pytest: the tests' helpers are modules of their own; worker processes inherit the path
    sys.path.insert(0, str(TESTS))
