"""The figures and tables of the four papers: what each says in numbers, and what convgen's models make of it."""
