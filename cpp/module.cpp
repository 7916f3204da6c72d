#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, module) { module.doc() = "Native kernels of qsync_fx."; }
