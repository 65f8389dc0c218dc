"""The --help of a script (its own settings first, then those of every run) and of a tool."""

import ast
import dataclasses
import inspect
import sys
import textwrap
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro
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
        if own:
            found.append(("algorithm" if owner is cls else title_of(owner), own))
    return found


def title_of(owner: type) -> str:
    """The docstring of a class of settings; its name if the docstring is dataclass's own."""
    text = owner.__doc__ or f"{owner.__name__}("
    return owner.__name__ if text.startswith(f"{owner.__name__}(") else inspect.cleandoc(text)


def command_groups(cls: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """(title, settings) of a tool: its positional arguments, then its flags."""
    groups = [("arguments", True), ("flags", False)]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    found = []
    for title, positional in groups:
        settings = [field for field in fields if is_positional(cls, field) == positional]
        if settings:
            found.append((title, settings))
    return found


def is_positional(cls: type, setting: dataclasses.Field) -> bool:
    kind = get_type_hints(cls, include_extras=True)[setting.name]
    return tyro.conf.Positional in getattr(kind, "__metadata__", ())


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value in (None, "", dataclasses.MISSING) else str(value)


def remarks(kind: Any, name: str, default: Any) -> str:
    """The choices and the default of a setting, in brackets; empty without any."""
    parts = []
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind) if choice != ""]
        parts.append(f"one of {', '.join(choices)}")
    if shown(default):
        parts.append(f"default: {shown(default)}")
    if default is True:
        parts.append(f"turn off with --no-{name}")
    return f" ({'; '.join(parts)})" if parts else ""


def print_help(cls: type) -> None:
    """The help of a script: its settings in the groups of the classes that define them."""
    print_settings(cls, groups(cls))


def print_command_help(cls: type) -> None:
    """The help of a tool."""
    print_settings(cls, command_groups(cls))


def print_settings(cls: type, grouped: list[tuple[str, list[dataclasses.Field]]]) -> None:
    console = Console(highlight=False)
    print_text(console, inspect.getdoc(sys.modules[cls.__module__]) or "")
    kinds = get_type_hints(cls)
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        texts |= field_texts(owner)
    for title, settings in grouped:
        table = Table(box=None, show_header=False, pad_edge=False, title=title.upper())
        table.title_justify = "left"
        table.add_column(no_wrap=True)
        table.add_column()
        for setting in settings:
            name = setting.name.replace("_", "-")
            factory = setting.default_factory
            default = factory() if callable(factory) else setting.default
            flag = name if is_positional(cls, setting) else f"--{name}"
            text = texts.get(setting.name, "") + remarks(kinds[setting.name], name, default)
            table.add_row(Text("  " + flag), Text(text))
        console.print()
        console.print(table)


def print_text(console: Console, text: str) -> None:
    """Print a docstring: prose as wide as the terminal, commands as they are typed."""
    for i, paragraph in enumerate(text.split("\n\n")):
        if i:
            console.print()
        if paragraph.startswith("    "):
            console.print(Text(paragraph), soft_wrap=True)
        else:
            console.print(Text(" ".join(paragraph.split())))
