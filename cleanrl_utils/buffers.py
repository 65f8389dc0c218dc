"""Replay memory under the name that people know: see cleanrl_utils/replay/buffers.py."""

from cleanrl_utils.replay.buffers import *  # noqa: F403
