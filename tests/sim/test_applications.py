"""Applications: interpolation by the artifact's rules, and parametric."""

from __future__ import annotations

import pytest

from polluxd.sim.applications import BUILT_IN, placement_of, split_batch
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import TraceError

PLACEMENTS = """placement,local_bsz,step_time,sync_time
1,8,1.0,0.0
1,16,2.0,0.0
12,8,1.4,0.4
12,16,2.6,0.6
2,8,1.2,0.2
2,16,2.2,0.2
"""
SCALABILITY = """num_nodes,num_replicas,local_bsz,step_time,sync_time
16,16,8,3.0,2.0
16,16,16,4.0,2.0
16,64,8,5.0,4.0
16,64,16,6.0,4.0
"""
VALIDATION = "progress,iteration,metric,grad_sqr,grad_var\n10,10,1,2.0,{}\n25,20,2,1.0,8\n"


@pytest.fixture
def profile(tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "placements.csv").write_text(PLACEMENTS)
    (folder / "scalability.csv").write_text(SCALABILITY)
    (folder / "validation-16.csv").write_text(VALIDATION.format(2))
    (folder / "validation-64.csv").write_text(VALIDATION.format(6))
    return folder


def test_a_measured_placement_is_linear_in_the_local_batch(profile):
    app = load_profiles(profile.parent)["toy"]
    assert app.times((1,), 12) == pytest.approx((1.5, 0.0))


def test_the_smallest_rotation_of_a_placement_is_looked_up(profile):
    app = load_profiles(profile.parent)["toy"]
    assert app.times((2, 1), 8) == app.times((1, 2), 8) == pytest.approx((1.4, 0.4))


def test_unmeasured_placements_are_interpolated_over_nodes_gpus_and_batch(profile):
    app = load_profiles(profile.parent)["toy"]
    step, sync = app.times((3,) * 10, 12)
    assert 1.5 < step < 6.0
    assert 0.2 < sync < 4.0


def test_beyond_what_was_measured_times_stay_sane(profile):
    app = load_profiles(profile.parent)["toy"]
    assert app.times((1,), 32)[0] == pytest.approx(4.0)
    step, sync = app.times((4,) * 16, 32)
    assert step > sync > 0


def test_gradient_statistics_are_linear_between_validated_batch_sizes(profile):
    app = load_profiles(profile.parent)["toy"]
    assert app.noise(40, 0).var == pytest.approx(4.0)
    assert app.noise(16, 0).var == 2.0
    assert (app.limits.initial, app.limits.maximum) == (16, 64)
    assert (app.limits.local_min, app.limits.local_max) == (8, 16)
    assert (app.epochs, app.progress(2)) == (2, 25.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements.csv", "placement,local_bsz\n1,8\n", "line 1: no column step_time or sync_time"),
        (
            "placements.csv",
            "placement,local_bsz,step_time,sync_time\n1,8,-1,0\n",
            "line 2: step_time is '-1'",
        ),
        ("placements.csv", "placement,local_bsz,step_time,sync_time\n", "no measurement"),
        (
            "validation-16.csv",
            "progress,iteration,metric,grad_sqr,grad_var\n1,1,1,nan,1\n",
            "line 2: grad_sqr",
        ),
    ],
)
def test_a_faulty_profile_is_named_by_file_and_line(profile, name, text, message):
    (profile / name).write_text(text)
    with pytest.raises(TraceError, match=message) as raised:
        load_profiles(profile.parent)
    assert name in str(raised.value)


def test_a_folder_without_profiles_says_what_it_expects(tmp_path):
    with pytest.raises(TraceError, match=r"no APPLICATION/placements\.csv"):
        load_profiles(tmp_path)


def test_batches_are_split_among_gpus_and_passes():
    limits = BUILT_IN["vision-small"].limits
    assert split_batch(4096, 1, limits) == (1024, 3)
    assert split_batch(512, 1, limits) == (256, 1), "one GPU beyond M0 accumulates"
    assert split_batch(512, 4, limits) == (128, 0)
    assert placement_of(10, 4) == (4, 4, 2)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_parametric_applications_scale_and_end(name):
    app = BUILT_IN[name]
    first, last = app.noise(app.limits.initial, 0), app.noise(app.limits.initial, app.epochs - 1)
    assert last.phi(app.limits.initial) > first.phi(app.limits.initial)
    assert app.progress(app.epochs) > 0
    # Larger batches take fewer steps, never fewer than the batch's share.
    small, large = (app.iterations(size, app.epochs - 1) for size in (app.limits.initial, app.limits.maximum))
    assert small * app.limits.initial / app.limits.maximum <= large < small
