"""Ways to convolve by ATen on a CPU. The plain call is the family `aten`, as on GPUs."""
