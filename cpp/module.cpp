// Python module `_C`: checks arguments, dispatches to an ISA variant, and releases the GIL.
// qsync_fx/_C.pyi specifies the functions.

#include "arguments.h"
#include "bits.h"
#include "quantizer/quantizer.h"
#ifdef QSYNC_FAULT_INJECTION
#include "fault_injection.h"
#endif

#include <pybind11/stl.h>

#include <cstdlib>
#include <optional>
#include <stdexcept>

namespace py = pybind11;

namespace {

using qsync::Path;

std::string known(const std::vector<std::string> &names) {
    std::string text;
    for (const auto &name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const auto &path : qsync::available_paths()) names.push_back(path.name);
    return names;
}

// Names are case-insensitive, since environment variables of other libraries use capitals.
const Path *find(std::string name) {
    for (char &letter : name)
        if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
    for (const auto &path : qsync::available_paths())
        if (path.name == name) return &path;
    return nullptr;
}

// ISA variants that were rejected because their results differ from the scalar kernels.
std::vector<std::string> refused;

bool passes(const Path &path) {
    if (qsync::agrees_with_scalar(path)) return true;
    refused.push_back(path.name);
    return false;
}

void warn(const std::string &text) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

const Path &choose() {
    const auto &paths = qsync::available_paths();
    if (const char *asked = std::getenv("QSYNC_CPU_ISA"); asked != nullptr && *asked != '\0') {
        const Path *path = find(asked);
        if (path != nullptr && passes(*path)) return *path;
        const py::object error = py::module_::import("qsync_fx.errors").attr("OptionError");
        const std::string named = "'" + std::string(asked) + "'";
        const std::string what = path == nullptr ? "this build and this processor have no path " + named
                                                 : "the path " + named + " gives other results than the scalar one on this processor";
        const std::string advice = "unset it, or use one of: " + known(available_isas());
        const py::object value = error(what, py::arg("where") = "environment variable QSYNC_CPU_ISA", py::arg("do") = advice);
        PyErr_SetObject(error.ptr(), value.ptr());
        throw py::error_already_set();
    }
    for (const auto &path : paths) {
        if (passes(path)) return path;
        warn("qsync_fx: the " + path.name + " kernels give other results than the scalar ones on this processor; they are not used");
    }
    return paths.back();
}

// Return the dispatched ISA variant. The first call selects it while it owns the GIL, since the
// selection may warn or raise.
const Path &chosen() {
    static const Path *path = nullptr;
    if (path == nullptr) path = &choose();
    return *path;
}

Path &named_path(const std::string &isa) {
    return qsync::available_paths()[static_cast<std::size_t>(qsync::named("isa", isa, available_isas()))];
}

qsync::Rounding rounding_of(const std::string &name) {
    return static_cast<qsync::Rounding>(qsync::named("rounding", name, {"stochastic", "nearest", "floor"}));
}

void quantize(std::uintptr_t src, std::uintptr_t dst, std::uintptr_t scales, std::size_t rows, std::size_t columns,
              const std::string &dtype, const std::string &rounding, int levels, std::uint64_t seed, std::uint32_t stream, int threads,
              std::uint64_t first, const std::optional<std::string> &isa) {
    const auto type = static_cast<qsync::Type>(qsync::named("dtype", dtype, {"float32", "bfloat16", "float16"}));
    const auto how = rounding_of(rounding);
    qsync::within("levels", levels, 1, 127);
    qsync::within("threads", threads, 1, qsync::MOST_THREADS);
    if (columns != 0 && rows > SIZE_MAX / 8 / columns) throw py::value_error("rows * columns does not fit into memory");
    const bool any = rows != 0 && columns != 0;
    const auto *source = qsync::pointer<const void>(src, any);
    auto *target = qsync::pointer<std::int8_t>(dst, any);
    auto *found = qsync::pointer<float>(scales, rows != 0);
    const qsync::Kernels &table = *qsync::path(isa).kernels;
    const py::gil_scoped_release unlocked;
    qsync::quantize(table, source, target, found, rows, columns, type, how, levels, {seed, stream, first}, threads);
}

void round_float(std::uintptr_t src, std::uintptr_t dst, std::size_t n, int mantissa_bits, int e_min, double max,
                 const std::string &rounding, std::uint64_t seed, std::uint32_t stream, int threads, std::uint64_t first,
                 const std::optional<std::string> &isa) {
    const auto how = rounding_of(rounding);
    qsync::within("mantissa_bits", mantissa_bits, 0, 23);
    qsync::within("e_min", e_min, -126, 127);
    qsync::within("max", max, 0x1p-149, 0x1.fffffep127);
    qsync::within("threads", threads, 1, qsync::MOST_THREADS);
    const auto *source = qsync::pointer<const float>(src, n != 0);
    auto *target = qsync::pointer<float>(dst, n != 0);
    const qsync::Kernels &table = *qsync::path(isa).kernels;
    const py::gil_scoped_release unlocked;
    qsync::round_float(table, source, target, n, {mantissa_bits, e_min, max}, how, {seed, stream, first}, threads);
}

void keep(std::uintptr_t dst, std::size_t n, double p, std::uint64_t seed, std::uint32_t stream, int threads, std::uint64_t first,
          const std::optional<std::string> &isa) {
    qsync::within("p", p, 0.0, 1.0);
    qsync::within("threads", threads, 1, qsync::MOST_THREADS);
    auto *target = qsync::pointer<std::uint8_t>(dst, n != 0);
    const qsync::Kernels &table = *qsync::path(isa).kernels;
    const py::gil_scoped_release unlocked;
    qsync::keep(table, target, n, p, {seed, stream, first}, threads);
}

using Bits = void(const std::uint8_t *, std::uint8_t *, std::size_t, int);

template <Bits *convert> void bits(std::uintptr_t src, std::uintptr_t dst, std::size_t n, int threads) {
    qsync::within("threads", threads, 1, qsync::MOST_THREADS);
    const auto *source = qsync::pointer<const std::uint8_t>(src, n != 0);
    auto *target = qsync::pointer<std::uint8_t>(dst, n != 0);
    const py::gil_scoped_release unlocked;
    convert(source, target, n, threads);
}

} // namespace

