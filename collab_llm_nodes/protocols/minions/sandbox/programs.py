"""Source text of programs: the interpreter's missing generators, and the constants in it."""

from __future__ import annotations

import ast
from typing import Any

from collab_llm_nodes.protocols.minions.chunkers import CHUNKERS

_COLLECTED = "__collected"
_MAX_SIZE = 1 << 31
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def without_yield(program: str) -> str:
    """Return ``program`` with lists in place of generator functions, which Monty cannot read."""
    if "yield" not in program:
        return program
    try:
        return ast.unparse(_Collecting().visit(ast.parse(program)))
    except _UNREADABLE:
        return program


class _Collecting(ast.NodeTransformer):
    """Has each generator function return a list of what it yields."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        if not any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node)):
            return node
        body = [_Yields().visit(statement) for statement in node.body]
        first, last = ast.parse(f"{_COLLECTED} = []\n{_COLLECTED}").body
        assert isinstance(last, ast.Expr)
        node.body = [first, *body, ast.Return(last.value)]
        return ast.fix_missing_locations(node)


class _Yields(ast.NodeTransformer):
    """Replaces the statements by which a generator function yields and returns."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # an inner function was visited before

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            return node
        method = "append" if isinstance(node.value, ast.Yield) else "extend"
        target = ast.Attribute(ast.Name(_COLLECTED, ast.Load()), method, ast.Load())
        return ast.Expr(ast.Call(target, [node.value.value or ast.Constant(None)], []))

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.Return(ast.Name(_COLLECTED, ast.Load())) if node.value is None else node


def constants_in(program: str) -> dict[str, Any]:
    """Return the distinct strings, in order, sizes and chunkers in the source of ``program``."""
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except _UNREADABLE:
        nodes = []
    constants = [node for node in nodes if isinstance(node, ast.Constant)]
    constants.sort(key=lambda node: (node.lineno, node.col_offset))
    values = [node.value for node in constants]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {
        "texts": list(dict.fromkeys(value for value in values if isinstance(value, str))),
        "sizes": sorted({value for value in values if type(value) is int and value < _MAX_SIZE}),
        "chunkers": sorted(names & CHUNKERS.keys()),
    }
