"""Making environments of every family, and the wrappers that Gymnasium lacks."""
