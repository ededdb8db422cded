"""Effects of the job history: its files, Slurm's commands, queries over HTTP."""
