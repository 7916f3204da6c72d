"""Launch of kernels on tensors: argument checks, layout conversion, padding and the launch itself.

`launch` computes GEMMs and convolutions, `quantize_launch` quantizes, and `layout_convert` copies
and converts operands. `device_state` describes a device and chooses its kernels, and `launch_utils`
queues launches and records why torch computed instead of a kernel. `event_timer` measures kernels
against torch. Start reading at `launch.gemm`.
"""
