"""Kinds of norms, their algebra, the registry of rules, and running a rule; torch only."""
