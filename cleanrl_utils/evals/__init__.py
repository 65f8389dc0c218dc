"""Evaluation by its original import paths; cleanrl_utils.evaluate serves every script."""
