"""Short import path of evaluation: see cleanrl_utils/running/evaluation.py."""

from cleanrl_utils.running.evaluation import *  # noqa: F403
