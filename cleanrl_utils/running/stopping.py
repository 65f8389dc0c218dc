"""How a run ends before its time: with one line that says what is left and how to go on."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import Stopped, hide_stops
from cleanrl_utils.running import folder


class Stopping:
    """The part of a run that stops it."""

    folder: Path
    script: Path
    _step: int
    _csv: Any

    def _close(self) -> None:
        raise NotImplementedError

    def _how_to_go_on(self) -> str:
        """What is left of a run that stops now, and the command that continues it."""
        if not (self.folder / folder.CHECKPOINT).exists():
            return "there is no checkpoint yet"
        words = ["python", os.path.relpath(self.script), "--resume", str(self.folder)]
        return f"go on from the last good checkpoint: {shlex.join(words)}"

    def _stop(self, why: str) -> None:
        """End the run with one line."""
        with contextlib.suppress(OSError):
            self._close()
        raise Stopped(f"{why}; stopped, {self._how_to_go_on()}")

    def _stop_writing(self, error: OSError) -> None:
        what = f"{error.filename}: " if error.filename else f"{self.folder}: "
        self._stop(f"{what}cannot be written ({error.strerror or error})")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk or a folder that is gone ends the run with one line."""
        try:
            yield
        except OSError as error:
            self._stop_writing(error)

    def _catch_interrupts(self) -> None:
        """Ctrl+C ends the run with one line and status 130, and keeps the last checkpoint."""
        if sys.flags.interactive:  # python -i: the prompt comes without a traceback
            sys.excepthook = hide_stops
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with contextlib.suppress(ValueError):  # not in the main thread
            if default:
                signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            self._csv.flush()
        raise Stopped(f"interrupted at step {self._step:,}; {self._how_to_go_on()}", 130)

    def _release_interrupts(self) -> None:
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGINT) == self._interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
