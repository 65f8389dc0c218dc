"""Starting a run: what is loaded, what is recorded and what it costs."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from torch import optim

from cleanrl import ppo
from cleanrl_utils.running import machine, source, tensorboard
from cleanrl_utils.speed import compiler

SHORT = "--total-timesteps 512 --cuda False"


def python(program: str, cwd: Path) -> str:
    """What a program prints in a process of its own."""
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- torch's compiler ------------------------------------------------------------------------------


@pytest.mark.parametrize("name, flags", [("ppo", ""), ("dqn", "--learning-starts 100")])
def test_a_run_does_not_load_the_compiler(name: str, flags: str, tmp_path: Path) -> None:
    words = [f"cleanrl/{name}.py", *SHORT.split(), *flags.split(), "--save-model"]
    program = f"""
import runpy, sys
sys.argv = {words!r}
runpy.run_path({str(ROOT / words[0])!r}, run_name="__main__")
print([m for m in ("torch._dynamo", "sympy", "boto3", "pandas", "wandb") if m in sys.modules])
"""
    assert python(program, tmp_path).strip() == "[]"


def test_optimisers_are_the_same_with_and_without_the_compiler(tmp_path: Path) -> None:
    program = """
import hashlib, sys
import torch
from torch import nn, optim
from cleanrl_utils.speed.compiler import load_late

def train(kind, **settings):
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    optimizer = kind(net.parameters(), lr=0.1, **settings)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().mean().backward()
        assert optimizer.step(lambda: 7) == 7
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled() and not any(p.grad_fn for p in net.parameters())
    return net.weight.tolist()

KINDS = [(optim.Adam, {"fused": True}), (optim.AdamW, {}), (optim.SGD, {}), (optim.RMSprop, {})]
own = {kind: kind.step for kind, _ in KINDS}
load_late()
assert all(kind.step is not own[kind] for kind in (optim.Adam, optim.SGD, optim.RMSprop))
late = [train(kind, **settings) for kind, settings in KINDS]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert [train(kind, **settings) for kind, settings in KINDS] == late
"""
    python(program, tmp_path)


def test_what_is_compiled_later_is_compiled_as_ever(tmp_path: Path) -> None:
    """Somebody calls torch.compile in a script that was started without --compile."""
    program = """
import torch
from torch import nn, optim
from cleanrl_utils.speed.compiler import load_late

load_late()
torch.manual_seed(1)
net, twin = nn.Linear(3, 2), nn.Linear(3, 2)
twin.load_state_dict(net.state_dict())

def make(net):
    optimizer = optim.Adam(net.parameters())
    def update(x):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return update

eager, compiled = make(net), torch.compile(make(twin), backend="eager")
for _ in range(3):
    eager(torch.ones(4, 3))
    compiled(torch.ones(4, 3))
