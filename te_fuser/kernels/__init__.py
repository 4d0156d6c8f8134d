"""Kernels that ops and fusions run on, with their checks: thin fronts, no planning."""
