"""How this project says that a command cannot be carried out: one line, exit status 2."""

import sys


class BadInput(SystemExit):
    """The user's input cannot be used; `message` names the flag or file and what to do about it."""

    def __init__(self, message: str):
        print(f"error: {message}", file=sys.stderr, flush=True)
        super().__init__(2)
        self.message = message


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
