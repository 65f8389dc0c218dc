"""The tags that a script logs, read from its source.

A tag is a string like "losses/td_loss" in the script, or one that a call of a logging method of
`Run` makes: `run.log_episode(..., average=20)` logs charts/avg_episodic_return as well.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

RUNNING = Path(__file__).resolve().parent.parent / "running"
TAG = re.compile(r"^(charts|episode|losses|eval)(/[\w-]+){1,2}$")
ALWAYS = ["charts/episodic_return", "charts/episodic_length", "charts/SPS"]
ALWAYS += ["eval/episodic_return", "eval/episodic_length", "eval/mean_return", "eval/std_return"]
EPISODES = ("log_episode", "log_episodes", "log_rollout", "log_segment")  # methods of Run and Runs
Known = dict[str, Any]  # values of names


def logged_tags(tree: ast.Module) -> list[str]:
    """Every tag that a script logs: those of every run first, then in the order of its lines."""
    known: Known = {}
    assigned = assignments(tree)
    found = dict.fromkeys(ALWAYS)
    for node in sorted(ast.walk(tree), key=lambda x: getattr(x, "lineno", 0)):
        if isinstance(node, ast.Assign | ast.AugAssign):
            found |= dict.fromkeys(tags_in(assign(node, known)))
        elif isinstance(node, ast.Call):
            found |= dict.fromkeys(tags_in([value_of(arg, known) for arg in node.args]))
            found |= dict.fromkeys(episode_tags(node, assigned))
        elif isinstance(node, ast.Constant):
            found |= dict.fromkeys(tags_in(node.value))
    return list(found)


def assign(node: ast.Assign | ast.AugAssign, known: Known) -> Any:
    """Store the value of an assigned name in `known`, if it can be computed, and return it."""
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    value = value_of(node.value, known)
    if not isinstance(target, ast.Name) or value is None:
        return None
    if isinstance(node, ast.AugAssign):
        before: Any = known.get(target.id)
        value = before + value if type(before) is type(value) else value
    known[target.id] = value
    return value


def value_of(node: ast.expr, known: Known) -> Any:
    """The value of an expression of constants and known names, otherwise None."""
    if isinstance(node, ast.Starred):
        node = node.value
    if any(isinstance(x, ast.Call | ast.Attribute | ast.Subscript) for x in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}, **known})
        return list(value) if isinstance(node, ast.GeneratorExp) else value
    except Exception:
        return None


def tags_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if TAG.match(value):
            yield value
    elif isinstance(value, list | tuple | set | dict):
        for x in value:
            yield from tags_in(x)


# -- calls that log episodes -------------------------------------------------------------------


def episode_tags(call: ast.Call, assigned: dict[str, ast.expr]) -> Iterator[str]:
    """The tags of a call of a method that logs episodes; none for other calls."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method not in EPISODES:
        return
    given: dict[str | None, ast.expr] = dict(zip(parameters(method), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    average = given.get("average")
    averaged = average is not None and not (isinstance(average, ast.Constant) and not average.value)
    for suffix in texts(given.get("suffix"), assigned):
        for whose in texts(given.get("whose"), assigned):
            yield from (f"charts/{whose}episodic_{x}{suffix}" for x in ("return", "length"))
        if averaged:
            yield from (f"charts/avg_episodic_{x}{suffix}" for x in ("return", "length"))


@cache
def parameters(method: str) -> list[str]:
    """The names of the parameters of a logging method."""
    for path in sorted(RUNNING.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == method:
                return [x.arg for x in (*node.args.args[1:], *node.args.kwonlyargs)]
    raise LookupError(f"cleanrl_utils/running has no method {method}")


def assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """The last expression that is assigned to each name."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        value = node.value
        if isinstance(target, ast.Name):
            found[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=False)
            found |= {name.id: x for name, x in pairs if isinstance(name, ast.Name)}
    return found


def texts(node: ast.expr | None, assigned: dict[str, ast.expr]) -> list[str]:
    """The values of a string expression; an index that is not known takes the values 0 and 1."""
    if node is None:
        return [""]
    if isinstance(node, ast.Name) and node.id in assigned:
        return texts(assigned[node.id], assigned)
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [joined(node, index) for index in "01"]
    return []


def joined(text: ast.JoinedStr, index: str) -> str:
    parts = [str(x.value) if isinstance(x, ast.Constant) else index for x in text.values]
    return "".join(parts)
