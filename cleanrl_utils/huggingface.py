"""Upload a run's model to the Hugging Face hub.

    python -m cleanrl_utils.huggingface runs/CartPole-v1__ppo__1__1700000000 --hf-entity somebody

Uploads the model, its learning curve, a video if there is one, the script and the uncommitted
changes in the run's folder, and a model card with its return, its settings and its command. The
flag `--upload-model` of a script does the same at the end of a run.
"""

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils import reproduce, results
from cleanrl_utils.errors import require
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running import source
from cleanrl_utils.running.hub import (
    download_model,
    plain_errors,
    repository_name,
    require_login,
)
from cleanrl_utils.running.settings import parse_command

__all__ = ["download_model", "push_run", "repository_name", "require_login"]

PRIVATE = {"hf_entity", "upload_model", "wandb_entity", "wandb_project_name", "track", "resume"}
PRIVATE |= {"runs_dir"}  # not about the model


@dataclass
class PushArgs:
    run: tyro.conf.Positional[str]
    """folder of a finished run with a saved model"""
    hf_entity: str = ""
    """user or organisation on the Hugging Face hub; empty: your own"""


def push_run(folder: str | Path, hf_entity: str = "") -> str:
    """Upload a run's model, curve, video, code and model card; returns the repository's name."""
    folder = Path(folder)
    record = reproduce.read_record(str(folder))
    model = run_folder.model_path(folder, record["args"]["exp_name"])
    require(model.exists(), f"{folder}: has no model to upload; train with --save-model")
    run = results.RunFolder(folder, record)
    require("env_id" in record["args"], f"{folder}: its record names no environment")
    name = repository_name(record["args"], hf_entity)
    require_login(f"{folder} cannot be uploaded")
    with plain_errors(f"--upload-model: {name} cannot be uploaded"):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        with tempfile.TemporaryDirectory() as temporary:
            curve = results.plot(run, Path(temporary) / "curve.png")
            files: dict[str, Any] = {model.name: model, "curve.png": curve}
            video = find_video(run)
            if video is not None:
                files["replay.mp4"] = video
            files |= {path.name: path for path in find_code(run)}
            repository = api.create_repo(name, exist_ok=True).repo_id
            files["README.md"] = model_card(run, repository, "replay.mp4" in files).encode()
            operations = [CommitOperationAdd(path, source) for path, source in files.items()]
            message = f"{record['args']['exp_name']} on {record['args']['env_id']}"
            url = api.create_commit(repository, operations, commit_message=message).commit_url
    names = ", ".join(files)
    print(f"model uploaded: {url or repository} ({names})", file=sys.stderr)
    return repository


def find_video(run: results.RunFolder) -> Path | None:
    """The video of the final evaluation, else the last one of training."""
    videos = run_folder.find_videos(run.folder)
    return videos[-1] if videos else None


def find_code(run: results.RunFolder) -> list[Path]:
    """The script and the uncommitted changes in a run's folder."""
    script = run_folder.script_path(run.folder, run.record["script"])
    return [path for path in (script, run.folder / run_folder.CHANGES) if path.is_file()]


def shared_settings(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record["args"].items() if key not in PRIVATE}


def score(run: results.RunFolder) -> tuple[str, str]:
    """(mean +/- standard deviation of the return, the episodes it is from)."""
    returns = run_folder.read_summary(run.folder).get("eval_returns")
    if isinstance(returns, list) and all(isinstance(x, int | float) for x in returns) and returns:
        episodes = f"{len(returns)} episodes, greedy, after training"
        return f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}", episodes
    metrics = run.metrics()
    last = metrics.loc[metrics.tag == results.RETURN, "value"].to_numpy()[-results.LAST :]
    require(
        len(last) > 0, f"{run.folder}: no evaluation and no finished episode: no return to report"
    )
    return f"{last.mean():.2f} +/- {last.std():.2f}", f"last {len(last)} episodes of training"


def model_card(run: results.RunFolder, repository: str, video: bool) -> str:
    """The repository's README: the script, the return, how to play and to reproduce the model."""
    record = run.record
    settings = shared_settings(record)
    env_id = record["args"]["env_id"]
    exp_name = record["args"]["exp_name"]
    seed = record["args"]["seed"]
    value, measured = score(run)
    mean, deviation = value.split(" +/- ")
    script = run_folder.recorded_script(record)
    uncommitted = record.get("script_tracked") is False
    if uncommitted:
        script = f"{record['script']}.py"  # the copy in the repository
    flags = run_folder.drop_flags(record["command"][1:], PRIVATE)
    command = shlex.join(["python", script, *flags])
    rows = "\n".join(f"| {key} | {cell(value)} |" for key, value in settings.items())
    video_link = "\n[Video of an episode](replay.mp4)\n" if video else ""
    return f"""---
{card_metadata(exp_name, env_id, value)}
---

# {exp_name} on {env_id}

An agent trained by CleanRL's `{script}{at_commit(record)}`, seed {seed}.

Return: **{mean}** (standard deviation {deviation}; {measured}).

![Return during training](curve.png)
{video_link}
## Play it

```bash
python -m cleanrl_utils.enjoy --exp-name {shlex.quote(exp_name)} --env-id {shlex.quote(env_id)} \
--seed {seed} --hf-repository {repository}
```
{own_script(run)}
## Train it again

```bash
{restore(run)}{command}
```

Python {reproduce.part(record, "versions").get("python", "3")} on \
{reproduce.describe(reproduce.part(record, "hardware"))}.

## Settings

| setting | value |
|-|-|
{rows}
"""


def card_metadata(exp_name: str, env_id: str, value: str) -> str:
    """What the hub itself reads of a model card, as YAML: tags and the return."""
    from huggingface_hub import EvalResult, ModelCardData

    task = "reinforcement-learning"
    result = EvalResult(task, env_id, env_id, "mean_reward", value)
    result.task_name = task
    result.metric_name = "mean_reward"
    tags = [env_id, "deep-reinforcement-learning", task, "custom-implementation"]
    data = ModelCardData(
        library_name="cleanrl", tags=tags, model_name=exp_name, eval_results=[result]
    )
    return data.to_yaml()


def own_script(run: results.RunFolder) -> str:
    """A paragraph about the script, if it is not one of cleanrl/."""
    name = run.record["script"]
    copy = run_folder.script_path(run.folder, name)
    ours = source.PROJECT / "cleanrl" / f"{name}.py"
    same = ours.is_file() and copy.is_file() and source.meaning(ours) == source.meaning(copy)
    if same or not copy.is_file():
        return ""
    script = f"The script is `{copy.name}` in this repository."
    return f"\n{script} Read it, then add `--trust-remote-code`.\n"


def restore(run: results.RunFolder) -> str:
    """The commands that restore uncommitted changes before training."""
    commit = reproduce.part(run.record, "git").get("commit")
    if not commit or not (run.folder / run_folder.CHANGES).is_file():
        return ""
    return f"git checkout {shlex.quote(str(commit))}\ngit apply {run_folder.CHANGES}\n"


def at_commit(record: dict[str, Any]) -> str:
    git = reproduce.part(record, "git")
    changed = ", with changes that were not committed" if git.get("dirty") else ""
    return f" at commit {str(git['commit'])[:12]}{changed}" if git.get("commit") else ""


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    options = parse_command(PushArgs)
    push_run(options.run, options.hf_entity)
