"""What thunder_norm costs: ``python -m benchmarks``.

Speed is a ratio between peers, timed in turns, in one process where they do not disturb each other; absolute times are reported with it
and belong to the machine.
"""
