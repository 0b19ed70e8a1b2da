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
    torchao: str
    part: str = ""  # of the tests, as THUNDER_NORM_PART has it (tests/surroundings.py); "" is all of them

    @property
    def requirements(self) -> list[str]:
        """What is held fast when the project is installed; everything else is as new as these allow."""
        packages = (
            ("torch", self.torch),
            ("lightning-thunder", self.thunder),
            ("transformers", self.transformers),
            ("torchao", self.torchao),
        )
        return [f"{name}=={version}" for name, version in packages]


ROWS = (
    Row("oldest", "3.11", "2.9.*", "0.2.6", "4.52.4", "0.17.*"),  # torchao 0.18 cannot be imported with torch 2.9
    Row("torch 2.11", "3.12", "2.11.*", "0.2.6", "4.52.4", "0.18.*", "1/3"),
    Row("newest", "3.11", "2.15.*", "0.2.6", "5.23.*", "0.18.*"),
    Row("transformers 5.24", "3.11", "2.15.*", "0.2.6", "5.24.*", "0.18.*", "1/6"),
    Row("Python 3.13", "3.13", "2.15.*", "0.2.6", "5.23.*", "0.18.*", "0/3"),
    Row("Thunder's nightly", "3.12", "2.11.*", "0.2.7.dev20260201", "4.57.*", "0.18.*", "0/3"),
)
