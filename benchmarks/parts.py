"""Parts of a page of docs/ that a command writes: they begin with a comment of their own and end with ``<!-- end -->``."""

from __future__ import annotations

END = "<!-- end -->"


def exchanged(page: str, begin: str, generated: str) -> str:
    """The page with `generated` between the comment `begin` and the next end."""
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{generated}\n\n{END}{rest.partition(END)[2]}"