assert "torch._dynamo" in __import__("sys").modules
assert torch.allclose(net.weight, twin.weight)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0)
"""
    assert python(program, tmp_path).strip() == "True"


def test_another_torch_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, compiler.COMPILER, raising=False)
    steps = {kind: kind.step for kind in (optim.Adam, optim.SGD)}
    monkeypatch.setattr(compiler, "written_in", lambda function, module: False)
    compiler.load_late()
    assert all(kind.step is step for kind, step in steps.items())


# -- what is recorded ------------------------------------------------------------------------------


def test_versions_are_those_that_the_library_names() -> None:
    import pandas  # noqa: F401
    import yaml  # noqa: F401  # of a package with another name

    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    owners = importlib.metadata.packages_distributions()
    names = {name for module in loaded for name in owners.get(module, [])}
    wanted = {name: importlib.metadata.version(name) for name in names}
    found = machine.versions()
    assert found.pop("python") == sys.version.split()[0]
    assert found == wanted and "PyYAML" in found and list(found) == sorted(found, key=str.lower)


def git(*words: str, cwd: Path) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=cwd, check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_git_is_asked_twice_and_once_more_for_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    begin = source.Git.__init__

    def counted(self: source.Git, folder: Path, *words: str) -> None:
        asked.append(words[0])
        begin(self, folder, *words)

    monkeypatch.setattr(source.Git, "__init__", counted)
    monkeypatch.delenv("CLEANRL_COMMIT", raising=False)
    monkeypatch.setattr(source, "PROJECT", tmp_path / "installed")  # without git
    script = tmp_path / "a.py"
    script.write_text("x = 1\n")
    assert source.Repository(script).state == {}, "no repository"
    git("init", "-q", cwd=tmp_path)
    assert source.Repository(script).state == {}, "no commit"
    git("add", ".", cwd=tmp_path)
    git("commit", "-qm", "first", cwd=tmp_path)
    (tmp_path / "new.py").write_text("")
    commit = git("rev-parse", "HEAD", cwd=tmp_path)

    asked.clear()
    clean = source.Repository(script)
    assert clean.state == {"commit": commit, "dirty": False}
    assert clean.has_script() and clean.diff() == b"" and asked == ["status", "ls-files"]
    assert not source.Repository(tmp_path / "new.py").has_script()
    assert clean.missing_modules("A-v0") == []
    assert clean.missing_modules("new:A-v0") == ["new.py"], "the module of an environment"
    script.write_text("import new, b\n")
    assert source.Repository(script).missing_modules("A-v0") == ["new.py"]

    script.write_text("x = 2\n")
    asked.clear()
    changed = source.Repository(script)
    assert changed.state == {"commit": commit, "dirty": True}
    assert b"+x = 2" in changed.diff() and asked == ["status", "ls-files", "diff"]


def test_a_library_of_another_checkout_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two clones and one environment, a script may import the other clone's library."""
    clones = [tmp_path / "a", tmp_path / "b"]
    for clone in clones:
        for name in ("cleanrl/ppo.py", "cleanrl_utils/__init__.py"):
            (clone / name).parent.mkdir(parents=True)
            (clone / name).write_text(f"x = '{clone.name}'\n")
        git("init", "-q", cwd=clone)
        git("add", ".", cwd=clone)
        git("commit", "-qm", clone.name, cwd=clone)
    commits = [git("rev-parse", "HEAD", cwd=clone) for clone in clones]
    monkeypatch.setattr(source, "PROJECT", clones[1])
    (clones[1] / "cleanrl_utils/__init__.py").write_text("x = 'changed'\n")

    script = clones[0] / "cleanrl/ppo.py"
    repository = source.Repository(script)
    assert repository.state == {"commit": commits[0], "dirty": False}
    assert repository.library == {"commit": commits[1], "dirty": True}
    assert source.keep(tmp_path, script, "A-v0", repository)["library"] == repository.library
    assert source.other_library(script) == clones[0]
    assert source.other_library(clones[0] / "my_ppo.py") == clones[0]

    own = clones[1] / "cleanrl/ppo.py"
    assert source.Repository(own).library == {} and source.other_library(own) is None
    copy = clones[1] / "my_ppo.py"  # in the root of the library's own checkout
    assert source.Repository(copy).library == {} and source.other_library(copy) is None
    assert source.other_library(tmp_path / "mine" / "ppo.py") is None


def test_without_git_the_commit_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CLEANRL_COMMIT", "abc")
    repository = source.Repository(tmp_path / "a.py")
    assert repository.state == {"commit": "abc", "dirty": False}
    assert not repository.has_script() and repository.diff() == b""


