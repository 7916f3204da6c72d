// Python bindings of the gradient codecs. qsync_fx/_C.pyi specifies the functions.

#include "arguments.h"
#include "random.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace qsync {
namespace {

constexpr std::size_t MOST_VALUES = std::size_t{1} << 40, LARGEST_UNIT = std::size_t{1} << 32;
// Random stream of the signs of a Hadamard transform: the same for all streams of values.
constexpr std::uint32_t SIGNS = 0x48414441u;
constexpr std::size_t STEP = 420, LARGEST_PARTITION = STEP * 4096;

void check_bits(int bits) {
    if (bits != 2 && bits != 4 && bits != 8 && bits != 16)
        throw py::value_error("bits is " + std::to_string(bits) + ", not one of: 2, 4, 8, 16");
}

void check_unit(std::size_t unit) {
    within("unit", unit, std::size_t{64}, std::size_t{1} << 20);
    if (unit % 64 != 0) throw py::value_error("unit is " + std::to_string(unit) + ", no multiple of 64");
}

void check_block(std::size_t unit) {
    if (unit < 128 || (unit & (unit - 1)) != 0)
        throw py::value_error("unit is " + std::to_string(unit) + ", not a power of two from 128 on, as a Hadamard transform requires");
}

void check_truncation(int bits, std::size_t partition) {
    within("bits", bits, 12, 32);
    if (bits % 4 != 0) throw py::value_error("bits is " + std::to_string(bits) + ", no multiple of 4");
    within("partition", partition, STEP, LARGEST_PARTITION);
    if (partition % STEP != 0) throw py::value_error("partition is " + std::to_string(partition) + ", no multiple of 420");
}

Layout layout_of(const std::string &name) { return static_cast<Layout>(named("layout", name, {"sign", "endpoints"})); }

// Call `run(codecs, source, target)` without the GIL. `from` and `to` are addresses of n values, or
// of their encoding.
template <class From, class To, class Run>
auto coded(std::uintptr_t from, bool given, std::uintptr_t to, std::size_t n, int threads, const std::optional<std::string> &isa, Run run) {
    within("n", n, std::size_t{0}, MOST_VALUES);
    within("threads", threads, 1, MOST_THREADS);
    const auto *source = pointer<const From>(from, given);
    auto *target = pointer<To>(to, n != 0);
    const Codecs &codecs = *path(isa).codecs;
    const py::gil_scoped_release unlocked;
    return run(codecs, source, target);
}

void bound_qsgd_encode(std::uintptr_t src, std::uintptr_t wire, std::size_t n, int bits, std::size_t unit, const std::string &norm,
                       const std::string &layout, std::uint64_t seed, std::uint32_t stream, std::uint64_t first, int threads,
                       const std::optional<std::string> &isa, bool rotated) {
    check_bits(bits);
    check_unit(unit);
    if (rotated) check_block(unit);
    const std::uint32_t signs = mix(stream_key(seed, SIGNS)) + WEYL * static_cast<std::uint32_t>(first / 32);
    const Qsgd how{bits, unit, static_cast<Norm>(named("norm", norm, {"max", "two"})), layout_of(layout), rotated, signs};
    within("n", n, std::size_t{0}, std::size_t{1} << 32);
    if (first > (std::uint64_t{1} << 32) - n) throw py::value_error("an index of 2**32 or more");
    coded<float, std::uint8_t>(src, n != 0, wire, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
        const std::uint32_t counter = static_cast<std::uint32_t>(first) * WEYL + mix(stream_key(seed, stream));
        qsgd_encode(codecs, how, source, n, target, counter, threads);
    });
}

void bound_qsgd_decode(std::uintptr_t wire, std::uintptr_t dst, std::size_t n, int bits, std::size_t unit, const std::string &layout,
                       bool add, int threads, const std::optional<std::string> &isa, bool last, bool rotated) {
    check_bits(bits);
    check_unit(unit);
    if (rotated) check_block(unit);
    const Qsgd how{bits, unit, MAX_NORM, layout_of(layout), rotated};
    coded<std::uint8_t, float>(wire, n != 0, dst, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
        qsgd_decode(codecs, how, source, n, target, add, last, threads);
    });
}

