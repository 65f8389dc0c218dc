"""benchmark/speed.py: figures that are kept, and the check that compares with them; memory.py."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cleanrl_utils.errors import Stopped
from cleanrl_utils.pages import speed as pages_speed

ROOT = Path(__file__).resolve().parent.parent
PPO = "ppo", "CartPole-v1", "", "a CPU", 1, 1000, 0.02, 5000, 1250, 270, 0, 400, 0, 350, "abc"


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("speed_suite", ROOT / "benchmark/speed.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "speed_suite", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FIGURES", tmp_path / "speed.csv")
    return module


def test_figures_are_kept_by_script_flags_and_hardware(speed) -> None:
    ppo = speed.Figure(*PPO)
    gpu = replace(ppo, hardware="a GPU", steps_per_second=9000)
    compiled = replace(ppo, flags="--compile", steps_per_second=1200)
    speed.write([ppo, gpu, compiled])
    speed.write([replace(ppo, steps_per_second=1100)])
    figures = speed.committed()
    assert figures["ppo", "", "a CPU"].steps_per_second == 1100
    assert figures["ppo", "", "a GPU"] == gpu
    assert figures["ppo", "--compile", "a CPU"] == compiled
    assert "| `ppo --compile` | `CartPole-v1` | 1,200 |" in pages_speed.speed_tables(speed.FIGURES)


def test_only_a_loss_beyond_the_noise_is_named(speed) -> None:
    before = speed.Figure(*PPO)
    assert speed.slower(replace(before, steps_per_second=920), before) == ""
    assert "ppo is 20% slower" in speed.slower(replace(before, steps_per_second=800), before)
    noisy = replace(before, steps_per_second=800, spread=0.3)
    assert speed.slower(noisy, before) == ""


def test_every_case_is_a_script_with_its_own_flags(speed) -> None:
    for name, case in speed.CASES.items():
        text = (ROOT / "cleanrl" / f"{name}.py").read_text()
        for word in case.flags.split():
            assert not word.startswith("--") or word[2:].replace("-", "_") in text, (name, word)


def test_a_script_that_fails_does_not_stop_the_others(speed, monkeypatch, capsys) -> None:
    def measure(name: str, args: Any) -> Any:
        if name == "ppo":
            raise Stopped("ppo.py: too few steps")
        return speed.Figure(name, *PPO[1:])

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["speed.py", "ppo", "dqn", "--write"])
    with pytest.raises(Stopped):
        speed.main()
    printed = capsys.readouterr()
    assert "| dqn |" in printed.out and "ppo could not be measured" in printed.err
    assert set(speed.committed()) == {("dqn", "", "a CPU")}


def test_every_script_is_measured(speed) -> None:
    scripts = {path.stem for path in (ROOT / "cleanrl").glob("[a-z]*.py")}
    assert scripts == set(speed.CASES) | sys.modules["speed_cases"].NOT_MEASURED


def test_a_row_shows_the_share_of_the_limit_and_the_other_libraries(speed) -> None:
    row = speed.row(speed.Figure(*PPO))
    assert "| 1,000 | 2% | 20% | 80% | 270 |" in row
    assert "2.50 x stable_baselines3, 2.86 x sbx" in row


def test_an_environment_is_measured_alone(speed) -> None:
    assert speed.environment_process("ppo") > 0


def test_learning_is_measured_with_an_environment_that_costs_nothing(speed, monkeypatch) -> None:
    few = replace(speed.CASES["ppo"], steps=5_000)
    monkeypatch.setitem(speed.CASES, "ppo", few)
    assert speed.measure_learning("ppo", 1, "--no-cuda") > 0
    assert speed.measure_learning("ppo_jax", 1, "") == 0


def test_the_page_shows_the_share_of_the_limit_and_the_other_libraries(speed) -> None:
    speed.write([speed.Figure(*PPO)])
    table = pages_speed.speed_tables(speed.FIGURES)
    assert "**a CPU**" in table
    assert "| `ppo` | `CartPole-v1` | 1,000 | SB3 2.50<br>SBX 2.86 | 20% | 80% | 270 |" in table
    speed.write([replace(speed.Figure(*PPO), learning=0)])
    assert "learning" not in pages_speed.speed_tables(speed.FIGURES)  # not an empty column


def test_the_page_reads_the_committed_figures() -> None:
    assert "`ppo`" in pages_speed.speed_tables()


def test_memory_that_grows_with_the_steps_is_named(speed, monkeypatch, capsys) -> None:
    spec = importlib.util.spec_from_file_location("memory_check", ROOT / "benchmark/memory.py")
    assert spec and spec.loader
    memory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(memory)

    def run_script(name: str, steps: int, threads: int) -> tuple[list, dict, dict]:
        growth = steps // 10_000 if name == "dqn" else 0
        return [], {}, {"peak_memory_mb": 300 + growth}

    monkeypatch.setattr(memory, "run_script", run_script)
    monkeypatch.setattr(sys, "argv", ["memory.py", "ppo", "dqn"])
    with pytest.raises(Stopped):
        memory.main()
    printed = capsys.readouterr()
    assert "| ppo | 300 | 300 | +0 |" in printed.out
    assert "| dqn | 310 | 400 | +90 |" in printed.out
    assert printed.err == "error: memory grew by more than 20 MB: dqn\n"
