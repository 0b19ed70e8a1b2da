"""Which Python and which packages a run takes, and how much of the tests it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One environment: versions as pip takes them, ``2.9.*`` for the newest patch release."""

    name: str
    python: str
    torch: str
    thunder: str
    transformers: str
    part: str = ""  # of the tests, as THUNDER_NORM_PART has it (tests/conftest.py); "" is all of them

    @property
    def requirements(self) -> list[str]:
        """What is held fast when the project is installed; everything else is as new as these allow."""
        return [f"torch=={self.torch}", f"lightning-thunder=={self.thunder}", f"transformers=={self.transformers}"]


ROWS = (
    Row("oldest", "3.11", "2.9.*", "0.2.6", "4.52.4"),
    Row("torch 2.11", "3.12", "2.11.*", "0.2.6", "4.52.4", "1/3"),
    Row("newest", "3.11", "2.15.*", "0.2.6", "5.23.*"),
    Row("Python 3.13", "3.13", "2.15.*", "0.2.6", "5.23.*", "0/3"),
    Row("Thunder's nightly", "3.12", "2.11.*", "0.2.7.dev20260201", "4.57.*", "0/3"),
)
