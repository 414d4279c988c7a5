"""Applying a plan: the re-allocation state machine.

    planned -> draining -> checkpointed -> requeued -> configured -> started -> training
                                              `-> parked            (from anywhere: -> failed)

`intents` turns a plan into moves, `machine` says what the next action of a move is (pure), `capacity` keeps every
intermediate state within the cluster, `reconciler` carries the actions out: intent first, then Slurm, then confirm.
"""
