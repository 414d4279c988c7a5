"""Resizing a running job in place."""
