"""The scheduler: which tokens of which sequences the next step computes."""

from engine.scheduler.scheduler import Scheduler, SchedulerLimits

__all__ = ["Scheduler", "SchedulerLimits"]
