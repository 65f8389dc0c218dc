"""Share a run's model on the Hugging Face hub, and get it back from there.

    python -m cleanrl_utils.huggingface runs/CartPole-v1__ppo__1__1700000000 --hf-entity somebody

Uploads the model, its curve, a video if there is one, and a model card that says how well it does,
with which settings, and which command made it. `--upload-model` does so at a run's end.
Models come back as safetensors files: nothing that this downloads is ever unpickled.
"""

import contextlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from cleanrl_utils import reproduce, results
from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import checkpoint
from cleanrl_utils.running import folder as run_folder
from cleanrl_utils.running.settings import parse_command

PRIVATE = {"hf_entity", "upload_model", "wandb_entity", "wandb_project_name", "track", "resume"}
PRIVATE |= {"runs_dir"}  # say nothing about the model


@dataclass
class PushArgs:
    run: tyro.conf.Positional[str]
    """folder of a finished run with a saved model"""
    hf_entity: str = ""
    """user or organisation on the hub; empty: your own"""


def repository_name(args: dict[str, Any], hf_entity: str = "") -> str:
    """entity/environment-experiment-seedN; the hub allows no slash and no colon in a name."""
    name = f"{args['env_id']}-{args['exp_name']}-seed{args['seed']}"
    name = re.sub(r"[^\w.-]", "-", name)
    return f"{hf_entity}/{name}" if hf_entity else name


def push_run(folder: str | Path, hf_entity: str = "") -> str:
    """Upload a run's model and all that describes it; returns the repository's name."""
    folder = Path(folder)
    record = reproduce.read_record(str(folder))
    model = run_folder.model_path(folder, record["args"]["exp_name"])
    require(model.exists(), f"{folder}: has no model to share; train with --save-model")
    run = results.RunFolder(folder, record)
    name = repository_name(record["args"], hf_entity)
    require_login()
    with plain_errors(f"--upload-model: {name} cannot be uploaded"):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        with tempfile.TemporaryDirectory() as temporary:
            curve = results.plot(run, Path(temporary) / "curve.png")
            files: dict[str, Any] = {model.name: model, "curve.png": curve}
            if video := find_video(run):
                files["replay.mp4"] = video
            repository = api.create_repo(name, exist_ok=True).repo_id
            files["README.md"] = model_card(run, repository, "replay.mp4" in files).encode()
            operations = [CommitOperationAdd(path, source) for path, source in files.items()]
            message = f"{record['args']['exp_name']} on {record['args']['env_id']}"
            url = api.create_commit(repository, operations, commit_message=message).commit_url
    print(f"model shared: {url or repository}", file=sys.stderr)
    return repository


def require_login() -> None:
    """Before training rather than after it."""
    with plain_errors("--upload-model"):
        from huggingface_hub import get_token

        hint = "set HF_TOKEN or run `hf auth login`"
        require(get_token() is not None, f"--upload-model: not logged in to the hub: {hint}")


def upload_later(folder: Path, hf_entity: str) -> str:
    """The command for it."""
    entity = f" --hf-entity {hf_entity}" if hf_entity else ""
    return f"python -m cleanrl_utils.huggingface {shlex.quote(str(folder))}{entity}"


def download_model(repository: str, exp_name: str) -> Path:
    """The model file of a repository on the hub, fetched once and then kept in the hub's cache."""
    filename = f"{exp_name}{run_folder.MODEL}"
    with plain_errors(f"{repository}: {filename} cannot be downloaded"):
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError

        offline = False
        try:  # the download itself would try again for half a minute
            get_hf_file_metadata(hf_hub_url(repository, filename), timeout=10)
        except (HfHubHTTPError, ValueError):  # it answered; or it is no name of a repository
            raise
        except Exception:
            offline = True
        path = Path(hf_hub_download(repository, filename, local_files_only=offline))
    checkpoint.load(path)  # refuses, in one line, whatever is not a file of our own format
    return path


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """The client's many errors (network, token, names, missing files) as one line."""
    try:
        yield
    except ImportError:
        raise BadInput(f"{what}: pip install huggingface_hub") from None
    except Exception as error:
        cause = {
            "RepositoryNotFoundError": "no such repository, or a private one and no HF_TOKEN",
            "RemoteEntryNotFoundError": "the repository has no such file",
            "LocalEntryNotFoundError": "the hub cannot be reached, and it is not in the cache",
            "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
            "ConnectError": "the hub cannot be reached",
            "ConnectTimeout": "the hub cannot be reached",
        }.get(type(error).__name__)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BadInput(
            f"{what}: {cause or ' '.join(lines)[:300] or type(error).__name__}"
        ) from None


