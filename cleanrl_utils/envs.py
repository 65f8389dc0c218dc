"""Making environments under its short name: see cleanrl_utils/environments/making.py."""

from cleanrl_utils.environments.making import *  # noqa: F403
