"""Steppers: decode steps that are faster than a call of the model.

- `compiled`: `torch.compile`, at each start.
- `stored`: on a CPU, compiled once into a file, which later starts load.
- `captured`: on CUDA, the kernels of one step, recorded once and replayed.

`kvalign.methods.base` is their interface.
"""