void bound_onebit_encode(std::uintptr_t src, std::uintptr_t residual, std::uintptr_t wire, std::size_t n, std::size_t unit, int threads,
                         const std::optional<std::string> &isa) {
    within("unit", unit, std::size_t{1}, LARGEST_UNIT);
    auto *left_over = pointer<float>(residual, false);
    coded<float, std::uint8_t>(src, n != 0, wire, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
        onebit_encode(codecs, unit, source, left_over, n, target, threads);
    });
}

void bound_onebit_decode(std::uintptr_t wire, std::uintptr_t dst, std::size_t n, std::size_t unit, bool add, int threads,
                         const std::optional<std::string> &isa, bool last) {
    within("unit", unit, std::size_t{1}, LARGEST_UNIT);
    coded<std::uint8_t, float>(wire, n != 0, dst, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
        onebit_decode(codecs, unit, source, n, target, add, last, threads);
    });
}

void bound_truncate_encode(std::uintptr_t src, std::uintptr_t residual, std::uintptr_t wire, std::size_t n, int bits,
                           std::size_t partition, int threads, const std::optional<std::string> &isa) {
    check_truncation(bits, partition);
    auto *left_over = pointer<float>(residual, false);
    coded<float, std::uint8_t>(src, n != 0, wire, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
        truncate_encode(codecs, bits, partition, source, left_over, n, target, threads);
    });
}

void bound_truncate_decode(std::uintptr_t wire, std::size_t size, std::uintptr_t dst, std::size_t n, bool add, int threads,
                           const std::optional<std::string> &isa) {
    const bool good =
        coded<std::uint8_t, float>(wire, size != 0, dst, n, threads, isa, [&](const Codecs &codecs, const auto *source, auto *target) {
            return truncate_decode(codecs, source, size, n, target, add, threads);
        });
    if (!good) throw py::value_error("the headers of the partitions do not say " + std::to_string(n) + " values");
}

} // namespace

void add_codecs(py::module_ &module) {
    const auto none = py::none();
    module.def("qsgd_bytes", [](std::size_t n, int bits, std::size_t unit, bool rotated) {
        check_bits(bits);
        check_unit(unit);
        if (rotated) check_block(unit);
        return qsgd_bytes(n, bits, unit, rotated);
    }, py::arg("n"), py::arg("bits"), py::arg("unit"), py::arg("rotated") = false);
    module.def("onebit_bytes", [](std::size_t n, std::size_t unit) {
        within("unit", unit, std::size_t{1}, LARGEST_UNIT);
        return onebit_bytes(n, unit);
    }, py::arg("n"), py::arg("unit"));
    module.def("truncate_bytes", [](std::size_t n, int bits, std::size_t partition) {
        check_truncation(bits, partition);
        return truncate_bytes(n, bits, partition);
    }, py::arg("n"), py::arg("bits"), py::arg("partition"));
    module.def("qsgd_encode", &bound_qsgd_encode, py::arg("src"), py::arg("wire"), py::arg("n"), py::arg("bits"), py::arg("unit"),
               py::arg("norm") = "max", py::arg("layout") = "sign", py::arg("seed") = 0, py::arg("stream") = 0, py::arg("first") = 0,
               py::arg("threads") = 1, py::arg("isa") = none, py::arg("rotated") = false);
    module.def("qsgd_decode", &bound_qsgd_decode, py::arg("wire"), py::arg("dst"), py::arg("n"), py::arg("bits"), py::arg("unit"),
               py::arg("layout") = "sign", py::arg("add") = false, py::arg("threads") = 1, py::arg("isa") = none, py::arg("last") = false,
               py::arg("rotated") = false);
    module.def("onebit_encode", &bound_onebit_encode, py::arg("src"), py::arg("residual"), py::arg("wire"), py::arg("n"), py::arg("unit"),
               py::arg("threads") = 1, py::arg("isa") = none);
    module.def("onebit_decode", &bound_onebit_decode, py::arg("wire"), py::arg("dst"), py::arg("n"), py::arg("unit"),
               py::arg("add") = false, py::arg("threads") = 1, py::arg("isa") = none, py::arg("last") = false);
    module.def("truncate_encode", &bound_truncate_encode, py::arg("src"), py::arg("residual"), py::arg("wire"), py::arg("n"),
               py::arg("bits"), py::arg("partition"), py::arg("threads") = 1, py::arg("isa") = none);
    module.def("truncate_decode", &bound_truncate_decode, py::arg("wire"), py::arg("size"), py::arg("dst"), py::arg("n"),
               py::arg("add") = false, py::arg("threads") = 1, py::arg("isa") = none);
}

} // namespace qsync
