"""The --help of a script: the settings of its algorithm first, then those of every run."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


@cache
def field_texts(cls: type) -> dict[str, str]:
    """The help text of each setting that a class itself defines, by name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # the class was typed at a prompt
        return {}
    body = getattr(tree.body[0], "body", [])
    texts = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if described else ""  # type: ignore[union-attr]
        texts[node.target.id] = " ".join(text.split())
    return texts


def groups(cls: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """(title, settings) of a class and of each class it inherits from, its own first."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    found = []
    for owner in cls.__mro__:
        own = [fields.pop(name) for name in field_texts(owner) if name in fields]
        title = "algorithm" if owner is cls else inspect.cleandoc(owner.__doc__ or owner.__name__)
        if own:
            found.append((title, own))
    return found


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, "", []) else str(value)


def print_help(cls: type) -> None:
    console = Console(highlight=False, soft_wrap=False)
    module = sys.modules[cls.__module__]
    console.print(Text(inspect.getdoc(module) or ""))
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        texts |= field_texts(owner)
    for title, settings in groups(cls):
        table = Table(box=None, show_header=False, pad_edge=False, title=title.upper())
        table.title_justify = "left"
        table.add_column(no_wrap=True)
        table.add_column()
        for setting in settings:
            name = setting.name.replace("_", "-")
            factory = setting.default_factory
            default = factory() if callable(factory) else setting.default
            flags = f"--{name}, --no-{name}" if isinstance(default, bool) else f"--{name}"
            suffix = f" (default: {shown(default)})" if shown(default) else ""
            table.add_row(Text("  " + flags), Text(texts.get(setting.name, "") + suffix))
        console.print()
        console.print(table)
