"""The tuner: the fastest correct kernel of each local problem on a device, found and remembered (docs/tuning.md)."""
