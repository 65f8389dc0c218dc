"""Help texts: one per flag and meaning. Ranges: beside the settings, also in a copied script."""

import ast
import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from conftest import ROOT

from cleanrl_utils.pages.scripts import Script, read_scripts, shared_flags
from cleanrl_utils.running.evaluation import import_script
from cleanrl_utils.running.settings import parse_args

# Flags whose meaning depends on the script: (flag, help text, patterns of the scripts' names). All
# other scripts that have the flag share one text.
OTHER_MEANINGS = [
    ("env_id", "id of the game, one of EnvPool's Atari games", "ppo_*envpool* pqn_*envpool*"),
    (
        "env_id",
        "id of the game, one of PettingZoo's Atari games; your own as module:name",
        "ppo_pettingzoo_ma_atari",
    ),
    (
        "env_id",
        "game of Procgen, with easy levels; others by EnvPool's id, e.g. StarpilotHard-v0",
        "*_procgen",
    ),
    (
        "env_id",
        "name of the task: Isaac Gym's, or Brax's where Isaac Gym is not installed",
        "*_isaacgym",
    ),
    (
        "env_id",
        "name of the environment: Brax's (ant, humanoid, ...) or MuJoCo Playground's"
        " (playground/CheetahRun, ...)",
        "*_brax_jax fast_td3*",
    ),
    ("env_id", "id of the environment, one of gymnax's with discrete actions", "ppo_jax pqn_jax"),
    ("total_timesteps", "number of steps, counted per player", "ppo_pettingzoo_ma_atari"),
    (
        "total_timesteps",
        "number of environment steps per agent",
        "ppo_jax pqn_jax *_brax_jax fast_td3*",
    ),
    (
        "total_timesteps",
        "number of environment steps of the student, after those of the teacher and the offline"
        " phase",
        "qdagger_*",
    ),
    ("learning_rate", "learning rate of RAdam", "pqn*"),
    ("learning_rate", "learning rate of AdamW", "fast_td3*"),
    (
        "policy_frequency",
        "update the policy every this many gradient steps of the critics",
        "fast_td3*",
    ),
    (
        "num_envs",
        "number of players; a game of two players counts twice",
        "ppo_pettingzoo_ma_atari",
    ),
    (
        "num_envs",
        "number of parallel environments per agent",
        "ppo_jax pqn_jax *_brax_jax fast_td3*",
    ),
    (
        "num_envs",
        "number of parallel environments; other settings count steps summed over environments",
        "dqn* c51* rainbow_* sac_* td3_* ddpg_* qdagger_* tqc_* simbav2_* crossq_* droq_*",
    ),
    (
        "backend",
        "physics of Brax: spring (fastest), positional, generalized or mjx",
        "*_brax_jax fast_td3*",
    ),
    (
        "buffer_size",
        "number of transitions in the replay memory; 1,000,000 take 6.6 GiB",
        "dqn_atari* c51_atari* rainbow_atari sac_atari qdagger_*",
    ),
    (
        "learning_starts",
        "number of steps with random actions before the first gradient step",
        "sac_* td3_* ddpg_* tqc_* simbav2_* crossq_* droq_*",
    ),
    (
        "learning_starts",
        "number of steps of the online phase before its first gradient step",
        "qdagger_*",
    ),
    (
        "policy_frequency",
        "update the policy every this many steps, as many times (TD3's delay, compensated)",
        "sac_* droq_*",
    ),
    ("alpha", "initial entropy coefficient (temperature); --no-autotune keeps it", "simbav2_*"),
    (
        "final_lr",
        "final learning rate of Adam, reached linearly from --learning-rate",
        "simbav2_*",
    ),
    ("policy_frequency", "update the policy every this many steps", "crossq_*"),
    (
        "critic_width",
        "width of a critic's first layer; the next two have a half and a quarter of it",
        "fast_td3_*",
    ),
    ("policy_lr", "learning rate of the policy and the entropy coefficient", "sac_atari"),
    ("q_lr", "learning rate of the critics", "sac_atari"),
    (
        "teacher_model",
        "model file of the teacher, trained with dqn_atari_jax.py or this script",
        "qdagger_*_jax_*",
    ),
]

