"""How dense the code is: `python tests/style.py FOLDER ...` prints a table, and what is too dense.

A statement has one comprehension at most, and a conditional expression holds no other one. In 100
lines of code, without comments and docstrings, a folder has at most as many of each as `MOST` says.
The exit status is 1 where one has more.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# In 100 lines of code.
MOST = {"conditional expressions": 2.0, "comprehensions": 5.0}


@dataclass
class Counts:
    """What was counted in some files, and the places of statements that have too much in them."""

    lines: int = 0
    comments: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    widths: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def of_100(self, count: int) -> float:
        """Return how many that is in 100 lines of code."""
        return 100 * count / max(self.lines, 1)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement below a node."""
    for below in ast.walk(node):
        if isinstance(below, ast.stmt):
            yield below


def own_expressions(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without those of the statements in its body."""
    for below in ast.iter_child_nodes(statement):
        if isinstance(below, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        yield below
        yield from own_expressions(below)


def documented_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def count(file: Path, counts: Counts) -> None:
    """Add what a file has."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    documented = documented_lines(tree)
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip():
            counts.widths.append(len(line))
        if line.strip() and number not in documented and not line.lstrip().startswith("#"):
            counts.lines += 1
    with tokenize.open(file) as opened:
        for token in tokenize.generate_tokens(opened.readline):
            counts.comments += token.type == tokenize.COMMENT
    for statement in statements(tree):
        expressions = list(own_expressions(statement))
        conditionals = [each for each in expressions if isinstance(each, ast.IfExp)]
        comprehensions = [each for each in expressions if isinstance(each, COMPREHENSIONS)]
        counts.conditionals += len(conditionals)
        counts.comprehensions += len(comprehensions)
        place = f"{file}:{statement.lineno}"
        if len(comprehensions) > 1:
            counts.faults.append(f"{place}: {len(comprehensions)} comprehensions in a statement")
        for outer in conditionals:
            if any(isinstance(inner, ast.IfExp) for inner in ast.walk(outer) if inner is not outer):
                counts.faults.append(f"{place}: a conditional expression in another one")


def counts_of(folder: Path) -> Counts:
    """Return what the files of a folder have, without those of the folders in it."""
    counts = Counts()
    for file in sorted(folder.glob("*.py")):
        count(file, counts)
    counts.widths.sort()
    return counts


def main(folders: list[str]) -> int:
    """Print the table and the faults; return the exit status."""
    status = 0
    print(f"{'in 100 lines of code':36} conditionals comprehensions comments p90 of width   lines")
    for top in folders:
        for folder in sorted({file.parent for file in Path(top).rglob("*.py")}):
            counts = counts_of(folder)
            conditionals = counts.of_100(counts.conditionals)
            comprehensions = counts.of_100(counts.comprehensions)
            comments = counts.of_100(counts.comments)
            width = counts.widths[len(counts.widths) * 9 // 10]
            print(
                f"{folder!s:36} {conditionals:12.2f} {comprehensions:14.2f} {comments:8.2f} "
                f"{width:12} {counts.lines:7}"
            )
            for fault in counts.faults:
                print(f"  {fault}")
            too_many = (
                conditionals > MOST["conditional expressions"]
                or comprehensions > MOST["comprehensions"]
            )
            if too_many:
                print(f"  {folder}: more than {MOST}")
            status |= bool(counts.faults) or too_many
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
