"""Which mail a job still sends once it moves."""

from __future__ import annotations

import pytest

from polluxd.slurm.scontrol import quiet_mail


@pytest.mark.parametrize(
    ("types", "kept"),
    [
        ("BEGIN", "NONE"),
        ("BEGIN,END", "END"),
        ("INVALID_DEPEND,BEGIN,END,FAIL,REQUEUE,STAGE_OUT", "INVALID_DEPEND,END,FAIL,STAGE_OUT"),
        ("TIME_LIMIT_80,REQUEUE", "TIME_LIMIT_80"),
        ("END,FAIL", ""),
        ("NONE", ""),
    ],
)
def test_begin_and_requeue_are_taken_out(types: str, kept: str) -> None:
    record = f"JobId=7 JobName=train Comment=x TresPerNode=gres:gpu:1 MailUser=ada MailType={types} NtasksPerTRES:0"
    assert quiet_mail(record) == kept


def test_a_job_without_mail_stays_as_it_is() -> None:
    assert quiet_mail("JobId=7 JobName=train TresPerNode=gres:gpu:1") == ""


def test_text_of_a_user_is_no_mail_type() -> None:
    record = "JobId=7 JobName=x MailType=BEGIN;rm MailUser=a MailType=END,FAIL"
    assert quiet_mail(record) == ""
    assert quiet_mail("JobId=7 JobName=MailType=BEGIN MailUser=a\n MailType=END") == ""
