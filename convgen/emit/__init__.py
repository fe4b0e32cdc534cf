"""From a schedule to source: contexts for the templates. Decide here, print there."""
