"""The scheduler: which tokens of which sequences the next step computes."""

from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerLimits"]
