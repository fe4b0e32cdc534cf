"""Families of local kernels: each says which problems it can, its configurations, and a default one."""
