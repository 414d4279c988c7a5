"""Steps and step times, read off the lines of trainers."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest

from pollux.wrap.steps import LONGEST, MOST_LINES, Steps
from pollux.wrap.trainers import PATTERNS, TRAINERS

# One line of each trainer as it prints it.
LINES = {
    "torchtitan": "\x1b[31mstep: 1,230  \x1b[32mloss:  4.0123  \x1b[33mmemory: 30.1GiB  \x1b[34mtps: 7,412\x1b[39m",
    "Megatron-LM, NeMo": " [2026-01-02 10:00:00] iteration     1230/  500000 | consumed samples: 314880 | elapsed time "
    "per iteration (ms): 512.3 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: 4.0E+00 |",
    "nanoGPT": "iter 1230: loss 3.4123, time 312.11ms, mfu 12.34%",
    "Hugging Face Trainer": "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 4.5e-05, 'epoch': 0.53}",
    "Lightning": "Epoch 1230:  50%|#####     | 5/10 [00:00<00:00, 16.52it/s, v_num=0, loss=0.4]",
    "verl": "step:1230 - actor/entropy:0.512 - critic/score/mean:0.23",
    "DeepSpeed": "[2026-01-02 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=1230, skipped=0, lr=[0.001], "
    "mom=[(0.9, 0.999)]",
    "accelerate": "Steps:  12%|\u2588\u258f        | 1230/10000 [07:10<51:10,  2.86it/s, lr=0.0001, step_loss=0.123]",
    "any other": "Step 1230: loss 0.4",
}


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.name)
def test_each_trainers_line_is_read_by_its_own_pattern(trainer):
    steps = Steps(PATTERNS)
    steps.feed(0, (LINES[trainer.name] + "\n").encode(), 1.0)
    by_epoch = {"Hugging Face Trainer": 0.53, "Lightning": 1230.5}
    assert steps.number == pytest.approx(by_epoch.get(trainer.name, 1230))
    assert steps.first_at == 1.0


def test_a_bar_of_the_other_kind_is_read_too():
    steps = Steps(PATTERNS)
    steps.feed(0, "Epoch 2/9  \u2501\u2501\u2501 5/20 0:00:01 \u2022 0:00:00 16.23it/s \r".encode(), 1.0)
    steps.feed(0, b"Epoch 2/9 0/0 \rEpoch 3: 10/0 x\r", 2.0)
    assert steps.number == 2.25


def test_the_median_of_step_times_leaves_out_the_start_checkpoints_and_evaluations():
    steps, now = Steps(PATTERNS), 0.0
    for step in range(0, 200, 10):
        now += 30.0 if step in (10, 20, 100) else 5.0
        steps.feed(0, f"step {step}: loss 1\n".encode(), now)
    assert steps.seconds == pytest.approx(0.5)


def test_lines_may_come_in_pieces_on_both_streams_and_end_in_carriage_returns():
    steps = Steps(PATTERNS)
    for piece in (b"st", b"ep 7: lo", b"ss 1\rst"):
        steps.feed(0, piece, 1.0)
        steps.feed(1, b"Traceback\n", 1.0)
    assert steps.number == 7
    assert steps.last_line == "Traceback"


def test_numbers_that_leap_or_fall_back_are_no_progress():
    steps = Steps(PATTERNS)
    for step in range(1, 20):
        steps.feed(0, f"step {step}: x\n".encode(), float(step))
    steps.feed(0, b"step 1000000000: x\n", 20.0)
    assert steps.number == 19
    steps.feed(0, b"step 1000000001: x\n", 21.0)
    assert steps.number == 20
    for line in (b"step nan: x\n", b"step " + b"9" * 400 + b": x\n", b"step : x\n"):
        steps.feed(0, line, 22.0)
    assert steps.number < 1e6


def test_the_work_for_a_line_without_end_is_bounded():
    """By a count: what is kept of a line never grows."""
    steps = Steps([re.compile(r"step (\d+)")])
    for _ in range(160):
        steps.feed(0, b"x" * 65536, time.time())
        assert len(steps.tails[0]) <= LONGEST
    steps.feed(0, b"\nstep 3\n", 1.0)
    assert steps.number == 3


def test_a_flood_of_lines_costs_a_bounded_number_of_looks():
    """The newest lines of a read are looked at, and nothing of a blank one; bytes that are no text are passed over."""
    looks = []
    steps = Steps([SimpleNamespace(pattern="any", search=looks.append)])
    steps.feed(0, b"\n" * 65536 + b"x\n" * 32768 + b"step 3: x\n", 1.0)
    assert (len(looks), looks[-1]) == (MOST_LINES, "step 3: x")
    steps = Steps(PATTERNS)
    steps.feed(0, bytes(range(256)) * 100 + b"\nstep 4: x\n\xff\xfe\x00\n", 1.0)
    assert steps.number == 4


def test_a_clock_that_is_set_back_costs_one_interval():
    steps = Steps(PATTERNS)
    now = fed(steps, range(1, 4), 7200.0, 1.0)
    fed(steps, range(4, 10), now - 3600.0, 2.0)
    assert steps.seconds == pytest.approx(2.0)


def test_a_pattern_of_ones_own_is_taken_alone():
    steps = Steps([re.compile(r"batch=(\d+)")])
    steps.feed(0, b"step 5: x\nbatch=9\n", 1.0)
    assert steps.number == 9
    odd = Steps([re.compile(r"(\S+)(?:/(?P<of>\S+))?(?P<done>!)?")])
    odd.feed(0, b"5/7\nnan\ninf\n1e999\n-3\n", 1.0)
    assert odd.first_at is None, "groups that make no part, and what is no number, name no step"


def test_step_times_are_measured_again_where_a_step_became_another_one():
    steps = Steps(PATTERNS)
    for step in range(20):
        steps.feed(0, f"step {step}: x\n".encode(), float(step))
    steps.forget_times()
    assert steps.seconds is None
    for step in range(20, 23):
        steps.feed(0, f"step {step}: x\n".encode(), 20.0 + 3.0 * (step - 19))
    assert steps.seconds == pytest.approx(3.0)
    assert steps.number == 22


@pytest.mark.parametrize(
    "line",
    [
        '{"loss": 0.4, "step": 1230}',
        "{'global_step': 1230}",
        "[2026-01-02 10:00:00] INFO train.py:33 step 1,230 | loss 0.4",
        "train_step=1230 lr=0.1",
        " 12%|\u258f  | 1230/10000 [07:10<51:10,  2.86it/s]",
    ],
)
def test_other_forms_of_lines_are_read(line):
    steps = Steps(PATTERNS)
    steps.feed(0, f"{line}\r".encode(), 1.0)
    assert steps.number == 1230


@pytest.mark.parametrize(
    "line",
    [
        "  Total optimization steps = 378",
        "eval step 5/20",
        "save_every_step: 50",
        "lr step 0.01",
        "seconds per step 12",
        "Evaluating:  50%|\u2588 | 5/10 [00:01<00:01, 2.0it/s]",
        "Map (num_proc=4):  10%|\u2588 | 100/1000 [00:00<00:01, 9.0 examples/s]",
        "Loading checkpoint shards: 100%|\u2588| 2/2 [00:01<00:00, 2.0it/s]",
    ],
)
def test_lines_of_other_things_name_no_step(line):
    steps = Steps(PATTERNS)
    steps.feed(0, f"{line}\n".encode(), 1.0)
    assert steps.first_at is None


LINE = next(trainer.line for trainer in TRAINERS if trainer.name == "any other")


def fed(steps, numbers, now, each):
    for number in numbers:
        now += each
        steps.feed(0, f"step {number}: x\n".encode(), now)
    return now


def test_an_evaluation_that_counts_its_own_steps_is_no_progress_and_moves_no_time():
    steps = Steps(PATTERNS)
    now = fed(steps, range(1, 101), 0.0, 1.0)
    for begin in range(100, 400, 100):
        now = fed(steps, range(1, 60), now, 0.1)
        now = fed(steps, range(begin + 1, begin + 101), now, 1.0)
    assert steps.number == 400
    assert steps.seconds == pytest.approx(1.0)


@pytest.mark.parametrize("first", [0, 1])
def test_a_count_that_begins_again_with_each_epoch_goes_on(first):
    steps, now = Steps(PATTERNS), 0.0
    for epoch, length in enumerate((100, 103, 98, 100)):
        now = fed(steps, range(first, first + length), now, 1.0)
        assert steps.number == sum((100, 103, 98, 100)[: epoch + 1]) - 1 + first
    assert steps.seconds == pytest.approx(1.0)
    late = Steps(PATTERNS)
    now = fed(late, [99, 100], 0.0, 1.0)
    fed(late, range(1, 50), now, 3.0)
    assert late.seconds == pytest.approx(3.0), "its first epoch was too short to be measured"


def test_lines_that_were_kept_back_share_the_time_until_the_next_ones():
    steps = Steps(PATTERNS)
    for burst in range(8):
        lines = "".join(f"step {40 * burst + n}: x\n" for n in range(40))
        steps.feed(0, lines.encode(), 20.0 * burst)
    assert steps.seconds == pytest.approx(0.5)
    assert steps.number == 319


def test_a_better_line_takes_over_and_counts_in_its_own_unit():
    bar, told = b" 12%|# | 300/1000 [07:10<51:10]\r", b"{'loss': 1.0, 'epoch': 0.53}\n"
    steps = Steps(PATTERNS)
    steps.feed(0, bar, 1.0)
    steps.feed(0, told + bar, 2.0)
    assert steps.number == 0.53
    again = Steps(PATTERNS, steps.line)
    again.feed(0, bar, 1.0)
    assert again.first_at is None, "what was measured before is in the other unit"
    assert Steps(PATTERNS, "no pattern").feed(0, bar, 1.0) is None


LOOPS = {
    "steps of an epoch": ("Epoch [{epoch}/9], Step [{step}/600], Loss: 0.4123\n", 600),
    "a bar for each epoch": ("Train, pass {epoch}:  12%|# | {step}/250 [07:10<51:10,  2.86it/s]\r", 250),
    "phases": (
        "DLL 2026-01-02 10:00:00 - Training Epoch: 0 Training Iteration: {step}  average_loss : 11.2\n",
        7038,
    ),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_of_epochs_and_phases_are_added_over_starts(loop):
    """As such trainers print them; the second start goes on in the middle of an epoch, or counts from 0."""
    line, length = LOOPS[loop]

    def train(steps, epoch, begin, end, now):
        for step in range(begin, end + 1, 10):
            now += 1.0
            steps.feed(0, line.format(epoch=epoch, step=step).encode(), now)
        return now

    steps = Steps(PATTERNS)
    now = train(steps, 1, 10, length, 0.0)
    train(steps, 2, 10, length // 2, now)
    made = length // 10 * 10 + length // 20 * 10
    assert steps.number == made
    for begin in (length // 2 + 10, 10):
        again = Steps(PATTERNS, steps.line, steps.number)
        now = train(again, 2, begin, begin, now)
        assert again.number == made, "its first line may stand for any number of steps"
        train(again, 2, begin + 10, length, now)
        assert again.number >= made + (length - begin) // 10 * 10


def test_a_number_that_is_printed_before_the_checkpoint_is_read_is_none():
    """DeepSpeed prints step 0 as it is set up."""
    line = "[INFO] [logging.py:123:log_dist] [Rank 0] step={}, skipped=0, lr=[0.05], mom=[(0.9, 0.999)]\n"
    steps = Steps(PATTERNS)
    steps.feed(0, line.format(0).encode(), 1.0)
    again = Steps(PATTERNS, steps.line, 40.0)
    for step, number in ((0, 40), (41, 41), (42, 42), (43, 43), (44, 44), (45, 45)):
        again.feed(0, line.format(step).encode(), 2.0 + step)
        assert again.number == number
    assert again.seconds == 1.0


def test_a_trainer_that_goes_back_to_a_checkpoint_counts_its_steps_once():
    steps = Steps(PATTERNS, LINE, 500.0)
    assert steps.number == 500, "before its first line"
    now = fed(steps, range(421, 560), 0.0, 1.0)
    assert steps.number == 559
    now = fed(steps, range(501, 600), now, 1.0)
    assert steps.number == 599, "it has gone back by itself"
    assert steps.seconds == pytest.approx(1.0)


def test_ranks_that_print_each_theirs_in_any_order_count_once():
    steps, now = Steps(PATTERNS), 0.0
    for step in range(1, 400):
        now += 1.0
        for rank in (0, 1, 2, 3):
            own = max(step - (rank * step % 3 == 2), 1)
            steps.feed(rank % 2, f"[rank{rank}] step {own}: x\n".encode(), now + 0.01 * rank)
    assert steps.number == pytest.approx(399, abs=2)
    assert steps.seconds == pytest.approx(1.0, rel=0.05)


def test_an_evaluation_longer_than_the_training_so_far_is_left_out_after_the_next_one():
    steps, now = Steps(PATTERNS), 0.0
    for begin in range(0, 500, 50):
        now = fed(steps, range(begin + 1, begin + 51), now, 1.0)
        now = fed(steps, range(1, 131), now, 0.1)
    fed(steps, range(501, 502), now, 1.0)
    assert steps.number == 501
