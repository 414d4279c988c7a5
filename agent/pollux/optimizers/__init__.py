"""Optimizer families: recognise an optimizer and read its state."""