def test_a_killed_run_has_its_whole_record(tmp_path: Path) -> None:
    """Everything is there before the first step, however soon the process is gone."""
    program = f"""
import os, runpy, sys
from cleanrl_utils.running.run import Run
Run.log_episodes = lambda *_: os._exit(0)
sys.argv = ["cleanrl/ppo.py", *{SHORT.split()!r}]
runpy.run_path({str(ROOT / "cleanrl/ppo.py")!r}, run_name="__main__")
"""
    python(program, tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["versions"]["torch"] and record["code"] and record["hardware"]["cores"]


# -- TensorBoard -----------------------------------------------------------------------------------


def content(summary: Any) -> tuple:
    """The tag and the settings of a message; the bytes of a map may come in any order."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (value,) = summary.value
    return value.tag, HParamsPluginData.FromString(value.metadata.plugin_data.content)


def test_tensorboard_messages_are_those_of_its_own_functions() -> None:
    from tensorboard.plugins.hparams import summary_v2
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter

    settings = {"learning_rate": 1e-3, "seed": 1, "anneal_lr": True, "env_id": "CartPole-v1"}
    assert tensorboard.text_summary("a/b", "|é|") == text_pb("a/b", "|é|")
    wanted = summary_v2.hparams_pb(settings, start_time_secs=3.0)
    assert content(tensorboard.values_summary(settings, 3.0)) == content(wanted)
    parameters = [summary_v2.HParam(name) for name in settings]
    metrics = [summary_v2.Metric(tag) for tag in tensorboard.METRICS]
    wanted = summary_v2.hparams_config_pb(parameters, metrics)
    assert tensorboard.settings_summary(list(settings)) == wanted

    class Kept(list):
        write = list.append

    for message in (b"", b"a", os.urandom(1000)):
        kept = Kept()
        RecordWriter(kept).write(message)
        assert kept == [tensorboard.as_record(message)]


# -- memory ----------------------------------------------------------------------------------------


def test_the_peak_of_memory_is_that_of_the_process(tmp_path: Path) -> None:
    program = """
import numpy as np
from cleanrl_utils.running.machine import host_peak
before = host_peak()
x = np.ones(50_000_000)
del x
print(before, host_peak())
"""
    big = bytearray(700_000_000)  # of the process that starts it: must not count
    before, after = map(int, python(program, tmp_path).split())
    assert len(big) and before < 4e8 and 3.9e8 < after - before < 4.6e8


def test_a_run_says_its_peak_of_memory(train, capfd) -> None:
    done = train("ppo", SHORT)
    summary = json.loads((done.folder / "finished.json").read_text())
    assert 50 < summary["peak_memory_mb"] < 100_000 and "peak_gpu_memory_mb" not in summary
    assert f"; peak memory {summary['peak_memory_mb']:,} MB; metrics in" in capfd.readouterr().err


def test_a_run_under_a_profiler_is_that_of_its_script(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "cProfile", "-o", "profile", f"{ROOT}/cleanrl/ppo.py"]
    subprocess.run([*words, *SHORT.split()], cwd=tmp_path, check=True, timeout=300)
    (folder,) = tmp_path.glob("runs/*")
    record = json.loads((folder / "run.json").read_text())
    assert folder.name.startswith("CartPole-v1__ppo__1__") and record["script"] == "ppo"
    assert (folder / "ppo.py").read_bytes() == (ROOT / "cleanrl/ppo.py").read_bytes()
    assert record["code"] == source.code_of(ROOT / "cleanrl/ppo.py", "CartPole-v1")


def test_a_script_that_is_pasted_into_a_session_is_one_line(tmp_path: Path) -> None:
    paste = f"exec(open({str(ROOT / 'cleanrl/ppo.py')!r}).read())"
    command = [sys.executable, "-c", paste, *SHORT.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Args is in no file") and "%run" in line


def test_settings_made_in_python_have_the_name_of_their_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ppo.Args(cuda=False)
    assert ppo.Run(args, ppo.make_env).name.startswith("CartPole-v1__ppo__1__")
    assert args.exp_name == "ppo"


# -- Ctrl+C ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="Python ends by SIGINT, which a shell calls 130")
@pytest.mark.parametrize(
    "command, module",
    [
        ("-m cleanrl_utils.enjoy", "tyro"),
        ("-m cleanrl_utils.results show runs", "pandas"),
        (f"{ROOT}/cleanrl/ppo.py --env-id interrupted:X-v0", "interrupted"),
    ],
)
def test_ctrl_c_during_imports_is_one_line(command: str, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, *command.split()]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.stderr == "\ninterrupted\n"
    assert done.returncode == -signal.SIGINT
