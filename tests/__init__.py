"""The tests, in folders that are the rooms of the library, and what tests of several rooms share."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
