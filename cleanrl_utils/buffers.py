"""The original import path of the replay buffers: see cleanrl_utils/replay/buffers.py."""

from cleanrl_utils.replay.buffers import *  # noqa: F403
