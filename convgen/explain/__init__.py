"""Explain a layer's algorithm to a person: tables of its steps, and a picture of who owns and needs what."""