def find_video(run: results.RunFolder) -> Path | None:
    """The film of the final evaluation, else the last one of training."""
    films = run_folder.find_videos(run.folder)
    return films[-1] if films else None


def shared_settings(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record["args"].items() if key not in PRIVATE}


def score(run: results.RunFolder) -> tuple[str, str]:
    """("mean +/- std", what it was measured on)."""
    if returns := run_folder.read_summary(run.folder).get("eval_returns"):
        about = f"{len(returns)} episodes, greedy, after training"
        return f"{np.mean(returns):.2f} +/- {np.std(returns):.2f}", about
    metrics = run.metrics()
    last = metrics.loc[metrics.tag == results.RETURN, "value"].to_numpy()[-results.LAST :]
    require(len(last) > 0, f"{run.folder}: neither evaluated nor any episode: nothing to share yet")
    return f"{last.mean():.2f} +/- {last.std():.2f}", f"last {len(last)} episodes of training"


def model_card(run: results.RunFolder, repository: str, video: bool) -> str:
    """The repository's README: who made the model, how well it does, how to play and repeat it."""
    from huggingface_hub import EvalResult, ModelCardData

    record = run.record
    args, settings = record["args"], shared_settings(record)
    env_id, exp_name, seed = args["env_id"], args["exp_name"], args["seed"]
    value, measured = score(run)
    mean, deviation = value.split(" +/- ")
    reached = EvalResult("reinforcement-learning", env_id, env_id, "mean_reward", value)
    reached.task_name, reached.metric_name = "reinforcement-learning", "mean_reward"
    tags = [
        env_id,
        "deep-reinforcement-learning",
        "reinforcement-learning",
        "custom-implementation",
    ]
    data = ModelCardData(
        library_name="cleanrl", tags=tags, model_name=exp_name, eval_results=[reached]
    )
    words = ["python", reproduce.script_path(record)]
    words += reproduce.drop(record["command"][1:], PRIVATE)
    source = f"{words[1]}{at_commit(record)}"
    rows = "\n".join(f"| {key} | {cell(value)} |" for key, value in settings.items())
    film = "\n[Video of an episode](replay.mp4)\n" if video else ""
    return f"""---
{data.to_yaml()}
---

# {exp_name} on {env_id}

An agent trained by CleanRL's `{source}`, seed {seed}.

Return: **{mean}** (standard deviation {deviation}; {measured}).

![Return while it was trained](curve.png)
{film}
## Play it

```bash
python -m cleanrl_utils.enjoy --exp-name {shlex.quote(exp_name)} --env-id {shlex.quote(env_id)} \
--seed {seed} --hf-repository {repository}
```

## Train it again

```bash
{shlex.join(words)}
```

Python {record.get("versions", {}).get("python", "3")} on \
{reproduce.describe(record.get("hardware", {}))}.

## Settings

| setting | value |
|-|-|
{rows}
"""


def at_commit(record: dict[str, Any]) -> str:
    git = record.get("git", {})
    changed = ", with changes that were not committed" if git.get("dirty") else ""
    return f" at commit {git['commit'][:12]}{changed}" if git.get("commit") else ""


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    options = parse_command(PushArgs)
    push_run(options.run, options.hf_entity)
