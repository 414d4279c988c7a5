"""Solvers kept for comparison only; the daemon never runs them."""
