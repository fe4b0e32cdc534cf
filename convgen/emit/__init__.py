"""Source from a schedule: contexts for the templates. Decide here, print there."""
