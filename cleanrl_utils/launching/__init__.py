"""Start many runs: on this machine, on Ray, Slurm or AWS Batch."""
