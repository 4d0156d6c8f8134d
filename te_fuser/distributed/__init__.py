"""Groups of ranks: their exchanges, what each rank has of a value, and how they agree on what to run."""
