"""CUDA kernels from CUTLASS templates: generation, compilation, caching, selection and launch.

Each entry of this list imports only from entries above it; start reading at `runtime.launch`.

    problem         formats, layouts and sizes of a product, from tensors; the reference by torch
    kernel_config   a kernel as data, and the features of each architecture
    codegen         kernel sources: translation units for the templates in cpp/cutlass
    toolchain       nvcc, host compiler and CUTLASS headers of this machine
    kernel_build    configurations to libraries: compiled, verified, cached on disk, loaded
    layer_times     measured times of layers in narrow formats and in BF16, from tuning tables
    tuning          choice of the fastest candidate from timings, and the tables of choices
    selection       valid configurations, their problems, candidates, estimates, the final decision
    runtime         arguments from tensors, launches, device state, fallback reasons, timing
"""
