"""Starting many runs: here, on Ray, Slurm or AWS Batch."""
