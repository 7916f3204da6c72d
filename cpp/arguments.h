// Argument checks of the Python bindings: ISA variants by name, addresses, ranges.
#pragma once

#include "dispatch.h"

#include <cstdint>
#include <optional>
#include <pybind11/pybind11.h>
#include <string>
#include <vector>

namespace qsync {

constexpr int MOST_THREADS = 4096;

// Return the ISA variant named `isa`, or the dispatched one. Raises ValueError, or OptionError for
// an invalid QSYNC_CPU_ISA.
const Path &path(const std::optional<std::string> &isa);

// Return the index of `name` in `names`. Raises ValueError that lists all names.
int named(const char *what, const std::string &name, const std::vector<std::string> &names);

// Raise ValueError unless `value` is in [low, high].
template <class T> void within(const char *name, T value, T low, T high) {
    if (!(value >= low && value <= high))
        throw pybind11::value_error(std::string(name) + " is " + std::to_string(value) + ", not within " + std::to_string(low) + " to " +
                                    std::to_string(high));
}

// Convert an address to a pointer. Raises ValueError for a null pointer if `needed`.
template <class T> T *pointer(std::uintptr_t address, bool needed) {
    if (needed && address == 0) throw pybind11::value_error("a null pointer for memory that is not empty");
    return reinterpret_cast<T *>(address);
}

// Register the gradient codecs.
void add_codecs(pybind11::module_ &module);
// Register the optimizer steps.
void add_optimizers(pybind11::module_ &module);

// Register GEMM, convolution and transposition.
void add_products(pybind11::module_ &module);

} // namespace qsync
