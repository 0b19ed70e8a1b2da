"""Checking norm rules: an adversary that searches for inputs that exceed what a rule claims, or attain it.

``audit(op)`` tries all rules of an operation, ``python -m thunder_norm.audit my_rules`` those that a module registers;
``check(f, balls)`` is for a test of one's own.
"""

from thunder_norm.audit.balls import Ball, corners, lmo, norm, project, start
from thunder_norm.audit.cases import Case
from thunder_norm.audit.rules import LONG, QUICK, Audit, Effort, Record, audit
from thunder_norm.audit.search import SOUND, Found, Witness, check, evaluate, search

__all__ = [
    "LONG",
    "QUICK",
    "SOUND",
    "Ball",
    "Case",
    "Effort",
    "Found",
    "Audit",
    "Record",
    "Witness",
    "check",
    "corners",
    "evaluate",
    "lmo",
    "norm",
    "project",
    "audit",
    "search",
    "start",
]
