"""Play a trained model and say how well it does.

    python -m cleanrl_utils.enjoy --run runs/CartPole-v1__ppo__1__1700000000
    python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1 --seed 1
    python -m cleanrl_utils.enjoy --exp-name ppo --env-id CartPole-v1 --hf-entity somebody

Without --run and without the hub's flags, the newest matching run of --runs-dir is played.
"""

from dataclasses import dataclass
from pathlib import Path

from cleanrl_utils import results
from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import evaluation, folder
from cleanrl_utils.running.settings import check_seed, parse_command


@dataclass
class EnjoyArgs:
    run: str | None = None
    """folder of a run, or a .cleanrl_model file"""
    exp_name: str = "ppo"
    """name of the experiment whose model to play"""
    env_id: str = "CartPole-v1"
    """environment it was trained on"""
    seed: int = 1
    """seed it was trained with; also seeds the episodes"""
    hf_entity: str = ""
    """user or organisation on the Hugging Face hub to take the model from"""
    hf_repository: str = ""
    """repository on the hub, as entity/name; default: made from the four above"""
    runs_dir: str = "runs"
    """folder in which to look for runs"""
    eval_episodes: int = 10
    """episodes to play"""
    capture_video: bool = False
    """film the first episode into videos/"""
    greedy: bool = True
    """take the best action; --no-greedy samples, or explores, as at the end of training"""
    script: str | None = None
    """path of the script that made the model, if it is not one of cleanrl/"""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        episodes = self.eval_episodes
        require(episodes >= 1, f"--eval-episodes must be at least 1, got {episodes}")


def find_model(args: EnjoyArgs) -> Path:
    if args.run is not None:
        path = Path(args.run)
        require(path.exists(), f"--run {path}: no such folder or file")
        return path if path.is_file() else model_in(path)
    if args.hf_entity or args.hf_repository:
        from cleanrl_utils.huggingface import download_model, repository_name

        repository = args.hf_repository or repository_name(vars(args), args.hf_entity)
        return download_model(repository, args.exp_name)
    for run in reversed(results.find_runs(args.runs_dir)):
        settings = run.record["args"]
        same = (settings["exp_name"], settings.get("env_id"), settings["seed"])
        wanted = (args.exp_name, args.env_id, args.seed)
        if same == wanted and folder.find_models(run.folder):
            return model_in(run.folder)
    raise BadInput(
        f"{args.runs_dir} has no saved model of {args.exp_name} on {args.env_id}, seed {args.seed}:"
        " train one with --save-model, or name one with --run or --hf-entity"
    )


def model_in(run: Path) -> Path:
    models = folder.find_models(run)
    require(bool(models), f"--run {run}: has no model; train with --save-model")
    return models[0]


def enjoy(args: EnjoyArgs) -> list[float]:
    path = find_model(args)
    agent, settings, module = evaluation.load_model(path, args.script)
    policy = evaluation.as_policy(agent, greedy=args.greedy)
    name = f"{path.parent.name}-enjoy"
    seed, video = args.seed, args.capture_video
    epsilon = 0.0 if args.greedy else getattr(settings, "end_e", 0.0)
    print(f"{path}: {settings.env_id}, {args.eval_episodes} episodes")
    returns = evaluation.play(
        policy, module.make_env, settings.env_id, args.eval_episodes, seed, video, name, epsilon
    )
    for episode, value in enumerate(returns):
        print(f"eval_episode={episode}, episodic_return={value:g}")
    print(f"mean return {evaluation.describe(returns)}")
    if video:
        print(f"video: videos/{name}")
    return returns


if __name__ == "__main__":
    enjoy(parse_command(EnjoyArgs))
