"""`evaluate` of C51 models in JAX, by the path it always had."""

from cleanrl_utils.evaluate import evaluate

__all__ = ["evaluate"]
