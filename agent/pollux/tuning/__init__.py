"""The batch size: measured step times, earlier fits, and the choice."""
