"""The only code that talks to Postgres."""

from .store import Store
from .views import (
    CycleRecords,
    CycleSummary,
    CycleView,
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
    "CycleSummary",
    "CycleView",
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
