"""Optimizer families: how the agent recognises an optimizer, and what it reads of its state."""
