"""What compiles: nvcc, the host compiler and the CUTLASS headers of this machine; for sm_70, NVRTC of CUDA 12.

`nvrtc_compile` is the program that takes nvcc's place there.
"""
