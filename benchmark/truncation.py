"""Compare PPO with and without the mistake of treating truncation as termination.

    python benchmark/truncation.py --workers 6
    python benchmark/truncation.py --env-ids HalfCheetah-v4 --total-timesteps 1000000 --workers 6

The tasks never terminate, they are only truncated. The wrong variant is a copy of the script with
one line changed: a truncated episode counts as terminated, so the value of its last state is 0.
Both run through cleanrl_utils.benchmark: called again, it runs only what is missing.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cleanrl_utils import results  # noqa: E402
from cleanrl_utils.analysis.stats import mean_and_std  # noqa: E402
from cleanrl_utils.running.settings import Count, parse_command  # noqa: E402

RIGHT = ROOT / "cleanrl" / "ppo_continuous_action.py"
RECORDED = "record[:, step] = reward, term, term | trunc, real"
MISTAKEN = "record[:, step] = reward, term | trunc, term | trunc, real"
LABELS = {
    "ppo_continuous_action": "truncation is not termination (ours)",
    "truncation_is_termination": "truncation counts as termination",
}


@dataclass
class TruncationArgs:
    env_ids: tuple[str, ...] = ("dm_control/cartpole-balance-v0", "Pendulum-v1")
    """tasks that never terminate"""
    total_timesteps: Count = 500_000
    """number of environment steps"""
    num_seeds: Count = 3
    """number of seeds, from 1"""
    workers: Count = 2
    """number of parallel runs"""
    flags: str = ""
    """further flags for both scripts, in one string"""
    folder: Path = Path("runs/truncation")
    """folder of the runs"""
    figure: Path = ROOT / "docs" / "assets" / "truncation.png"
    """file of the picture"""


def write_wrong(folder: Path) -> Path:
    """Write the script with the mistake; stops unless the line to change is found exactly once."""
    source = RIGHT.read_text()
    if source.count(RECORDED) != 1:
        raise SystemExit(f"error: {RIGHT.name} no longer records its steps as this script expects")
    path = folder / "truncation_is_termination.py"
    path.write_text(source.replace(RECORDED, MISTAKEN))
    return path


def train(script: Path, options: TruncationArgs) -> None:
    """Run a script on all tasks and seeds."""
    flags = f"--no-cuda --total-timesteps {options.total_timesteps} {options.flags}"
    paths = f"{shlex.quote(str(script))} --runs-dir {shlex.quote(str(options.folder))}"
    words = ["--command", f"{shlex.quote(sys.executable)} {paths} {flags}"]
    words += ["--env-ids", *options.env_ids, "--num-seeds", str(options.num_seeds)]
    command = [sys.executable, "-m", "cleanrl_utils.benchmark", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--workers", str(options.workers)], check=True, env=environment)


def draw(options: TruncationArgs) -> None:
    """Draw one panel per task: the mean over seeds, and a band from the worst to the best seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [run for run in results.find_runs(options.folder) if run.finished]
    steps = np.linspace(0, options.total_timesteps, 101)[1:]
    size = (5 * len(options.env_ids), 4)
    columns = len(options.env_ids)
    figure, panels = plt.subplots(1, columns, figsize=size, squeeze=False, layout="constrained")
    for panel, env_id in zip(panels[0], options.env_ids, strict=True):
        for script, label in LABELS.items():
            rows = []
            for run in runs:
                args = run.record["args"]
                same_length = args["total_timesteps"] == options.total_timesteps
                if run.record["script"] == script and args["env_id"] == env_id and same_length:
                    curve = results.curve(run)
                    rows.append(np.interp(steps, curve.step, curve.episodic_return))
            curves = np.stack(rows)
            final = curves[:, -10:].mean(1)
            print(f"{env_id}, {label}: {mean_and_std(final, 1)}, {len(rows)} seeds")
            (line,) = panel.plot(steps / 1000, curves.mean(0), label=label)
            color = line.get_color()
            panel.fill_between(steps / 1000, curves.min(0), curves.max(0), alpha=0.2, color=color)
        panel.set(title=env_id, xlabel="thousand steps", ylabel="episodic return")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center")
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.figure, dpi=120)
    print(f"figure: {options.figure}")


def main() -> None:
    options = parse_command(TruncationArgs)
    options.folder.mkdir(parents=True, exist_ok=True)
    for script in (RIGHT, write_wrong(options.folder)):
        train(script, options)
    draw(options)


if __name__ == "__main__":
    main()
