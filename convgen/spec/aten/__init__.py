"""What operators of ATen are as rows: a file a family, and `describe`, which finds them.

An operator that no file knows runs whole: its operands gathered, every rank alike.
"""
