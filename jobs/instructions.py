"""What a model is told about the form of its answer. Knows no rows and no chat templates."""

import json
from collections.abc import Sequence
from typing import Any

from schemas.records import Constraint, ConstraintKind


def describe_constraint(constraint: Constraint, *, thinks_first: bool = False) -> str:
    """Ask for an answer that keeps the constraint."""
    source = constraint.source
    answer = "Think step by step first. Then answer" if thinks_first else "Answer"
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return (
                f"{answer} with one JSON document on one line that follows this JSON Schema, and nothing else:\n"
                + json.dumps(json.loads(source), ensure_ascii=False)
            )
        case ConstraintKind.CHOICE:
            return f"{answer} with exactly one of these, and nothing else:\n" + "\n".join(json.loads(source))
        case ConstraintKind.REGEX:
            return f"{answer} with text that matches this regular expression, and nothing else:\n{source}"
        case ConstraintKind.EBNF:
            return f"{answer} with text that follows this grammar, and nothing else:\n{source}"


def describe_tools(tools: Sequence[dict[str, Any]], *, may_answer: bool) -> str:
    """Ask for a call of one of the functions, or for an answer where that may be."""
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call = 'Answer with one JSON document on one line, and nothing else: {"name": NAME, "arguments": {...}} to call one'
    other = ', or {"content": ...} to answer yourself' if may_answer else ""
    return f"You can call these functions:\n{functions}\n{call}{other}."
