"""Sharding: how the ranks of a group run ops, a rule by kind of op; each file ends with its rows of the table."""

from te_fuser.sharding import attention, rules

__all__ = ["attention", "rules"]
