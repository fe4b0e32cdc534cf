"""The tuner: the fastest correct kernel of each local problem on a device, found and remembered (DESIGN section 7)."""
