"""Ways to start the processes of a job, one file per engine."""
