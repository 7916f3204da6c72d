"""Matrix and convolution products of a layer: our kernels, or torch's integer unit.

`dispatch` decides which computes a product, `gemm.py` and `implicit_gemm.py` define the kernels'
operators, `cpu_kernels` calls the native module, `int_mm` calls torch's integer products.
`precompile_problems` finds the products of a graph before it runs; `gpu_profitability` finds layers
for which a narrow format does not pay. Start at `dispatch.py`.
"""
