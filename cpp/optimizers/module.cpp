// Python bindings of the optimizer steps. qsync_fx/_C.pyi specifies the functions.

#include "arguments.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace qsync {
namespace {

using Addresses = std::vector<std::uintptr_t>;

void same_length(const char *name, std::size_t found, std::size_t expected) {
    if (found != expected)
        throw py::value_error(std::string(name) + " has " + std::to_string(found) + " entries, not " + std::to_string(expected));
}

// Return entry i of `addresses`, or null if the list is empty and `optional`.
float *entry(const char *name, const Addresses &addresses, std::size_t i, const std::vector<std::size_t> &sizes, bool optional) {
    if (optional && addresses.empty()) return nullptr;
    same_length(name, addresses.size(), sizes.size());
    return pointer<float>(addresses[i], sizes[i] != 0);
}

void bound_adam(const Addresses &parameters, const Addresses &gradients, const Addresses &first, const Addresses &second,
                const Addresses &largest, const Addresses &steps, const std::vector<std::size_t> &sizes, const std::vector<double> &step_sizes,
                const std::vector<double> &roots, double beta1, double beta2, double eps, std::optional<double> kept, double weight_decay,
                bool maximize, std::optional<double> grad_scale, int threads, const std::optional<std::string> &isa) {
    within("threads", threads, 1, MOST_THREADS);
    same_length("step_sizes", step_sizes.size(), sizes.size());
    same_length("roots", roots.size(), sizes.size());
    same_length("steps", steps.size(), sizes.size());
    std::vector<AdamTensor> tensors;
    for (std::size_t i = 0; i < sizes.size(); ++i)
        tensors.push_back({entry("params", parameters, i, sizes, false), entry("grads", gradients, i, sizes, false),
                           entry("exp_avgs", first, i, sizes, false), entry("exp_avg_sqs", second, i, sizes, false),
                           entry("max_exp_avg_sqs", largest, i, sizes, true), sizes[i], static_cast<float>(-step_sizes[i]),
                           static_cast<float>(roots[i])});
    const AdamRule rule{static_cast<float>(kept.value_or(1.0)), static_cast<float>(weight_decay), static_cast<float>(1 - beta1),
                        static_cast<float>(beta2),              static_cast<float>(1 - beta2),    static_cast<float>(eps),
                        maximize ? -1.0f : 1.0f,                static_cast<float>(grad_scale.value_or(1.0))};
    const Decay decay = kept ? APART : weight_decay != 0 ? IN_GRADIENT : NO_DECAY;
    const Optimizers &table = *path(isa).optimizers;
    const py::gil_scoped_release unlocked;
    for (const std::uintptr_t step : steps) *pointer<float>(step, true) += 1.0f;
    adam(table, tensors.data(), tensors.size(), rule, decay, grad_scale.has_value(), threads);
}

void bound_sgd(const Addresses &parameters, const Addresses &gradients, const Addresses &buffers, const std::vector<bool> &first,
               const std::vector<std::size_t> &sizes, double lr, double momentum, double dampening, double weight_decay, bool nesterov,
               bool maximize, std::optional<double> grad_scale, int threads, const std::optional<std::string> &isa) {
    within("threads", threads, 1, MOST_THREADS);
    if (!buffers.empty()) same_length("first", first.size(), sizes.size());
    std::vector<SgdTensor> tensors;
    for (std::size_t i = 0; i < sizes.size(); ++i)
        tensors.push_back({entry("params", parameters, i, sizes, false), entry("grads", gradients, i, sizes, false),
                           entry("buffers", buffers, i, sizes, true), sizes[i], !buffers.empty() && first[i]});
    const SgdRule rule{static_cast<float>(weight_decay),
                       static_cast<float>(momentum),
                       static_cast<float>(1 - dampening),
                       static_cast<float>(-lr),
                       maximize ? -1.0f : 1.0f,
                       static_cast<float>(grad_scale.value_or(1.0))};
    const Optimizers &table = *path(isa).optimizers;
    const py::gil_scoped_release unlocked;
    sgd(table, tensors.data(), tensors.size(), rule, weight_decay != 0, nesterov, grad_scale.has_value(), threads);
}

} // namespace

void add_optimizers(py::module_ &module) {
    module.def("adam", &bound_adam, py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
               py::arg("max_exp_avg_sqs"), py::arg("steps"), py::arg("sizes"), py::arg("step_sizes"), py::arg("roots"), py::kw_only(), py::arg("beta1"),
               py::arg("beta2"), py::arg("eps"), py::arg("kept") = py::none(), py::arg("weight_decay") = 0.0, py::arg("maximize") = false,
               py::arg("grad_scale") = py::none(), py::arg("threads") = 1, py::arg("isa") = py::none());
    module.def("sgd", &bound_sgd, py::arg("params"), py::arg("grads"), py::arg("buffers"), py::arg("first"), py::arg("sizes"),
               py::kw_only(), py::arg("lr"), py::arg("momentum") = 0.0, py::arg("dampening") = 0.0, py::arg("weight_decay") = 0.0,
               py::arg("nesterov") = false, py::arg("maximize") = false, py::arg("grad_scale") = py::none(), py::arg("threads") = 1,
               py::arg("isa") = py::none());
}

} // namespace qsync
