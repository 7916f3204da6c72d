"""CUDA kernels from CUTLASS templates: which there are, how they are compiled and kept, which one runs.

From the bottom to the top; a module imports from those above it in this list.

    problem     what is to be computed: formats, layouts, sizes
    config      a kernel as data: a frozen KernelConfig; `rules` says which are valid, `serving` which problems they serve,
                `candidates` which are tried
    unit        a translation unit; `gemm_source`, `conv_source`, `quantizer_source` and `convert_source` write them from the templates
                in cpp/cutlass
    toolchain   nvcc, the host compiler and the CUTLASS headers of this machine
    nvrtc       NVRTC of CUDA 12 and its headers, for sm_70; `nvrtc_compile` is the program that takes nvcc's place there
    library     a small library with the C interface of `abi`, loaded
    compiler    units to such libraries: `nvcc` makes them within `budget`, `sass` looks at what came out (by `volta_code` for
                sm_70), `cache` keeps them with a `manifest` under the `keys` of all that they depend on
    kernels     configurations to libraries, each asked for once in a process
    operands    tensors to problems; `fallback` is what torch computes, and on the CPU what a problem means
    tuning      which candidate is fastest where; `table` keeps what was measured, `recorded` timings take the place of a GPU,
                `event_timer` measures on one, against `peers`
    select      which kernel computes a problem, or that torch does, and why; `padding` says how kernels may take it
    device      what is known of a device: its architecture, whether kernels can be had for it, what was tuned
    calls       what every call of a kernel needs: library, device, stream, workspace; `reasons` keeps why torch computed instead
    launch      tensors to arguments: checks, padding; `quantizing` does so for the quantizer, `converting` for copies of matrices
    collect     the problems of a model's layers, before it runs
"""
