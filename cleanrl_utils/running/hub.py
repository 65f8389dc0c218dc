"""The Hugging Face hub: login, downloads, and the upload of a run.

Models are safetensors files, or torch files of which only tensors and plain values are read.
Downloaded code is never run.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cleanrl_utils.errors import BadInput, require
from cleanrl_utils.running import folder as run_folder

COMMAND = ["-m", "cleanrl_utils.huggingface"]


def repository_name(args: dict[str, Any], hf_entity: str = "") -> str:
    """entity/environment-experiment-seedN; the hub allows no slash and no colon in a name."""
    name = f"{args['env_id']}-{args['exp_name']}-seed{args['seed']}"
    name = re.sub(r"[^\w.-]", "-", name)
    return f"{hf_entity}/{name}" if hf_entity else name


def require_login(what: str = "--upload-model") -> None:
    """Stop before training if an upload would fail after it; `what` begins the error."""
    with plain_errors(what):
        from huggingface_hub import get_token

        hint = "set HF_TOKEN or run `hf auth login`"
        require(get_token() is not None, f"{what}: not logged in to the hub: {hint}")


def upload(folder: Path, hf_entity: str) -> None:
    """Upload a finished run with cleanrl_utils.huggingface; a failure does not change the run."""
    words = [*COMMAND, str(folder)]
    if hf_entity:
        words += ["--hf-entity", hf_entity]
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    cause = lines[-1].removeprefix("error: ") if lines else f"exit status {done.returncode}"
    later = f"the run is complete; upload it later: {shlex.join(['python', *words])}"
    raise BadInput(f"{cause}; {later}")


def download_model(repository: str, exp_name: str) -> Path:
    """Download the model file of a repository on the hub, or find it in the cache."""
    filename = f"{exp_name}{run_folder.MODEL}"
    with plain_errors(f"{repository}: {filename} cannot be downloaded"):
        return download(repository, filename)


def download_script(repository: str, name: str) -> Path | None:
    """Download the script of a repository, to be read; None if there is none."""
    try:
        return download(repository, f"{name}.py")
    except Exception:  # the model was found, so the script is only missing
        return None


def download(repository: str, filename: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    offline = False
    try:  # hf_hub_download would retry for half a minute
        get_hf_file_metadata(hf_hub_url(repository, filename), timeout=10)
    except (HfHubHTTPError, ValueError):  # the hub answered, or the name is not valid
        raise
    except Exception:
        offline = True
    return Path(hf_hub_download(repository, filename, local_files_only=offline))


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn the client's errors (network, token, names, missing files) into one line."""
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
