"""Searches over hyper-parameters: Optuna's study in a file, and the tasks of an array that work on it."""
