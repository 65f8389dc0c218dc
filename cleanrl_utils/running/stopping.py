"""Stopping a run before its end, with one line that says why and how to resume it."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import Stopped, quiet_excepthook
from cleanrl_utils.running import folder


class Stopping:
    """The part of a run that stops it."""

    folder: Path
    script: Path
    _step: int
    _csv: Any

    def _close(self) -> None:
        raise NotImplementedError

    def say(self, text: str) -> None:
        raise NotImplementedError

    def _how_to_resume(self) -> str:
        """The command that continues a run which stops now, if it has a checkpoint."""
        if not (self.folder / folder.CHECKPOINT).exists():
            return "there is no checkpoint yet"
        words = ["python", os.path.relpath(self.script), "--resume", str(self.folder)]
        return f"resume from the last good checkpoint: {shlex.join(words)}"

    def _stop(self, why: str) -> None:
        """End the run with one line that gives the reason."""
        with contextlib.suppress(OSError):
            self._close()
        raise Stopped(f"{why}; stopped, {self._how_to_resume()}")

    def _stop_writing(self, error: OSError) -> None:
        file = error.filename2 or error.filename or self.folder  # filename2: the target of a copy
        self._stop(f"{file}: cannot be written ({error.strerror or error})")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """End the run with one line if the disk is full or the folder was deleted."""
        try:
            yield
        except OSError as error:
            self._stop_writing(error)

    def _catch_interrupts(self) -> None:
        """Let Ctrl+C end the run with one line and status 130; the last checkpoint stays."""
        if sys.flags.interactive:  # python -i: show the prompt without a traceback
            sys.excepthook = quiet_excepthook
        default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with contextlib.suppress(ValueError):  # not in the main thread
            if default:
                signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            self._csv.flush()
        raise Stopped(f"interrupted at step {self._step:,}; {self._how_to_resume()}", 130)

    def _release_interrupts(self) -> None:
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGINT) == self._interrupted:
                signal.signal(signal.SIGINT, signal.default_int_handler)
