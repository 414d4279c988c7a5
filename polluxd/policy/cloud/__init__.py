"""Nodes that are powered down, or rented."""
