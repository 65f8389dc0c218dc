"""Short import path of the maker of environments: see cleanrl_utils/environments/making.py."""

from cleanrl_utils.environments.making import *  # noqa: F403
