"""How this project says that a command cannot be carried out: one line, exit status 2."""

import contextlib
import sys
from collections.abc import Iterator


class BadInput(SystemExit):
    """The user's input cannot be used; `message` names the flag or file and what to do about it."""

    said = True

    def __init__(self, message: str):
        if self.said:
            print(f"error: {message}", file=sys.stderr, flush=True)
        super().__init__(2)
        self.message = message


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
