"""A rank whose processor is an SW26010: what generated modules import."""
