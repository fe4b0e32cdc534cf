"""A network's rows as the core groups of SW26010s run them, and what they count."""
