"""How this project says that a command cannot be carried out: one line, exit status 2."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class BadInput(SystemExit):
    """The user's input cannot be used; `message` names the flag or file and what to do about it."""

    said = True

    def __init__(self, message: str):
        if self.said:
            print(f"error: {message}", file=sys.stderr, flush=True)
        super().__init__(2)
        self.message = message


class Stopped(SystemExit):
    """A run ends before its time, with one line; status 130 is an interruption by the user."""

    def __init__(self, message: str, status: int = 1):
        start = "\n" if status == 130 else "error: "
        print(f"{start}{message}", file=sys.stderr, flush=True)
        super().__init__(status)


def hide_stops(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    """sys.excepthook for python -i: what has said its line needs no traceback."""
    if not issubclass(kind, BadInput | Stopped):
        sys.__excepthook__(kind, value, trace)


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """For who handles a BadInput: its line is not shown."""
    before, BadInput.said = BadInput.said, False
    try:
        yield
    finally:
        BadInput.said = before


def require(condition: bool, message: str) -> None:
    """Stop with `message` unless `condition` holds."""
    if not condition:
        raise BadInput(message)


def missing_package(package: str, extra: str) -> BadInput:
    """The error for an optional dependency that is not installed; `extra` is what has it."""
    return BadInput(
        f"{package} is not installed: pip install -r requirements/requirements-{extra}.txt"
        f' (or pip install "cleanrl[{extra}]")'
    )
