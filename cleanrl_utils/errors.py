"""Errors that are one line on stderr and an exit status: 2 for bad input, 1 for a failed run."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class BadInput(SystemExit):
    """Bad input from the user; `message` names the flag or file and what to do about it."""

    printed = True

    def __init__(self, message: str):
        if self.printed:
            print(f"error: {message}", file=sys.stderr, flush=True)
        super().__init__(2)
        self.message = message


class Stopped(SystemExit):
    """A run that stops before its end, with one line; status 130: interrupted by the user."""

    def __init__(self, message: str, status: int = 1):
        start = "\n" if status == 130 else "error: "
        print(f"{start}{message}", file=sys.stderr, flush=True)
        super().__init__(status)


def quiet_excepthook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    """sys.excepthook for python -i: no traceback for errors that already printed their line."""
    if not issubclass(kind, BadInput | Stopped):
        sys.__excepthook__(kind, value, trace)


def interrupted_excepthook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
    """sys.excepthook of commands: one line for Ctrl+C; Python then ends with status 130."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, value, trace)


def quiet_interrupts() -> None:
    """Let Ctrl+C end this command without a traceback; not with python -i."""
    if not sys.flags.interactive and sys.excepthook is sys.__excepthook__:
        sys.excepthook = interrupted_excepthook


@contextlib.contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Turn Ctrl+C into one line with a hint, and status 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"interrupted; {hint}", 130) from None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Do not print the line of a BadInput; for code that catches it."""
    before = BadInput.printed
    BadInput.printed = False
    try:
        yield
    finally:
        BadInput.printed = before


def require(condition: bool, message: str) -> None:
    """Stop with `message` unless `condition` holds."""
    if not condition:
        raise BadInput(message)


def missing_package(package: str, extra: str) -> BadInput:
    """The error for an optional package that is not installed; `extra` is the extra that has it."""
    return BadInput(
        f"{package} is not installed: pip install -r requirements/requirements-{extra}.txt"
        f' (or pip install "cleanrl[{extra}]")'
    )
