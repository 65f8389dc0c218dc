"""Random flags and damaged files: one line, no traceback, nothing left behind, nothing imported."""

import contextlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cleanrl_utils import enjoy
from cleanrl_utils.running import checkpoint, folder
from cleanrl_utils.running.run import Run
from cleanrl_utils.running.settings import parse_args

CASES = 200
SMALL = "--num-envs 1 --num-steps 8 --total-timesteps 32 --num-minibatches 1 --checkpoints 4"
SMALL += " --save-model --eval-episodes 1"
VALUES = [
    "",
    "-1",
    "0",
    "1",
    "7",
    "1e3",
    "1e400",
    "-0.5",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "None",
    "True",
]
VALUES += [
    "false",
    "a/b",
    "..",
    "/",
    "x" * 300,
    "\x00",
    "\x1b[2J",
    "\udc80",
    "é",
    "名",
    "a b",
    "--",
    "-x",
]
VALUES += ["evil:Thing-v0", "evil", "{}", "[]", "[" * 500, "key=value", "=", "k=" + "(" * 300]
VALUES += [
    "seed=1",
    "1e18",
    "99999999999999999999",
    "0x10",
    "1_000",
    "٣",
    "½",
    "--help ",
    "*",
    "$HOME",
]
EVIL = "raise SystemError('a stranger has run code here')\n"


