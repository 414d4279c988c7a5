"""Checkpoints: written, validated, chosen and restored."""
