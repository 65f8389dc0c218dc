"""The original import paths of evaluation, which is cleanrl_utils.running.evaluation."""
