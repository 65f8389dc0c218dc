"""Writers of metrics: metrics.csv, TensorBoard, Weights & Biases, and the progress line."""

import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import rng
from cleanrl_utils.running.tensorboard import TensorBoardWriter

HEADER = "step,seconds,tag,value\n"


class CsvWriter:
    """metrics.csv: one row per value, appended; a resumed run drops the rows that it repeats."""

    def __init__(self, path: Path, keep_bytes: int | None = None):
        if keep_bytes is not None:
            require_rows(path, keep_bytes)
            os.truncate(path, keep_bytes)
        else:
            path.write_text(HEADER)
        self.file = open(path, "a", buffering=1 << 16)
        self.flushed = time.monotonic()

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Write one row per tag."""
        start = f"{step},{seconds:.3f},"
        self.file.write("".join([f"{start}{tag},{value!r}\n" for tag, value in values.items()]))
        if time.monotonic() - self.flushed > 1:
            self.flush()

    def write_column(
        self, steps: Sequence[int], seconds: float, tag: str, values: Sequence[float]
    ) -> None:
        """Write many rows of one tag."""
        middle = f",{seconds:.3f},{tag},"
        pairs = zip(steps, values, strict=True)
        self.file.write("".join([f"{step}{middle}{value!r}\n" for step, value in pairs]))

    def flush(self) -> None:
        self.file.flush()
        self.flushed = time.monotonic()

    def sync(self) -> int:
        """Flush every row to disk; returns the file's size, which a checkpoint stores."""
        self.flush()
        if self.file.name != os.devnull:
            os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        self.file.close()


def require_rows(path: Path, size: int) -> None:
    """Stop if metrics.csv is smaller than it was at the last checkpoint."""
    found = path.stat().st_size if path.exists() else 0
    lost = f"{path}: rows are lost ({found:,} bytes, {size:,} at the last checkpoint)"
    require(found >= size, f"{lost}; restore the file or start a new run")


class WandbWriter:
    """Weights & Biases; imported only if --track is given."""

    def __init__(self, args: Any, name: str, folder: Path, config: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise BadInput("--track needs the package wandb: pip install wandb") from None
        identity = folder / "wandb_id.txt"
        run_id = identity.read_text() if identity.exists() else secrets.token_hex(4)
        self.wandb = wandb
        try:
            self.run = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=name,
                id=run_id,
                resume="allow",
                reinit="create_new",  # --num-seeds has several at once
                config=config,
                dir=str(folder),
                save_code=True,
            )
        except (wandb.errors.Error, ValueError) as error:  # usually: not logged in
            reason = " ".join(str(error).split())[:200].rstrip(".")
            login = any(word in reason.lower() for word in ("key", "login", "log in"))
            hint = "; `wandb login` asks for it, WANDB_MODE=offline needs none" if login else ""
            raise BadInput(f"--track: {reason}{hint}") from None
        identity.write_text(run_id)
        self.run.define_metric("global_step")
        self.run.define_metric("*", step_metric="global_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "global_step": step})

    def video(self, path: Path) -> None:
        self.run.log({"videos": self.wandb.Video(str(path), format="mp4")})

    def close(self) -> None:
        self.run.finish()


class Progress:
    """The progress line: updated in place in a terminal, else printed every few seconds."""

    def __init__(
        self,
        phases: dict[str, int],  # name and number of steps of each phase, in order
        start: int,
        stream: TextIO | None = None,
        quiet: bool = False,
    ):
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.live = self.stream.isatty()
        self.phases = phases
        self.total = sum(phases.values())
        self.start = start
        self.returns: deque[float] = deque(maxlen=100)
        self.lengths: deque[float] = deque(maxlen=100)  # filled only if their means are logged
        self.noted = ""  # result of the last evaluation
        self.began = time.monotonic()
        self.shown = self.began if not self.live else 0.0
        self.every = 0.2 if self.live else 5.0

    def update(self, step: int) -> None:
        now = time.monotonic()
        if now - self.shown < self.every:
            return
        self.shown = now
        self.show(self.line(step))

    def line(self, step: int) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        speed = (step - self.start) / seconds
        ends = accumulate(self.phases.values())
        left = [name for name, end in zip(self.phases, ends, strict=True) if step < end]
        phase = (left or list(self.phases)[-1:])[0]
        parts = [f"{100 * step / self.total:3.0f}%", f"{step:,}/{self.total:,} steps"]
        parts = [phase, *parts] if phase else parts
        parts += [f"{speed:,.0f} steps/s"]
        if self.returns:
            parts.append(f"return {sum(self.returns) / len(self.returns):.1f}")
        if self.noted:
            parts.append(self.noted)
        if self.total > step and speed > 0:
            parts.append(f"{clock((self.total - step) / speed)} left")
        return " | ".join(parts)

    def note(self, text: str, step: int) -> None:
        """Show a text about evaluation in the progress line from now on."""
        self.noted = text
        if self.live:
            self.show(self.line(step))

    def end(self, step: int) -> None:
        """Show the last line: 100%, of the steps that whole iterations made."""
        self.total = step or self.total
        self.show(self.line(step), stay=True)

    def show(self, text: str, stay: bool = False) -> None:
        if self.quiet:
            return
        if self.live:
            self.stream.write(f"\r\033[K{text}" + ("\n" if stay else ""))
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self.show(text, stay=True)


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def open_writers(args: Any, name: str, folder: Path, settings: dict, step: int) -> list[Any]:
    """Open TensorBoard and, with --track, W&B; does not change the random generators."""
    with rng.preserved():
        trackers = [WandbWriter(args, name, folder, settings)] if args.track else []
        board = TensorBoardWriter(folder, purge_step=step + 1 if args.resume else None)
        rows = "\n".join(f"|{key}|{value}|" for key, value in settings.items())
        board.text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        board.hyperparameters(settings)
        return [board, *trackers]


def to_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert all values to floats; the tensors of each device in a single copy."""
    torch: Any = sys.modules.get("torch")
    values = dict(metrics)
    tensors = {tag: x for tag, x in metrics.items() if torch and isinstance(x, torch.Tensor)}
    for device in {x.device for x in tensors.values()}:
        tags = [tag for tag, x in tensors.items() if x.device == device]
        stacked = torch.stack([tensors[tag].detach().reshape(()).double() for tag in tags])
        values.update(zip(tags, stacked.tolist(), strict=True))
    return {tag: float(value) for tag, value in values.items()}
