"""Applying a plan: the move state machine.

    planned -> draining -> checkpointed -> requeued -> configured -> started -> training
                                              `-> parked            (from anywhere: -> failed)

`paths` chooses the way that a job takes: through the queue, as above, or within its allocation (`resizing`, which has
fewer steps). `intents` turns a plan into moves, `machine` says what the next action of a move is (pure), `capacity`
keeps every intermediate state within the cluster, `companions` puts jobs that lend nodes to others where they belong,
`reconciler` carries the actions out: intent first, then Slurm, then confirm.

In this room, `clock` gives POSIX time [s], and `monotonic` seconds that only go forward, whatever is done to the clock.
`authorize` is called before each call to Slurm and each write; it returns the epoch, or raises LeaderLost once this
process may no longer act.
"""
