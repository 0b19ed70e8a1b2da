"""Smaller texts of a program: without a statement, or with what is in it in its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def smaller(text: str, most: int) -> Iterator[tuple[int, str]]:
    """Texts with less in them, and how much less: those that leave out most first, after these those that leave out more than `most`."""
    tree = ast.parse(text)
    edits = sorted(_edits(tree), key=lambda e: (e[0] > most, -e[0]))
    for size, owner, name, index, instead in edits:
        block = getattr(owner, name)
        before = list(block)
        block[index : index + 1] = instead
        if not block and name == "body" and not isinstance(owner, ast.Module):
            block.append(ast.Pass())
        if ast.dump(ast.Module(block, [])) != ast.dump(ast.Module(before, [])) and _is_whole(owner):
            found = ast.unparse(tree)
            if _compiles(found):
                yield size, found + "\n"
        block[:] = before


def _edits(tree: ast.AST) -> Iterator[tuple[int, ast.AST, str, int, list]]:
    """How much is left out, where, and what is there instead."""
    for owner in ast.walk(tree):
        for name in _BLOCKS:
            block = getattr(owner, name, None)
            for index, statement in enumerate(block if isinstance(block, list) else ()):
                size = sum(1 for _ in ast.walk(statement))
                yield size, owner, name, index, []
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler | ast.match_case):
                    for inner in _BLOCKS:
                        inside = getattr(statement, inner, None)
                        if isinstance(inside, list) and inside and isinstance(inside[0], ast.stmt):
                            yield size - sum(1 for s in inside for _ in ast.walk(s)), owner, name, index, list(inside)


def _is_whole(owner: ast.AST) -> bool:
    return not isinstance(owner, ast.Try | ast.TryStar) or bool(owner.handlers or owner.finalbody)


def _compiles(text: str) -> bool:
    try:
        compile(text, "smaller", "exec")
    except SyntaxError:
        return False
    return True
