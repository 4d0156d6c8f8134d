"""Ways to run attention, one file for each provider."""
