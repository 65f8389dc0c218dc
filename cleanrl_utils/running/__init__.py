"""A run while it trains: its settings, folder, metrics, checkpoints, random streams, evaluation."""
