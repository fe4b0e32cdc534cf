"""Local convolution kernels: what a rank computes, the families that can, their sources and static resources."""
