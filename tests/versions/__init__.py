"""The sets of packages that the tests are run with, and what came of each (docs/versions.md)."""
