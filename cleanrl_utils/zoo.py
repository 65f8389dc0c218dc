"""The zoo: small trained models that are kept in the repository.

    python -m cleanrl_utils.zoo list                       # names, scores, sizes
    python -m cleanrl_utils.enjoy ppo__CartPole-v1         # play one, without a network
    python -m cleanrl_utils.zoo add runs/NAME              # keep the model of a run, with a video

`add` copies the model of a finished run into zoo/, writes its facts beside it and records a video
for the docs. It replaces a model of the same script and environment. The zoo is at most 30 MB.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tyro.conf import Positional

from cleanrl_utils.analysis import tables
from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import evaluation, folder, source
from cleanrl_utils.running.settings import parse_command
from cleanrl_utils.running.zoo import ZOO, Kept, model_of, read_zoo

LIMIT = 30_000_000  # bytes of all models together


@dataclass
class ZooArgs:
    action: Positional[Literal["list", "add"]]
    """list the models, or add the models of runs"""
    runs: Positional[tuple[str, ...]] = ()
    """add: folders of finished runs with a saved model"""
    film: bool = True
    """add: also record a video of the model, in docs/assets/films"""


def facts_of(run: Path) -> Kept:
    """The facts of a run's model; a run that cannot be kept is a one-line error."""
    require(run.is_dir(), f"{run}: no such folder")
    record = folder.read_record(run)
    require(folder.is_finished(run), f"{run}: is not finished")
    require(bool(folder.find_models(run)), f"{run}: has no model; train with --save-model")
    returns = folder.read_summary(run).get("eval_returns", [])
    require(bool(returns), f"{run}: has no final evaluation")
    script = record["script"]
    ours = source.PROJECT / "cleanrl" / f"{script}.py"
    require(
        ours.is_file(), f"{run}: {script}.py is not in cleanrl/: enjoy could not play its model"
    )
    env_id = record["args"]["env_id"]
    require(":" not in env_id, f"{run}: {env_id} is in a module that the repository does not have")
    dirty = "*" if record.get("git", {}).get("dirty") else ""
    return Kept(
        script=script,
        env_id=env_id,
        seed=record["args"]["seed"],
        steps=record["args"].get("total_timesteps", 0),
        episodic_return=round(float(np.mean(returns)), 2),
        episodes=len(returns),
        command=tables.command(record),
        commit=record.get("git", {}).get("commit", "")[:12] + dirty,
    )


def add(run: Path, where: Path = ZOO) -> Kept:
    """Keep the model of a run, and say so."""
    kept = facts_of(run)
    before = [other for other in read_zoo(where) if other.name == kept.name]
    model = folder.find_models(run)[0]
    evaluation.load_model(model)  # it must be loadable with the code of cleanrl/
    others = [path for path in where.glob(f"*{folder.MODEL}") if path.stem != kept.name]
    total = sum(path.stat().st_size for path in others) + model.stat().st_size
    if total > LIMIT:
        raise BadInput(f"{run}: the zoo would have {total / 1e6:.1f} MB, more than {LIMIT / 1e6:g}")
    where.mkdir(exist_ok=True)
    shutil.copyfile(model, model_of(kept.name, where))
    facts = json.dumps(asdict(kept), indent=1) + "\n"
    model_of(kept.name, where).with_suffix(".json").write_text(facts)
    line = f"zoo/{kept.name}: return {kept.episodic_return:g} over {kept.episodes} episodes"
    replaced = f"; replaces a model with {before[0].episodic_return:g}" if before else ""
    print(line + replaced)
    return kept


def show(where: Path = ZOO) -> str:
    """A table of all models."""
    rows = [["name", "return", "episodes", "steps", "KB"], ["-"] * 5]
    for kept in read_zoo(where):
        size = model_of(kept.name, where).stat().st_size / 1000
        cells = [kept.name, f"{kept.episodic_return:,.2f}", str(kept.episodes)]
        rows.append([*cells, f"{kept.steps:,}", f"{size:,.0f}"])
    return "\n".join(map(tables.markdown_row, rows))


def main(argv: list[str] | None = None) -> int:
    args = parse_command(ZooArgs, argv)
    if args.action == "list":
        print(show())
        return 0
    require(bool(args.runs), "add needs the folder of a run, e.g. runs/NAME")
    for run in args.runs:
        add(Path(run))
        if args.film:
            from cleanrl_utils.pages import films

            for path in films.make_films([run]):
                print(f"video: {path.relative_to(source.PROJECT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
