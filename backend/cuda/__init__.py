"""CUDA kernels from CUTLASS templates: which there are, how they are compiled and kept, which one runs.

From the bottom to the top; a package imports from those above it in this list.

    problem     what is to be computed: formats, layouts, sizes, from tensors; what torch computes
    kernel      a kernel as data, and what each architecture has
    source      a kernel as text: translation units, from the templates in cpp/cutlass
    tools       nvcc, the host compiler and the CUTLASS headers of this machine; NVRTC for sm_70
    libraries   configurations to libraries: compiled, looked at, kept on disk, loaded
    tune        which candidate is fastest where: decided from timings, kept in tables
    choose      which configurations are kernels, which serve a problem, which are tried, and which one computes
    run         tensors to arguments, and the call; what is known of a device; why torch computed instead; timings
"""
