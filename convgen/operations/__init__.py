"""Operations: a row of a table each. What one says: signatures, local code, gradients, a reference; never a word about
ranks. A signature prints as a line, `tests/test_operation_signatures.py` has them all.

| file | rows |
|---|---|
| convolution, transposed | the three phases of both, groups as nests or cut by blocks |
| max_pooling, average_pooling | by windows and by cells (adaptive, global) |
| upsampling | interpolation |
| linear_maps | what average pooling and interpolation are, and what is read from their other side |
| rows | pad, slice, flip, roll, concatenate |
| views, pixels | views, permutations, expansion; pixel shuffles |
| pointwise, dropout | activations, add, gate, bias, affine, prelu; masks by global number |
| moments, batch_norm, running | moments of all norms, what is normalised by them, running statistics |
| evaluated_norm | a batch norm in evaluation |
| contraction | linear layers, matrix products |
| softmax, attention, fourier | what needs an index whole |
| reductions, losses | sums, means; cross entropy, squared error |
| indexing | rows by numbers that are operands: lists, embeddings, grid samples |
| calls | operators of ATen as they stand: elementwise, along whole dimensions, whole |
| elementwise_gradients, along_gradients | no rows: gradients of such operators, by ATen's name |

To add one: a frozen dataclass of `row.Operation` in a file here, a kind of random cases in `tests/operation_cases.py`.
Generated networks have these files in them (`convgen/emit/package.py`, which lists them): imports at the top, other
packages than torch and the standard library nowhere, what only tests and prices call in `reference` and `work`.
"""