SETTING = '    gamma: Share = 0.99\n    """discount factor"""\n'
SHIFTED = SETTING + '    reward_shift: float = -1.0\n    """added to every reward"""\n'
UNLIMITED = SETTING.replace("Share", "float")
SHORT = ["--total-timesteps", "512", "--no-cuda", "--checkpoints", "0"]


def help_texts() -> list[tuple[str, str, str]]:
    """(flag, help text, script or class of shared settings) of every flag."""
    scripts = list(read_scripts().values())
    for path in sorted((ROOT / "docs" / "examples").glob("*.py")):
        scripts.append(Script(path.stem, path.read_text()))
    texts = [(flag.field, flag.help, script.name) for script in scripts for flag in script.flags]
    for name, flags in shared_flags().items():
        texts += [(flag.field, flag.help, name) for flag in flags]
    return texts


def other_meaning(flag: str, script: str) -> str | None:
    """The text that OTHER_MEANINGS has for this flag of this script."""
    for name, text, patterns in OTHER_MEANINGS:
        if name == flag and any(fnmatch(script, pattern) for pattern in patterns.split()):
            return text
    return None


def test_a_flag_has_one_help_text_per_meaning() -> None:
    common: dict[str, dict[str, list[str]]] = {}
    for flag, text, script in help_texts():
        assert text, f"{script}: --{flag} has no help text"
        other = other_meaning(flag, script)
        if other is None:
            common.setdefault(flag, {}).setdefault(text, []).append(script)
        else:
            assert text == other, f"{script}: --{flag} differs from OTHER_MEANINGS"
    several = {flag: texts for flag, texts in common.items() if len(texts) > 1}
    assert not several, "use one text, or add the other meaning to OTHER_MEANINGS"


def test_every_class_of_shared_flags_has_a_title() -> None:
    for path in sorted((ROOT / "cleanrl_utils" / "running").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name in shared_flags():
                title = ast.get_docstring(node)  # --help prints it above the flags
                assert title and "\n" not in title, f"{node.name} needs a title as its docstring"


@pytest.mark.parametrize("flag, text, patterns", OTHER_MEANINGS)
def test_every_other_meaning_is_in_use(flag: str, text: str, patterns: str) -> None:
    found = {script for name, used, script in help_texts() if (name, used) == (flag, text)}
    for pattern in patterns.split():
        assert any(fnmatch(script, pattern) for script in found), f"no {pattern} has this text"


def copy_script(folder: Path, setting: str) -> Path:
    """ppo.py under another name, as a user copies it, with another setting in place of gamma."""
    source = (ROOT / "cleanrl" / "ppo.py").read_text()
    assert source.count(SETTING) == 1
    path = folder / "my_ppo.py"
    path.write_text(source.replace(SETTING, setting))
    return path


def run(path: Path, *flags: str) -> subprocess.CompletedProcess:
    words = [sys.executable, str(path), *SHORT, *flags]
    return subprocess.run(words, cwd=path.parent, capture_output=True, text=True)


def test_a_copied_script_may_have_a_negative_setting(tmp_path: Path) -> None:
    path = copy_script(tmp_path, SHIFTED)
    for flags, value in (([], -1.0), (["--reward-shift", "-2.5", "--seed", "2"], -2.5)):
        done = run(path, *flags)
        assert done.returncode == 0, done.stderr
        seed = 2 if flags else 1
        (record,) = tmp_path.glob(f"runs/CartPole-v1__my_ppo__{seed}__*/run.json")
        assert json.loads(record.read_text())["args"]["reward_shift"] == value


def test_a_copied_script_refuses_what_is_out_of_range(tmp_path: Path) -> None:
    done = run(copy_script(tmp_path, SHIFTED), "--gamma", "2")
    assert done.returncode == 2
    assert done.stderr == "error: --gamma must be from 0 to 1, got 2.0\n"
    assert not (tmp_path / "runs").exists()


def test_a_range_comes_from_the_setting_not_from_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_ppo", None)  # so that the import below is undone
    module = import_script("my_ppo", copy_script(tmp_path, UNLIMITED))
    assert parse_args(module.Args, ["--gamma", "2"]).gamma == 2
    with pytest.raises(SystemExit) as stop:
        parse_args(module.Args, ["--gamma", "nan"])
    assert stop.value.code == 2
