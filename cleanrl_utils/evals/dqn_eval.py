"""`evaluate` of DQN models, by the path it always had."""

from cleanrl_utils.running.evaluation import evaluate

__all__ = ["evaluate"]
