"""Original import path of the Atari wrappers: see cleanrl_utils/environments/atari_wrappers.py."""

from cleanrl_utils.environments.atari_wrappers import *  # noqa: F403
