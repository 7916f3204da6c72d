// What functions of the module take: paths by name, addresses, ranges.
#pragma once

#include "dispatch.h"

#include <cstdint>
#include <optional>
#include <pybind11/pybind11.h>
#include <string>
#include <vector>

namespace qsync {

constexpr int MOST_THREADS = 4096;

// The path called `isa`, or the chosen one. Raises ValueError, or OptionError for a wrong QSYNC_CPU_ISA.
const Path &path(const std::optional<std::string> &isa);

// Returns the position of `name` among `names`; raises ValueError naming all of them.
int named(const char *what, const std::string &name, const std::vector<std::string> &names);

template <class T> void within(const char *name, T value, T low, T high) {
    if (!(value >= low && value <= high))
        throw pybind11::value_error(std::string(name) + " is " + std::to_string(value) + ", not within " + std::to_string(low) + " to " +
                                    std::to_string(high));
}

template <class T> T *pointer(std::uintptr_t address, bool needed) {
    if (needed && address == 0) throw pybind11::value_error("a null pointer for memory that is not empty");
    return reinterpret_cast<T *>(address);
}

// Adds the codecs of gradients to the module.
void add_codecs(pybind11::module_ &module);
// Adds the steps of optimizers.
void add_optimizers(pybind11::module_ &module);

// Adds products of matrices to the module.
void add_products(pybind11::module_ &module);

} // namespace qsync
