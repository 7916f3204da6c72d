// Fault injection: replaces one kernel of an ISA variant by a wrapper that corrupts its result.

#include "fault_injection.h"

#include <optional>
#include <stdexcept>
#include <tuple>

namespace qsync {

namespace {

// The original tables of the corrupted ISA variant, and copies in which one kernel is replaced.
struct Corrupted {
    Path &path;
    const Path before;
    Kernels kernels;
    Codecs codecs;
    Multiplier<Int8> int8;
    Multiplier<Bfloat16> bf16;
    Optimizers optimizers;
};

std::optional<Corrupted> corrupted;

// Original kernel, by function type. The wrapper calls it first.
template <class Function> Function right;

void flip(void *first) { static_cast<unsigned char *>(first)[0] ^= 1; }

// Run the original kernel and flip a bit of the output that argument number OUT points to.
template <int OUT, class... Arguments> void wrong(Arguments... arguments) {
    right<void (*)(Arguments...)>(arguments...);
    flip(std::get<OUT>(std::tie(arguments...)));
}

template <int OUT, class... Arguments> void replace(void (*&kernel)(Arguments...)) {
    right<void (*)(Arguments...)> = kernel;
    kernel = &wrong<OUT, Arguments...>;
}

using Absmax = std::uint32_t (*)(const void *, std::size_t);
template <class T> using Finish = void (*)(const Sum<T> *, std::size_t, std::size_t, const Target &);

std::uint32_t wrong_absmax(const void *source, std::size_t n) { return right<Absmax>(source, n) ^ 1; }

template <class T> void wrong_finish(const Sum<T> *tile, std::size_t rows, std::size_t columns, const Target &target) {
    right<Finish<T>>(tile, rows, columns, target);
    flip(target.to);
}

template <class T> void replace_finish(Multiplier<T> &in) {
    right<Finish<T>> = in.finish;
    in.finish = wrong_finish<T>;
}

// INT8 and BF16 micro-kernels.
constexpr int OPERANDS = 2;

struct Kind {
    const char *name;
    int count;
    void (*corrupt)(Corrupted &, int);
};

const Kind KINDS[] = {
    {"absmax", TYPES,
     [](Corrupted &in, int i) {
         right<Absmax> = in.kernels.absmax[i];
         in.kernels.absmax[i] = wrong_absmax;
     }},
    {"quantize", TYPES * ROUNDINGS, [](Corrupted &in, int i) { replace<1>(in.kernels.quantize[i / ROUNDINGS][i % ROUNDINGS]); }},
    {"round_float", ROUNDINGS, [](Corrupted &in, int i) { replace<1>(in.kernels.round_float[i]); }},
    {"keep", 1, [](Corrupted &in, int) { replace<0>(in.kernels.keep); }},
    {"qsgd_encode", WIDTHS * LAYOUTS, [](Corrupted &in, int i) { replace<5>(in.codecs.qsgd_encode[i / LAYOUTS][i % LAYOUTS]); }},
    {"qsgd_decode", WIDTHS * LAYOUTS, [](Corrupted &in, int i) { replace<4>(in.codecs.qsgd_decode[i / LAYOUTS][i % LAYOUTS]); }},
    {"onebit_encode", 1, [](Corrupted &in, int) { replace<5>(in.codecs.onebit_encode); }},
    {"onebit_decode", 1, [](Corrupted &in, int) { replace<4>(in.codecs.onebit_decode); }},
    {"truncate_encode", 1, [](Corrupted &in, int) { replace<4>(in.codecs.truncate_encode); }},
    {"truncate_decode", 1, [](Corrupted &in, int) { replace<3>(in.codecs.truncate_decode); }},
    {"rotate", 1, [](Corrupted &in, int) { replace<4>(in.codecs.rotate); }},
    {"rotate_back", 1, [](Corrupted &in, int) { replace<4>(in.codecs.rotate_back); }},
    {"pack_rows", OPERANDS, [](Corrupted &in, int i) { i == 0 ? replace<1>(in.int8.pack_rows) : replace<1>(in.bf16.pack_rows); }},
    {"pack_columns", OPERANDS, [](Corrupted &in, int i) { i == 0 ? replace<1>(in.int8.pack_columns) : replace<1>(in.bf16.pack_columns); }},
    {"multiply", OPERANDS, [](Corrupted &in, int i) { i == 0 ? replace<4>(in.int8.multiply) : replace<4>(in.bf16.multiply); }},
    {"finish", OPERANDS, [](Corrupted &in, int i) { i == 0 ? replace_finish(in.int8) : replace_finish(in.bf16); }},
    {"adam", DECAYS * 2 * 2, [](Corrupted &in, int i) { replace<0>(in.optimizers.adam[i / 4][i / 2 % 2][i % 2]); }},
    {"sgd", 2 * MOMENTA * 2, [](Corrupted &in, int i) { replace<0>(in.optimizers.sgd[i / (2 * MOMENTA)][i / 2 % MOMENTA][i % 2]); }},
};

} // namespace

std::vector<std::pair<std::string, int>> corruptible() {
    std::vector<std::pair<std::string, int>> found;
    for (const Kind &kind : KINDS) found.emplace_back(kind.name, kind.count);
    return found;
}

void restore() {
    if (corrupted) corrupted->path = corrupted->before;
    corrupted.reset();
}

void corrupt(Path &path, const std::string &name, int which) {
    restore();
    for (const Kind &kind : KINDS) {
        if (kind.name != name || which < 0 || which >= kind.count) continue;
        corrupted.emplace(Corrupted{path, path, *path.kernels, *path.codecs, *path.int8, *path.bf16, *path.optimizers});
        kind.corrupt(*corrupted, which);
        path.kernels = &corrupted->kernels;
        path.codecs = &corrupted->codecs;
        path.int8 = &corrupted->int8;
        path.bf16 = &corrupted->bf16;
        path.optimizers = &corrupted->optimizers;
        return;
    }
    throw std::invalid_argument("there is no kernel " + name + " " + std::to_string(which));
}

} // namespace qsync
