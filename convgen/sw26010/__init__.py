"""The SW26010 of [SW] (swCaffe): one core group emulated, what its kernels count, and what they would take."""
