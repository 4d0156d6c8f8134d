"""Attention and the ops of heads around it."""
