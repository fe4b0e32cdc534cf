"""Layouts of a whole network by price: what every row may do, how every value may be stored, and the best of all."""
