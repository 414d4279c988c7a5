"""The settings, and the file that they are read from."""
