"""Mistakes of a training loop, in the words of its script."""

from __future__ import annotations

MIXED = (
    "a model's gradients changed between two passes of a step, outside of its micro_batch(), and the step would hold "
    "the change: clip them in a step's last pass only. Where another model's loss or an attack on the batch reaches "
    "its parameters, call requires_grad_(False) on these around that pass, as for a GAN's critic"
)

ZEROED = (
    "the gradients of pass {} of {} of a step are gone before pass {}: the loop calls model.zero_grad(), or sets them "
    "to None, in every pass. Call optimizer.zero_grad() instead"
)

LEFT_OUT = (
    "rank %d left out a pass: the loop's body ended without a backward pass in job.micro_batch(). Every rank has to "
    "make every pass, or ranks wait for one another without end. Leave a batch out by job.skip() instead of "
    "job.backward(loss)"
)

EARLY_STEP = (
    "optimizer.step() was called in pass {} of {} of a step, whose gradients the ranks have not averaged yet. Put it "
    "under `if job.sync_gradients:`, with scheduler.step() and optimizer.zero_grad()"
)

STEP_WITHOUT_PASS = (
    "optimizer.step() was called in a step whose last pass this loop left out: the ranks have not averaged its "
    "gradients. Leave a batch out by job.skip() instead of job.backward(loss)"
)

IDLE = (
    "a whole pass through the data made no step of the optimizer that `attach` got. Epochs and checkpoints follow its "
    "steps, so this loop would never end. Call optimizer.step() under `if job.sync_gradients:`. To train on with a new "
    "optimizer, call job.close(), pollux.attach(model, optimizer) and job.loader(...) again"
)

READ_AHEAD = (
    "the loop asked for a batch before it used the one before: a prefetcher around job.loader? Steps would be made of "
    "the wrong passes, and a restart would lose batches. Iterate over job.loader itself, with num_workers=, "
    "pin_memory=True and x.to(job.device, non_blocking=True)"
)
"""Warned of where the first pass of a loop is left out; refused where it is certain."""

IDLE_PASSES = 3
"""Passes without a step after which the loop ends. A script may accumulate over more than one."""

CALLED_PER_PASS = (
    "scheduler.step() was called {} times in one optimizer step: the schedule would run so many times too fast. Call "
    "it once, under `if job.sync_gradients:`. job.step(...) calls it, too"
)

UNUSED_PARAMETERS = (
    "%d of %d parameters that require a gradient (%s first) had none in a step: with several GPUs such a step fails. "
    'Give attach(..., ddp_kwargs={"find_unused_parameters": True}), or freeze them by requires_grad_(False)'
)

UNUSED = (
    "a pass did not use all parameters that require a gradient, and the ranks wait for the gradients of all. Give "
    'attach(..., ddp_kwargs={"find_unused_parameters": True}), or freeze the others by requires_grad_(False)'
)
"""Where torch says that a reduction has not finished."""

WAITS = (
    "rank %d has waited for %.0f s outside of the loop over the loader. If the other ranks are still in that loop, "
    "this rank has left it alone: every rank has to leave it after the same step"
)

BEHIND = "no step for %.0f s: the other ranks wait for %s%s"
SILENT = (
    ". A rank that says nothing is stopped (SIGSTOP, a debugger), or its node is lost: `ps -o pid,stat,wchan` there "
    "shows its state"
)

GATHERS = (
    "the loss gathers features of all ranks, and the ranks have different numbers of samples at the end of a pass: the "
    "gathering fails there, or is wrong. Give job.loader(..., equal_parts=True), or drop_last=True"
)

UNEVEN = (
    "a pass failed in which the ranks have different numbers of samples (%d on rank %d, of %d over all ranks). If the "
    "script gathers something of all ranks in it, give job.loader(..., equal_parts=True), or drop_last=True"
)

NO_FUNCTION = (
    "expected job.step(lambda: loss_fn(job.model(x), y)), a function that makes the forward pass and returns the loss; "
    "got {}"
)

STEPS_IN_BACKWARD = (
    "the model's parameters changed within a pass. If an optimizer steps in hooks of the backward pass, it takes a "
    "step in each pass, of gradients that the ranks have not averaged: make one optimizer, and let job.step(...) step "
    "it"
)
"""Warned of in the first pass."""

NO_LOSS = (
    "expected the function of job.step(...) to return one number as a tensor, the mean loss of its examples, got {}: "
    "keep other values in a variable of the script (nonlocal), and average a loss per example"
)

OWN_BACKWARD = (
    "the loss that job.step(...) got has no graph any more: its function called loss.backward(). Return the loss, "
    "job.step makes the backward pass"
)

NESTED = "job.epochs() was called inside the loop of another job.epochs(). Make one loop over the epochs"

NOT_SHARDED = (
    "job.skip() was called for a model under fully_shard, whose ranks gather it in each pass. Leave examples out of "
    "the mean loss instead, on the ranks that have them"
)

OWN_EPOCHS = (
    "this loop is not one over job.epochs: after a restart its epochs begin again, and the job cannot be resized in "
    "place. Write `for epoch in job.epochs(N):`"
)

OWN_PASSES = (
    "this loop makes its backward passes itself, neither by job.step nor in job.micro_batch(): a step then has one "
    "pass, and on one GPU the agent cannot measure the noise scale, and keeps the batch size. Write "
    "loss = job.step(lambda: loss_fn(job.model(x), y))"
)
"""Of an adaptive training; warned of once."""

ATTACHED = (
    "this optimizer was attached before, and that job is still open: both would step and scale it. Keep the job of the "
    "first attach, or call its close() before; give a further model to job.add_model(...)"
)
