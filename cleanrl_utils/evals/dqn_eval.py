"""`evaluate` of DQN models, at its original import path."""

from cleanrl_utils.running.evaluation import evaluate

__all__ = ["evaluate"]
