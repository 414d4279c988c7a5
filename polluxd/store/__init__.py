"""The only code that talks to Postgres."""

from .store import Store
from .views import (
    CycleSummary,
    CycleView,
    Explanation,
    HistoryPoint,
    JobTimes,
    JobView,
    Leader,
    ObservedJob,
    ReallocationCost,
    ReallocTotals,
    SettingChange,
)

__all__ = [
    "CycleSummary",
    "CycleView",
    "Explanation",
    "HistoryPoint",
    "JobTimes",
    "JobView",
    "Leader",
    "ObservedJob",
    "ReallocTotals",
    "ReallocationCost",
    "SettingChange",
    "Store",
]