def fresh(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*")}


def outcome(action: Callable[[], Any], capfd: Any) -> tuple[int, str]:
    """(exit status, what was said to stderr); any other exception is a failure of the test."""
    status = 0
    try:
        action()
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:
        said = capfd.readouterr().err
    assert "Traceback" not in said, said
    return status, said


def one_error(said: str) -> bool:
    lines = said.strip().splitlines()
    return bool(lines) and lines[-1].startswith("error: ") and said.count("error: ") == 1


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the current folder that a stranger's file might name."""
    monkeypatch.chdir(tmp_path)
    for name in ("evil", "evilmod"):
        (tmp_path / f"{name}.py").write_text(EVIL)


def test_random_flags(trap: None, tmp_path: Path, capfd) -> None:
    """Settings are read or refused in one line; of what is accepted, a folder can be made."""
    from cleanrl import dqn, ppo

    moment = random.Random(17)
    before = fresh(tmp_path)
    accepted = 0
    for _ in range(CASES):
        cls = moment.choice([ppo.Args, dqn.Args])
        flags = ["--" + name.replace("_", "-") for name in cls.__dataclass_fields__]
        words = []
        for _ in range(moment.choice([1, 1, 2])):
            flag, value = moment.choice(flags), moment.choice(VALUES)
            words += moment.choice([[flag, value], [f"{flag}={value}"], [flag]])
        made: list[Path] = []

        def read(cls: Any = cls, words: list[str] = words, made: list[Path] = made) -> None:
            args = parse_args(cls, words)
            made.append(folder.new_folder(args))

        status, said = outcome(read, capfd)
        assert status in (0, 2), words
        assert (status == 0) == (said == "") and (status == 0 or one_error(said)), (words, said)
        accepted += status == 0
        for path in made:
            folder.remove_if_empty([path, *path.parents])
        assert fresh(tmp_path) == before, words
    assert 10 < accepted < CASES - 10 and "evil" not in sys.modules


# -- files --------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a process that dies."""


@pytest.fixture
def run_folder(train, monkeypatch, trap: None) -> Path:
    """A run of ppo.py with a model that died after its second checkpoint."""
    written, save = [], Run._save

    def dies(run: Run, iteration: int) -> None:
        save(run, iteration)
        written.append(iteration)
        if len(written) == 2:
            run._save_model(run.folder, run.state["agent"])
            run._close()
            raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(Run, "_save", dies)
        train("ppo", SMALL)
    (path,) = Path("runs").iterdir()
    return path


ODD = [None, True, -1, 0, 2.5, 1e308, "", "four", "evilmod:X-v0", "../x", [], [1], {}, {"a": {}}]
ODD += ["x" * 500, [[[]]], 10**30]


def mutate_json(value: Any, moment: random.Random) -> Any:
    """The same with one entry, at whatever depth, changed, dropped or added."""
    if isinstance(value, dict) and value and moment.random() < 0.8:
        name = moment.choice(sorted(value))
        likely = [key for key in ("args", "metadata", "env_id") if key in value]
        if likely and moment.random() < 0.6:  # what decides which code is run
            name = moment.choice(likely)
        kind = moment.random()
        if kind < 0.15:
            return {k: v for k, v in value.items() if k != name}
        if kind < 0.25:
            return value | {"evilmod": moment.choice(ODD)}
        return value | {name: mutate_json(value[name], moment)}
    return moment.choice(ODD)


def mutate_bytes(content: bytes, moment: random.Random) -> bytes:
    """Cut off, changed, doubled or overwritten somewhere."""
    changed = bytearray(content)
    at = moment.randrange(len(changed))
    kind = moment.randrange(5)
    if kind == 0:
        return bytes(changed[:at])
    if kind == 1:
        changed[at] ^= 1 << moment.randrange(8)
    if kind == 2:
        changed[at:at] = changed[: moment.randrange(100)]
    if kind == 3:
        changed[at : at + 8] = moment.randbytes(8)
    if kind == 4:
        changed[:8] = moment.randbytes(8)  # the length of the header
    return bytes(changed)


def forge(path: Path, moment: random.Random) -> None:
    """Change what a file says, or its arrays, and sign it as if it were whole."""
    with safe_open(path, framework="numpy") as file:
        _, text = json.loads(file.metadata()[checkpoint.FORMAT])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if moment.random() < 0.3:
        name = moment.choice(sorted(arrays))
        other = [np.zeros(3, np.float32), np.zeros((2, 2), np.int64), np.array(120, np.uint8)]
        arrays[name] = moment.choice(other)
    else:
        text = json.dumps(mutate_json(json.loads(text), moment))
    header = {checkpoint.FORMAT: json.dumps([checkpoint._digest(arrays, text), text])}
    save_file(arrays, path, metadata=header)


def test_damaged_and_forged_files(run_folder: Path, train, capfd, monkeypatch) -> None:
    """The model is played, the run resumed: what cannot be used is refused in one line."""
    monkeypatch.setattr(Run, "_catch_interrupts", lambda run: None)
    (model,) = run_folder.glob("*.cleanrl_model")
    saved = run_folder / folder.CHECKPOINT
    record = run_folder / folder.RECORD
    whole = {path: path.read_bytes() for path in run_folder.iterdir() if path.is_file()}
    names = {path.name for path in run_folder.rglob("*")}
    there = fresh(Path())
    modules = set(sys.modules)
    counts = {0: 0, 1: 0, 2: 0}
    for case in range(CASES):
        moment = random.Random(case)  # a case is the same, whatever the length of files before
        path = (model, saved, record)[case % 3]
        if path is record and moment.random() < 0.8:
            changed = mutate_json(json.loads(whole[record]), moment)
            # A run that is resumed is one's own: it may have an environment of one's own module.
            record.write_text(json.dumps(changed).replace("evilmod:", ""))
        elif path is not record and moment.random() < 0.6:
            forge(path, moment)
        else:
            path.write_bytes(mutate_bytes(whole[path], moment))
        content = path.read_bytes()

        def use(path: Path = path) -> None:
            if path is model:
                enjoy.enjoy(enjoy.EnjoyArgs(run=str(model), eval_episodes=1))
            else:
                train("ppo", f"--resume {run_folder}")

        status, said = outcome(use, capfd)
        assert status in counts, (case, path.name, said)
        assert status == 0 or one_error(said), (case, path.name, said)
        counts[status] += 1
        if status != 0:
            assert path.read_bytes() == content, (case, "a file that was refused has changed")
            left = {file.name for file in run_folder.rglob("*")} - names
            assert not {name for name in left if "tfevents" not in name}, (case, left)
        for file in set(run_folder.iterdir()) - set(whole):
            file.unlink()
        for file, bytes_before in whole.items():
            file.write_bytes(bytes_before)
        assert fresh(Path()) == there, case
    assert counts[2] > CASES / 2, counts
    assert not {name for name in set(sys.modules) - modules if "evil" in name}
