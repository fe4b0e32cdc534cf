"""How a layer is laid out: what is given is taken, what is open is searched for the least modelled cost."""
