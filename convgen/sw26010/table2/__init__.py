"""[SW] Table 2: published seconds, the constants fitted to them, and predictions."""
