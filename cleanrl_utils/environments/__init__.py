"""Environments of every family, vector environments, and wrappers that Gymnasium lacks."""
