"""Evaluation by its original import paths; cleanrl_utils.running.evaluation serves every script."""
