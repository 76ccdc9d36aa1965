"""Pictures made from results, and from nothing else."""
