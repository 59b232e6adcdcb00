"""Resolve every "auto" once, before anything is loaded, and keep the reason for each figure."""

from moespeq.plan.memory import MemoryNeeds, MemoryPlan, least_memory_bytes, plan_memory

__all__ = ["MemoryNeeds", "MemoryPlan", "least_memory_bytes", "plan_memory"]
