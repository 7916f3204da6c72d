"""CPU kernels compared with peer kernels, and the time to build and to call a kernel."""
