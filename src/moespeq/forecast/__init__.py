"""What `moespeq plan` says: sizes, speed and advice for a model on a machine, from headers and measurements alone."""

from moespeq.forecast.report import PlanReport, plan_model

__all__ = ["PlanReport", "plan_model"]
