"""The batch size: measured step times, fits of earlier runs, and the choice."""
