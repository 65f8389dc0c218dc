"""Run scripts in the process of the test: fast, and their variables can be inspected."""

import csv
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT), str(ROOT / "tests")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
# JAX compiles each program only once for all tests
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/cleanrl_jax_cache")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# programs that run for a second need no optimisation: it takes half of the time to compile them
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


# Files whose tests compile programs, start processes or train for long: not in make test-quick.
LONG = {f"test_jax_{x}" for x in ("dqn", "envpool", "off_policy", "ppo")}
LONG |= {f"test_{x}" for x in ("benchmark", "cloud", "docs", "faults", "fuzz", "huggingface")}
LONG |= {f"test_{x}" for x in ("kills", "multi_agent", "multigpu", "ppo_atari", "pqn", "pqn_jax")}
LONG |= {"test_fast_td3", "test_playground", "test_crossq_jax"}
LONG |= {f"test_{x}" for x in ("procgen", "qdagger", "reproduce", "rlops", "strangers", "tuner")}
QUICK_SCRIPTS = {"ppo", "ppo_continuous_action", "ppo_trxl", "dqn"}  # of tests/table.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-quick` leaves out."""
    for item in items:
        script = getattr(item, "callspec", None) and item.callspec.params.get("script")
        rare = hasattr(script, "quick") and script.name not in QUICK_SCRIPTS
        if item.path.stem in LONG or rare:
            item.add_marker("long")


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Free the programs that JAX compiled for the tests of a file: they hold gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True)
def own_matmul_precision() -> Iterator[None]:
    """Scripts for wide networks choose how torch multiplies; the next test starts as a process."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")


@dataclass
class Finished:
    """A finished run: its folder and the script's global variables."""

    folder: Path
    variables: dict[str, Any]

    def rows(self) -> list[tuple[int, str, float]]:
        """(step, tag, value) of metrics.csv, without speeds and times."""
        with open(self.folder / "metrics.csv") as file:
            rows = [(int(r["step"]), r["tag"], float(r["value"])) for r in csv.DictReader(file)]
        return [row for row in rows if not row[1].startswith(("charts/SPS", "episode/t_mean"))]

    def curve(self) -> list[tuple[int, str, float]]:
        """The rows that training wrote, without evaluations."""
        return [row for row in self.rows() if not row[1].startswith("eval/")]

    def weights(self) -> dict[str, bytes]:
        """The arrays of the model file, without its metadata."""
        from safetensors.numpy import load_file

        (path,) = self.folder.glob("*.cleanrl_model")
        return {name: array.tobytes() for name, array in load_file(path).items()}

    def model(self) -> bytes:
        (path,) = self.folder.glob("*.cleanrl_model")
        return path.read_bytes()


class Killed(BaseException):
    """Simulates a process that is killed between two steps."""


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], None]:
    """die_at([7, 13]) kills the first run after iteration 7 and the next after 13."""
    from cleanrl_utils.running.run import Run

    checkpoint = Run.checkpoint

    def arm(iterations: list[int]) -> None:
        def dies(run: Run, iteration: int, **changed: Any) -> bool:
            if iterations and iteration == iterations[0]:
                iterations.pop(0)
                run._close()  # rows written since the last checkpoint reach the disk
                raise Killed
            return checkpoint(run, iteration, **changed)

        monkeypatch.setattr(Run, "checkpoint", dies)

    return arm


def run_script(name: str, flags: str, runs_dir: str = "runs") -> Finished:
    """Run cleanrl/NAME.py in this process as a command would."""
    argv = [str(ROOT / "cleanrl" / f"{name}.py"), *flags.split()]
    if "--resume" not in argv:
        argv += ["--runs-dir", runs_dir]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        variables = runpy.run_path(argv[0], run_name="__main__")
    return Finished(variables["run"].folder, variables)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """train("ppo", "--seed 2 ...") runs cleanrl/ppo.py as a command would, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return run_script
