"""Matrix and convolution products of a layer: our kernels, or torch's integer unit.

`dispatch` decides which computes a product. `gemm.py` defines the operators of the kernels,
`cpu_kernels` calls the native module, `int_mm` torch's integer products. Start at `dispatch.py`.
"""
