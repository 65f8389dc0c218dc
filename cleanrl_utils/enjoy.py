"""Play a trained model and print its returns.

    python -m cleanrl_utils.enjoy ppo__CartPole-v1    # a model of the repository, from zoo/
    python -m cleanrl_utils.enjoy runs/CartPole-v1__ppo__1__1700000000
    python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1 --seed 1
    python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1 --hf-entity somebody

Without a run or a flag of the hub, it plays the newest matching run in --runs-dir.

A model is played with the code of cleanrl/NAME.py. If other code made it, the script in the run's
folder is used for your own runs, those in --runs-dir. Code from the hub or from another folder is
not run without --trust-remote-code.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from cleanrl_utils.errors import BadInput, require, silenced
from cleanrl_utils.running import evaluation, folder, hub, source
from cleanrl_utils.running.settings import check_seed, parse_command
from cleanrl_utils.running.zoo import ZOO, find_kept


@dataclass
class EnjoyArgs:
    path: tyro.conf.Positional[str | None] = None
    """folder of a run, a model file, or the name of a model of the zoo"""
    run: str | None = None
    """folder of a run, a model file, or the name of a model of the zoo"""
    exp_name: str = "ppo"
    """name of the experiment whose model to play"""
    env_id: str = "CartPole-v1"
    """environment that the model was trained on; required for a model file or the hub if it has the
    form module:Name-v0, because making it imports that module"""
    seed: int = 1
    """seed that the model was trained with; also the seed of the episodes"""
    hf_entity: str = ""
    """user or organisation on the Hugging Face hub to take the model from"""
    hf_repository: str = ""
    """repository on the hub as entity/name; unset: made from --hf-entity, --env-id, --exp-name and
    --seed"""
    runs_dir: str = "runs"
    """folder of your own runs; their code is trusted"""
    eval_episodes: int = 10
    """number of episodes to play"""
    capture_video: bool = False
    """record a video of the first episode in videos/"""
    greedy: bool = True
    """act greedily; --no-greedy: sample, or explore, as at the end of training"""
    script: str | None = None
    """path of the script that made the model, if it is not in cleanrl/"""
    trust_remote_code: bool = False
    """run the script that came with the model from the hub or from another folder; read it first"""

    def __post_init__(self) -> None:
        self.run = self.run or self.path
        check_seed(self.seed)
        episodes = self.eval_episodes
        require(episodes >= 1, f"--eval-episodes must be at least 1, got {episodes}")


@dataclass
class Model:
    """A model file, the script beside it, if any, and whether it is the user's or the zoo's."""

    path: Path
    script: Path | None = None
    own: bool = False


def find_model(args: EnjoyArgs) -> Path:
    """The model file that the flags name."""
    return locate(args).path


def locate(args: EnjoyArgs) -> Model:
    """The model that the flags name, with its script."""
    if args.run is not None:
        path = Path(args.run)
        if not path.exists() and path.name == args.run:
            return Model(find_kept(args.run), own=True)
        require(path.exists(), f"--run {path}: no such folder or file")
        return (
            model_of_file(path, args.runs_dir) if path.is_file() else model_in(path, args.runs_dir)
        )
    if args.hf_entity or args.hf_repository:
        repository = args.hf_repository or hub.repository_name(vars(args), args.hf_entity)
        path = hub.download_model(repository, args.exp_name)
        return Model(
            path, hub.download_script(repository, metadata(path).get("script", args.exp_name))
        )
    for place, record in reversed(folder.find_records(args.runs_dir)):
        settings = record["args"]
        found = (settings["exp_name"], settings.get("env_id"), settings["seed"])
        wanted = (args.exp_name, args.env_id, args.seed)
        if found == wanted and folder.find_models(place):
            return model_in(place, args.runs_dir)
    raise BadInput(
        f"{args.runs_dir} has no saved model of {args.exp_name} on {args.env_id}, seed {args.seed}:"
        " train with --save-model, or use --run or --hf-entity"
    )


def model_of_file(path: Path, runs_dir: str) -> Model:
    """The model in a file, with its script if the file is in the folder of a run or in RUN/best."""
    for run in path.absolute().parents[:2]:
        if folder.find_record(run) and folder.find_models(run):
            return replace(model_in(run, runs_dir), path=path)
    return Model(path)


def model_in(run: Path, runs_dir: str) -> Model:
    """The model of a run; the run is the user's own if it is in --runs-dir."""
    models = folder.find_models(run)
    require(bool(models), f"--run {run}: has no model; train with --save-model")
    own = run.resolve().is_relative_to(Path(runs_dir).resolve())
    record = folder.find_record(run)
    copy = folder.script_path(run, record["script"]) if record else None
    return Model(models[0], copy if copy and copy.is_file() else None, own)


