"""Train PPO on CartPole, play the trained agent, and draw its curve and record a video."""

import shlex
import subprocess
import sys
from pathlib import Path

from cleanrl_utils import results
from cleanrl_utils.enjoy import EnjoyArgs, enjoy
from cleanrl_utils.launching.jobs import Command

SCRIPT = Path(__file__).resolve().parent.parent / "cleanrl" / "ppo.py"


def main() -> None:
    more = sys.argv[1:]  # flags for ppo.py
    if "--help" in more or "-h" in more:
        print(f"{__doc__}\nFurther flags are passed to cleanrl/ppo.py:\n", flush=True)
        sys.exit(subprocess.run([sys.executable, str(SCRIPT), "--help"]).returncode)
    command = [sys.executable, str(SCRIPT), "--total-timesteps", "150000", "--save-model", *more]
    print("training: python cleanrl/ppo.py", *command[2:], flush=True)
    status = subprocess.run(command).returncode
    if status:
        sys.exit(status)
    runs_dir = Command(shlex.join(command)).value("--runs-dir", "runs")
    run = [run for run in results.find_runs(runs_dir) if run.finished][-1]
    print()
    enjoy(EnjoyArgs(run=str(run.folder), runs_dir=runs_dir, capture_video=True))
    curve = results.plot(run, run.folder / "curve.png")
    videos = sorted(Path(f"videos/{run.folder.name}-enjoy").glob("*.mp4"))
    print(f"\nlearning curve: {curve}\ngameplay video: {videos[-1]}\nall metrics:    {run.folder}")
    print(f"TensorBoard:    .venv/bin/tensorboard --logdir {runs_dir}")


if __name__ == "__main__":
    main()
