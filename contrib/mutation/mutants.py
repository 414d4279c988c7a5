"""Small changes to a module's code that a test should notice.

Inside functions these change: comparisons, arithmetic, `and` and `or`, `not`, conditions, numbers and truth values,
`min` and `max`, `break` and `continue`, returned values, and calls and updates that return nothing. These stay: texts,
annotations, log messages, raised errors, and assertions (`strict` of `zip` among them).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
LOGS = ("log", "logger", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One change of a module's source.

    `function` names the function that holds it. `before` and `after` are the old and the new text. `start` and `stop`
    delimit the bytes that `after` replaces.
    """

    function: str
    before: str
    after: str
    start: int
    stop: int

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.stop :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.function}: {before} -> {after}"


def mutants(source: bytes) -> list[Mutant]:
    """Return all changes of a module, in the order of its text."""
    starts = line_starts(source)
    found = []
    for function, node, after in _changes(ast.parse(source), ""):
        start, stop = span(node, starts)
        found.append(Mutant(function, source[start:stop].decode(), after, start, stop))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.after))


def line_starts(source: bytes) -> list[int]:
    """Return the byte at which each line begins."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def span(node: ast.expr | ast.stmt, starts: list[int]) -> tuple[int, int]:
    """Return the first byte of a node, and the byte behind it."""
    stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    return starts[node.lineno - 1] + node.col_offset, stop


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inner = f"{function}.{node.name}".lstrip(".")
        for statement in node.body:
            yield from _changes(statement, inner)
        return
    if _left_alone(node):
        return
    if "." in function or (function and not isinstance(node, ast.Module)):
        yield from ((function, changed, after) for changed, after in _of(node))
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, function)


def _left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        return isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in LOGS
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True  # `zip(..., strict=True)` asserts
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(
        node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.AnnAssign
    )


def _of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield what replaces one node."""
    match node:
        case ast.Compare(left, ops, comparators):
            for place, op in enumerate(ops):
                if type(op) in SWAPPED:
                    swapped = [*ops[:place], SWAPPED[type(op)](), *ops[place + 1 :]]
                    yield node, f"({ast.unparse(ast.Compare(left, swapped, comparators))})"  # type: ignore[arg-type]
        case ast.BoolOp(op, values):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"  # type: ignore[arg-type]
        case ast.BinOp(left, op, right) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))})"  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.If(test) | ast.IfExp(test) | ast.While(test) if not isinstance(
            test, ast.Compare | ast.Constant
        ):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Constant(bool() | int() | float() as value):
            yield node, str(not value if isinstance(value, bool) else value + 1)
        case ast.Name(id="min" | "max" as name):
            yield node, "max" if name == "min" else "min"
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Break() | ast.Continue():
            yield node, "continue" if isinstance(node, ast.Break) else "break"
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield node, "pass"
