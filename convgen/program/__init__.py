"""The schedule: an ordered list of typed steps per phase; its text; building and verifying it."""