namespace qsync {

const Path &path(const std::optional<std::string> &isa) {
    return isa ? named_path(*isa) : chosen();
}

int named(const char *what, const std::string &name, const std::vector<std::string> &names) {
    for (std::size_t i = 0; i < names.size(); ++i)
        if (names[i] == name) return static_cast<int>(i);
    throw py::value_error(std::string(what) + " " + name + " is not one of: " + known(names));
}

} // namespace qsync

PYBIND11_MODULE(_C, module) {
    module.doc() = "Native kernels of qsync_fx: pointers and sizes in, nothing of torch's ABI.";
#ifdef _OPENMP
    module.attr("openmp") = true;
#else
    module.attr("openmp") = false;
#endif
    module.def("available_isas", &available_isas);
    module.def("isa", [] { return chosen().name; });
    module.def("refused_isas", [] { return refused; });
    module.def("agrees", [](const std::string &isa) { return qsync::agrees_with_scalar(named_path(isa)); }, py::arg("isa"));
#ifdef QSYNC_FAULT_INJECTION
    module.def("corruptible", &qsync::corruptible);
    module.def(
        "corrupt", [](const std::string &isa, const std::string &kernel, int which) { qsync::corrupt(named_path(isa), kernel, which); },
        py::arg("isa"), py::arg("kernel"), py::arg("which") = 0);
    module.def("restore", &qsync::restore);
#endif
    module.def("quantize", &quantize, py::arg("src"), py::arg("dst"), py::arg("scales"), py::arg("rows"), py::arg("columns"),
               py::arg("dtype"), py::arg("rounding"), py::arg("levels") = 127, py::arg("seed") = 0, py::arg("stream") = 0,
               py::arg("threads") = 1, py::arg("first") = 0, py::arg("isa") = py::none());
    module.def("round_float", &round_float, py::arg("src"), py::arg("dst"), py::arg("n"), py::arg("mantissa_bits"), py::arg("e_min"),
               py::arg("max"), py::arg("rounding"), py::arg("seed") = 0, py::arg("stream") = 0, py::arg("threads") = 1,
               py::arg("first") = 0, py::arg("isa") = py::none());
    module.def("keep", &keep, py::arg("dst"), py::arg("n"), py::arg("p"), py::arg("seed") = 0, py::arg("stream") = 0,
               py::arg("threads") = 1, py::arg("first") = 0, py::arg("isa") = py::none());
    module.def("pack_bits", &bits<qsync::pack_bits>, py::arg("src"), py::arg("dst"), py::arg("n"), py::arg("threads") = 1);
    module.def("unpack_bits", &bits<qsync::unpack_bits>, py::arg("src"), py::arg("dst"), py::arg("n"), py::arg("threads") = 1);
    qsync::add_codecs(module);
    qsync::add_products(module);
    qsync::add_optimizers(module);
}
