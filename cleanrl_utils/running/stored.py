"""Settings read from a file, a run.json or a model, that may be old or made by somebody else."""

import dataclasses
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cleanrl_utils.errors import BadInput, silenced

S = TypeVar("S")


def restore_settings(cls: type[S], values: Mapping[str, Any], where: str) -> S:
    """Make settings of class `cls`; the error for wrong values begins with `where`."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        if not has_type(value, hints[name]):
            text = repr(value)
            text = text if len(text) < 60 else f"{text[:60]}..."
            raise BadInput(f"{where}: its setting {name} has a wrong value, {text}")
    exact = {name: as_typed(value, hints[name]) for name, value in values.items()}
    try:
        with silenced():
            return cls(**exact)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}") from None
    except Exception as error:  # from the class's own checks
        raise BadInput(f"{where}: its settings cannot be used ({one_line(error)})") from None


def as_typed(value: Any, hint: Any) -> Any:
    """A whole number above 64 bits as a float where the setting is one: torch cannot convert it."""
    is_float = float in (hint, *get_args(hint)) and int not in get_args(hint)
    if is_float and isinstance(value, int) and abs(value) >= 2**63:
        return float(value) if abs(value) < sys.float_info.max else math.inf
    return value


def known_settings(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names are settings of class `cls`."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    return {name: value for name, value in values.items() if name in names}


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value from a JSON file has this type; types no command line has are accepted."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(has_type(value, kind) for kind in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in (list, tuple):
        kinds = [kind for kind in get_args(hint) if kind is not Ellipsis] or [Any]
        if not isinstance(value, list | tuple):
            return False
        return all(any(has_type(item, kind) for kind in kinds) for item in value)
    if hint in (None, type(None)):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (bool, str) else True


def is_file_name(text: Any) -> bool:
    """Whether a value can be the name of a script, without `.py` and without folders."""
    if not isinstance(text, str) or set(text) & set("/\\\0"):
        return False
    return 0 < len(text.encode(errors="replace")) <= 250


def one_line(error: BaseException) -> str:
    """The type and message of an exception, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
