"""The only code that talks to Postgres."""

from .cycle_store import CycleStore
from .store import Store
from .views import (
    CycleRecords,
    CycleSummary,
    CycleView,
    EndedJob,
    HistoryPoint,
    JobExplanation,
    JobTimes,
    JobView,
    Leader,
    MoveCost,
    MoveTotals,
    SettingChange,
)

__all__ = [
    "CycleRecords",
    "CycleStore",
    "CycleSummary",
    "CycleView",
    "EndedJob",
    "HistoryPoint",
    "JobExplanation",
    "JobTimes",
    "JobView",
    "Leader",
    "MoveCost",
    "MoveTotals",
    "SettingChange",
    "Store",
]
