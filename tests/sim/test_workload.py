"""The trace reader: what it accepts, and how it names what it does not."""

from __future__ import annotations

import pytest

from polluxd.errors import ConfigError
from polluxd.sim.workload import read_workload

HEADER = "name,time,application,num_replicas,batch_size\n"


def read(tmp_path, apps, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_workload(path, apps, cluster_gpus=16)


def test_jobs_come_in_order(tmp_path, apps):
    jobs = read(tmp_path, apps, HEADER + "a,0,speech,2,40\nb,12.5,vision-small,4,512\n")
    assert [(j.name, j.time, j.gpus, j.batch_size) for j in jobs] == [("a", 0, 2, 40), ("b", 12.5, 4, 512)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no column"),
        ("name,time,application\nx,1,speech\n", "line 1: no column num_replicas or batch_size"),
        (HEADER, "no job in it"),
        (HEADER + "a,1,speach,1,20\n", "line 2: application 'speach' has no profile; known are .*speech"),
        (HEADER + "a,9,speech,1,20\nb,8,speech,1,20\n", "line 3: time 8 is before .*; sort the file"),
        (HEADER + "a,-1,speech,1,20\n", "line 2: time is '-1'"),
        (HEADER + "a,nan,speech,1,20\n", "line 2: time is 'nan'"),
        (HEADER + "a,inf,speech,1,20\n", "line 2: time is 'inf'"),
        (HEADER + "a,1,speech,17,340\n", "line 2: num_replicas is 17 and the cluster has 16 GPUs"),
        (HEADER + "a,1,speech,1.5,20\n", "line 2: num_replicas is 1.5"),
        (HEADER + "a,1,speech,0,20\n", "line 2: num_replicas is '0'"),
        (HEADER + "a,1,speech,1,9\n", "line 2: batch_size 9 is outside"),
        (HEADER + "a,1,speech,1,20\na,2,speech,1,20\n", "line 3: job a stands on line 2 already"),
        (HEADER + ",1,speech,1,20\n", "line 2: no name"),
        (HEADER + "a,1,speech\n", "line 2: no num_replicas"),
    ],
)
def test_bad_traces_are_named_by_file_line_and_remedy(tmp_path, apps, text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path, apps, text)
    assert "trace.csv" in str(raised.value)
    assert ";" in str(raised.value), "a remedy follows"


def test_a_missing_file_is_an_error_of_ours(tmp_path, apps):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path / "none.csv", apps, cluster_gpus=4)
