"""Arithmetic of routed experts: the reference in plain torch, which runs on any device."""

from moespeq.kernels.experts import ExpertMath, combine, expert_products, group_by_expert

__all__ = ["ExpertMath", "combine", "expert_products", "group_by_expert"]
