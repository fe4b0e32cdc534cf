"""Describers: what ATen's operators are as rows, a file for each family; `describe` finds them.

An operator without a describer runs whole: its operands are gathered, and every rank computes all of it.
"""
