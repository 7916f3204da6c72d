// Python bindings of GEMM, convolution and transposition. qsync_fx/_C.pyi specifies the functions.

#include "arguments.h"
#include "gemm/turn.h"

#include <pybind11/stl.h>

#include <map>
#include <utility>

namespace py = pybind11;

namespace qsync {
namespace {

// Largest number of rows or columns, so that products of sizes fit into 64 bits.
constexpr std::size_t MOST_SIZE = std::size_t{1} << 40;

using Strides = std::pair<std::ptrdiff_t, std::ptrdiff_t>; // of rows and columns, in elements

enum Operands { INT8, BFLOAT16 };

Operands operands_of(const std::string &name) { return static_cast<Operands>(named("operands", name, {"int8", "bfloat16"})); }

void bound_gemm(std::uintptr_t a, std::uintptr_t b, std::uintptr_t result, std::size_t m, std::size_t n, std::size_t k, Strides a_strides,
                Strides b_strides, const std::string &dtype, std::uintptr_t a_scale, bool a_scale_each, std::uintptr_t b_scale,
                bool b_scale_each, std::uintptr_t bias, int threads, const std::optional<std::string> &isa, const std::string &operands,
                const std::string &activation) {
    const Operands type = operands_of(operands);
    within("m", m, std::size_t{0}, MOST_SIZE);
    within("n", n, std::size_t{0}, MOST_SIZE);
    within("k", k, std::size_t{0}, type == INT8 ? MOST_DEPTH : MOST_SIZE);
    if (n != 0 && m > MOST_SIZE / n) throw py::value_error("m * n does not fit into memory");
    if (k != 0 && (m > MOST_SIZE / k || n > MOST_SIZE / k)) throw py::value_error("operands do not fit into memory");
    within("threads", threads, 1, MOST_THREADS);
    const auto output = static_cast<Output>(named("dtype", dtype, {"float32", "bfloat16", "int32"}));
    const auto activated = static_cast<Activation>(named("activation", activation, {"none", "relu", "gelu", "gelu_tanh"}));
    const bool epilogue = a_scale != 0 || b_scale != 0 || bias != 0 || activated != NO_ACTIVATION;
    if (output == OUT_SUMS && epilogue) throw py::value_error("sums in int32 have no scale, no bias and no activation");
    if (output == OUT_SUMS && type != INT8) throw py::value_error("sums of bfloat16 are not in int32");
    const Path &by = path(isa);
    const auto multiply = [&](const auto &with, auto value) {
        using T = decltype(value);
        const Gemm<T> what{
            {pointer<const T>(a, m != 0 && k != 0), m, k, a_strides.first, a_strides.second},
            {pointer<const T>(b, n != 0 && k != 0), n, k, b_strides.second, b_strides.first},
            {pointer<const float>(a_scale, false), a_scale_each},
            {pointer<const float>(b_scale, false), b_scale_each},
            pointer<const float>(bias, false),
            output,
            pointer<void>(result, m != 0 && n != 0),
            nullptr,
            false,
            activated,
        };
        const py::gil_scoped_release unlocked;
        gemm(with, what, threads);
    };
    if (type == INT8)
        multiply(*by.int8, Int8());
    else
        multiply(*by.bf16, Bfloat16());
}

using Pair = std::pair<std::ptrdiff_t, std::ptrdiff_t>; // height and width

void bound_conv(std::uintptr_t images, std::uintptr_t b, std::uintptr_t result, std::size_t count, std::size_t channels, Pair size,
                Pair kernel, Pair stride, Pair padding, Pair dilation, Pair out, bool taps, std::size_t n, Strides b_strides,
                const std::string &dtype, std::uintptr_t a_scale, std::uintptr_t b_scale, bool b_scale_each, std::uintptr_t bias,
                int threads, const std::optional<std::string> &isa) {
    constexpr std::ptrdiff_t MOST = std::ptrdiff_t{1} << 20;
    for (const Pair &pair : {size, kernel, stride, dilation, out})
        for (const std::ptrdiff_t value : {pair.first, pair.second}) within("sizes, strides and dilations", value, std::ptrdiff_t{1}, MOST);
    for (const std::ptrdiff_t value : {padding.first, padding.second}) within("padding", value, -MOST, MOST);
    within("channels", channels, std::size_t{1}, std::size_t{1} << 20);
    within("n", n, std::size_t{0}, MOST_SIZE);
    within("threads", threads, 1, MOST_THREADS);
    const auto plane = static_cast<std::size_t>(out.first) * static_cast<std::size_t>(out.second);
    within("count", count, std::size_t{0}, MOST_SIZE / plane);
    const std::size_t windows = count * plane;
    const std::size_t values = static_cast<std::size_t>(kernel.first) * static_cast<std::size_t>(kernel.second) * channels;
    const std::size_t m = taps ? values : windows, k = taps ? windows : values;
    within("the length of sums", k, std::size_t{0}, MOST_DEPTH);
    if (n != 0 && m > MOST_SIZE / n) throw py::value_error("m * n does not fit into memory");
    const auto output = static_cast<Output>(named("dtype", dtype, {"float32", "bfloat16"}));
    const Windows how{{size.first, size.second},       static_cast<std::ptrdiff_t>(channels), {kernel.first, kernel.second},
                      {stride.first, stride.second},   {padding.first, padding.second},         {dilation.first, dilation.second},
                      {out.first, out.second}};
    const Gemm<Int8> what{
        {pointer<const Int8>(images, windows != 0), m, k, 0, 0},
        {pointer<const Int8>(b, n != 0 && k != 0), n, k, b_strides.second, b_strides.first},
        {pointer<const float>(a_scale, false), false},
        {pointer<const float>(b_scale, false), b_scale_each},
        pointer<const float>(bias, false),
        output,
        pointer<void>(result, m != 0 && n != 0),
        &how,
        taps,
    };
    const Multiplier<Int8> &with = *path(isa).int8;
    const py::gil_scoped_release unlocked;
    gemm(with, what, threads);
}

void bound_turn(std::uintptr_t src, std::uintptr_t dst, std::size_t count, std::size_t rows, std::size_t columns, std::size_t bytes,
                int threads) {
    for (const std::size_t size : {count, rows, columns}) within("sizes", size, std::size_t{0}, MOST_SIZE);
    if (rows != 0 && columns != 0 && (rows > MOST_SIZE / columns || count > MOST_SIZE / (rows * columns)))
        throw py::value_error("count * rows * columns does not fit into memory");
    if (bytes != 1 && bytes != 2 && bytes != 4) throw py::value_error("values have 1, 2 or 4 bytes");
    within("threads", threads, 1, MOST_THREADS);
    const bool any = count != 0 && rows != 0 && columns != 0;
    const auto *source = pointer<const void>(src, any);
    auto *target = pointer<void>(dst, any);
    const py::gil_scoped_release unlocked;
    turn(source, target, count, rows, columns, bytes, threads);
}

} // namespace

void add_products(py::module_ &module) {
    module.def("gemm", &bound_gemm, py::arg("a"), py::arg("b"), py::arg("result"), py::arg("m"), py::arg("n"), py::arg("k"),
               py::arg("a_strides"), py::arg("b_strides"), py::arg("dtype"), py::arg("a_scale") = 0, py::arg("a_scale_each") = false,
               py::arg("b_scale") = 0, py::arg("b_scale_each") = false, py::arg("bias") = 0, py::arg("threads") = 1,
               py::arg("isa") = py::none(), py::arg("operands") = "int8", py::arg("activation") = "none");
    module.def("conv", &bound_conv, py::arg("images"), py::arg("b"), py::arg("result"), py::arg("count"), py::arg("channels"),
               py::arg("size"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("out"),
               py::arg("taps"), py::arg("n"), py::arg("b_strides"), py::arg("dtype"), py::arg("a_scale") = 0, py::arg("b_scale") = 0,
               py::arg("b_scale_each") = false, py::arg("bias") = 0, py::arg("threads") = 1,
               py::arg("isa") = py::none());
    module.def("turn", &bound_turn, py::arg("src"), py::arg("dst"), py::arg("count"), py::arg("rows"), py::arg("columns"),
               py::arg("bytes"), py::arg("threads") = 1);
    module.def("gemm_peak", [](const std::optional<std::string> &isa, const std::string &operands) {
        const Operands type = operands_of(operands);
        const Path &by = path(isa);
        const py::gil_scoped_release unlocked;
        return type == INT8 ? gemm_peak(*by.int8) : gemm_peak(*by.bf16);
    }, py::arg("isa") = py::none(), py::arg("operands") = "int8");
    module.def("gemm_instructions", [](const std::optional<std::string> &isa) {
        const Path &by = path(isa);
        return std::map<std::string, std::string>{{"int8", by.int8->instruction}, {"bfloat16", by.bf16->instruction}};
    }, py::arg("isa") = py::none());
}

} // namespace qsync
