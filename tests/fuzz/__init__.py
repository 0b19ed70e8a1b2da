"""Random programs against an oracle that knows nothing of this project; ``python -m tests.fuzz --help`` says how to run them."""