def metadata(path: Path) -> dict[str, Any]:
    """The metadata of a model file; empty for files of the original CleanRL."""
    try:
        with silenced():
            return evaluation.read_model(path)[0]
    except BadInput:  # loading it will print the error
        return {}


def choose_script(model: Model, args: EnjoyArgs) -> Path | None:
    """The script to run, None for cleanrl/NAME.py; prints which other code is run or refused."""
    if args.script is not None:
        return Path(args.script)
    name = metadata(model.path).get("script", args.exp_name)
    ours = source.PROJECT / "cleanrl" / f"{name}.py"
    if model.script is None:
        return None
    trusted = model.own or args.trust_remote_code
    if trusted:
        record = folder.find_record(model.script.parent) or {}
        add_folder_of(record.get("script_path"))
    if ours.is_file() and source.meaning(ours) == source.meaning(model.script):
        return None
    differs = f"differs from cleanrl/{name}.py" if ours.is_file() else "is not in cleanrl/"
    if trusted:
        print(f"code: {model.script} ({differs})")
        return model.script
    hint = "not run: read it, then add --trust-remote-code"
    instead = f"; cleanrl/{name}.py is run instead" if ours.is_file() else ""
    print(f"code: {model.script} {differs}; {hint}{instead}", file=sys.stderr)
    return None


def add_folder_of(script: Any) -> None:
    """Let a script, or --env-id module:Id, import the modules beside the script that trained."""
    if isinstance(script, str) and Path(script).parent.is_dir():
        sys.path.append(str(Path(script).parent.resolve()))


def video_name(path: Path) -> str:
    """The name of a model's videos: that of its run, or its own in the zoo."""
    return path.stem if path.parent == ZOO else path.absolute().parent.name


def enjoy(args: EnjoyArgs) -> list[float]:
    """Play a model as the flags ask; returns the returns."""
    model = locate(args)
    path = model.path
    script = choose_script(model, args)
    env_id = args.env_id
    trained_on = metadata(path).get("args", {}).get("env_id", env_id)
    other = f"--env-id {env_id}: {path} was trained on {trained_on} and plays only that"
    require(env_id in (trained_on, EnjoyArgs.env_id), other)
    if model.own:  # the user chose the environment when training
        env_id = trained_on
    agent, settings, module = evaluation.load_model(
        path, script, env_id=env_id, exp_name=args.exp_name
    )
    policy = evaluation.as_policy(agent, greedy=args.greedy)
    videos = f"videos/{video_name(path)}-enjoy"
    epsilon = 0.0 if args.greedy else getattr(settings, "end_e", 0.0)
    make_env = partial(module.make_env, **settings.env_settings)
    print(f"{path}: {settings.env_id}")
    returns = evaluation.play(
        policy,
        make_env,
        settings.env_id,
        args.eval_episodes,
        args.seed,
        args.capture_video,
        videos,
        epsilon,
    )
    for episode, value in enumerate(returns):
        print(f"eval_episode={episode}, episodic_return={value:g}")
    print(evaluation.describe(returns))
    if args.capture_video:
        print(f"video: {videos}")
    return returns


if __name__ == "__main__":
    enjoy(parse_command(EnjoyArgs))
