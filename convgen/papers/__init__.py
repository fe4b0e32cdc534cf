"""The figures and tables of the four papers: the numbers that each says, and those that convgen's models give."""
