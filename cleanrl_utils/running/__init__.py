"""A run during training: settings, folder, metrics, checkpoints, random streams, evaluation."""
