"""The fast CPU path: packed kernels for target passes, and the torch-only layers that drafters share with it."""
