"""Native kernels of qsync_fx: pointers and sizes in, nothing of torch's ABI.

Invariant: every path (`available_isas`) gives the same bits, for any number of threads; a random number depends on the seed, the stream
and the element's index alone. Sums of products of bfloat16 are the exception: they are as exact on every path, and the same on one path.

Pointers are addresses of contiguous, allocated memory (`tensor.data_ptr()`); nobody checks them. The interpreter lock is released
while kernels run. Wrong sizes, names and ranges raise `ValueError`; a wrong QSYNC_CPU_ISA raises `OptionError`.

The random number of element `i` (its index in memory order, plus `first`), all in uint32 with wrap-around:
    key = mix(seed_low ^ mix(seed_high ^ mix(stream + 0x9E3779B9)))
    h = mix(i_low * 0x9E3779B1 + mix(key ^ i_high));  r = (h >> 8) * 2**-24, in [0, 1)
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16   (lowbias32, Wellons 2018)
"""

from collections.abc import Sequence
from typing import Literal

Rounding = Literal["stochastic", "nearest", "floor"]
Layout = Literal["sign", "endpoints"]
Operands = Literal["int8", "bfloat16"]
Activation = Literal["none", "relu", "gelu", "gelu_tanh"]

openmp: bool
"""Whether the module was built with threads; if not, `threads` is taken and changes nothing."""

def quantize(
    src: int,
    dst: int,
    scales: int,
    rows: int,
    columns: int,
    dtype: Literal["float32", "bfloat16", "float16"],
    rounding: Rounding,
    levels: int = 127,
    seed: int = 0,
    stream: int = 0,
    threads: int = 1,
    first: int = 0,
    isa: str | None = None,
) -> None:
    """Quantizes each row of `src` (rows x columns of `dtype`) to `dst` (int8) and its scale in `scales` (float32, one a row).

    A whole tensor is one row. In float32: scale = max(absmax / levels, 2**-126) and u = x / scale, then

    - stochastic: floor(u) + (r < u - floor(u)), unbiased to 2**-24
    - nearest: u rounded to an integer, ties to even
    - floor: floor(u)

    clamped to +-levels (1 to 127). A row of zeros, or of no element, has scale 1; a row with a NaN or an infinity has scale NaN
    and all q zero, so that whoever dequantizes it sees NaN. `seed` has 64 bits, `stream` 32, `first` is the index of the first
    element. `isa` overrides the path.
    """

def round_float(
    src: int,
    dst: int,
    n: int,
    mantissa_bits: int,
    e_min: int,
    max: float,
    rounding: Rounding,
    seed: int = 0,
    stream: int = 0,
    threads: int = 1,
    first: int = 0,
    isa: str | None = None,
) -> None:
    """Rounds `n` float32 of `src` to the float grid of `mantissa_bits` (0 to 23) and `e_min` (-126 to 127), float32 in `dst`.

    With e the larger of x's exponent and `e_min`, and u = x * 2**(mantissa_bits - e), u is rounded as in `quantize` (floor towards
    minus infinity), exactly; denormals of the grid are kept. Finite values saturate at +-`max`; NaN and infinities pass through.
    `dst` may be `src`.
    """

def keep(
    dst: int,
    n: int,
    p: float,
    seed: int = 0,
    stream: int = 0,
    threads: int = 1,
    first: int = 0,
    isa: str | None = None,
) -> None:
    """Writes `n` bytes to `dst`: 0 where the random number of the value is below `p` (0 to 1), 1 elsewhere."""

def pack_bits(src: int, dst: int, n: int, threads: int = 1) -> None:
    """Writes `n` bytes of `src`, each 0 or 1, as bits into `(n + 7) // 8` bytes of `dst`, the first as the lowest bit of the first byte."""

def unpack_bits(src: int, dst: int, n: int, threads: int = 1) -> None:
    """Writes the `n` bytes, each 0 or 1, of which `pack_bits` has made `src`, to `dst`."""

def qsgd_encode(
    src: int,
    wire: int,
    n: int,
    bits: int,
    unit: int,
    norm: Literal["max", "two"] = "max",
    layout: Layout = "sign",
    seed: int = 0,
    stream: int = 0,
    first: int = 0,
    threads: int = 1,
    isa: str | None = None,
    rotated: bool = False,
) -> None:
    """Writes `n` float32 of `src` as QSGD of 2, 4, 8 or 16 `bits` into `qsgd_bytes(n, bits, unit)` bytes of `wire`.

    First a float32 a unit of `unit` values (a multiple of 64; the last may have fewer): its scale S, the largest magnitude or the
    2-norm (summed in float64 in sixteen lanes, halves folded onto halves). Then the codes of each unit, in groups of sixteen bytes:
    value k * 16 + l of a group is bits k * `bits` and up of byte l; 16 bits take two bytes each, lowest first. The last group is
    filled up with the codes of zeros. In float32, r being the random number of the value:

    - sign: u = |x| * (s / S) with s = 2**(bits - 1) - 1; floor(u) + (r < u - floor(u)), at most s, and the sign as the highest bit
    - endpoints: u = x * (L / S) / 2 - 1/2 with L = 2**bits - 1; 2**(bits - 1) + floor(u) + (r < u - floor(u)), in 0 to L

    Below S = 2**-64 values and scale are multiplied by 2**64 first, above 2**64 by 2**-64. A unit with a NaN or an infinity has scale
    NaN and codes of zero. `first` is the index of the first value, and `first + n` at most 2**32.

    If `rotated`, units of a power of two of values, at least 128, are first transformed to H D x, the last one padded with zeros, which
    are encoded, too. D negates values whose bit is set in the random words of stream 0x48414441, 32 values a word, lowest bit first. H has
    the stages (a + b, a - b) of strides 1, 2, 4, ..., in this order. The message begins with the uint32 counter of the first word.
    """

def qsgd_decode(
    wire: int,
    dst: int,
    n: int,
    bits: int,
    unit: int,
    layout: Layout = "sign",
    add: bool = False,
    threads: int = 1,
    isa: str | None = None,
    last: bool = False,
    rotated: bool = False,
) -> None:
    """Reads `n` values that `qsgd_encode` wrote into `dst`, or adds them to it.

    With a step of S / s, or S / L, lowered by its last bit where s or L of them were infinite: code * step with its sign, or
    (2 * code - L) * step. Where nobody reads them soon, which `last` says, many are written past the caches. If `rotated`, these are
    transformed by the stages in reverse order, and then multiplied by 1 / unit and the signs D.
    """

def qsgd_bytes(n: int, bits: int, unit: int, rotated: bool = False) -> int:
    """Returns how many bytes `n` values make."""

def onebit_encode(
    src: int, residual: int, wire: int, n: int, unit: int, threads: int = 1, isa: str | None = None
) -> None:
    """Writes `n` float32 of `src` plus `residual`, which may be 0, as 1bitSGD into `onebit_bytes(n, unit)` bytes of `wire`.

    First two float32 a unit of `unit` values (any number): the mean of those that are zero or more, and of the others; 0 where there
    are none. Sums run in sixteen lanes, folded halves onto halves. Then a bit a value, four bytes at a time, lowest bit first: 1 where
    it is zero or more. `residual` becomes the value less its mean. Where a mean is not finite both are NaN, and `residual` stays.
    """

def onebit_decode(
    wire: int,
    dst: int,
    n: int,
    unit: int,
    add: bool = False,
    threads: int = 1,
    isa: str | None = None,
    last: bool = False,
) -> None:
    """Reads `n` values that `onebit_encode` wrote into `dst`, or adds them to it; `last` as of `qsgd_decode`."""

def onebit_bytes(n: int, unit: int) -> int:
    """Returns how many bytes `n` values make."""

def truncate_encode(
    src: int,
    residual: int,
    wire: int,
    n: int,
    bits: int,
    partition: int,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Writes the highest `bits` (12, 16, ..., 32) of `n` float32 of `src` plus `residual`, which may be 0, into `wire`.

    That is partitions of partition * 8 / bits values, `partition` being a multiple of 420 bytes; the last may have fewer. Each begins
    with four bytes, the count of values times 8 plus (bits - 12) / 4. Then come the highest bytes of all values, the next ones, and so
    on, and at last half bytes: those of the first half of the values (one more, where their number is odd) below those of the second;
    and zeros up to a multiple of four bytes. A NaN is made quiet. `residual` becomes what is cut off; where a value is not finite it stays.
    """

def truncate_decode(
    wire: int,
    size: int,
    dst: int,
    n: int,
    add: bool = False,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Reads `n` values from `size` bytes of partitions of any levels into `dst`, or adds them to it.

    Raises `ValueError` where headers do not say as many values, or more bytes than there are; nothing was read then.
    """

def truncate_bytes(n: int, bits: int, partition: int) -> int:
    """Returns how many bytes `n` values make."""

def gemm(
    a: int,
    b: int,
    result: int,
    m: int,
    n: int,
    k: int,
    a_strides: tuple[int, ...],
    b_strides: tuple[int, ...],
    dtype: Literal["float32", "bfloat16", "int32"],
    a_scale: int = 0,
    a_scale_each: bool = False,
    b_scale: int = 0,
    b_scale_each: bool = False,
    bias: int = 0,
    threads: int = 1,
    isa: str | None = None,
    operands: Operands = "int8",
    activation: Activation = "none",
) -> None:
    """Multiplies matrices `a` (m x k) and `b` (k x n) of `operands` into `result`, m x n of `dtype` without gaps.

    Strides, of rows and columns, are in elements; any will do. Sums of int8 are exact, so k is 131071 at most. Those of "int32" are the
    result, and int8's alone. Else, each step in float32: sum * a_scale * b_scale + bias, and one rounding to `dtype`, ties to even. Scales
    are float32: 0 for none, one, or one for `each` row of `a` and column of `b`; so is the bias, one a column. Before it is rounded there
    may be an activation of it: "relu", or "gelu" by the error function or by "gelu_tanh"'s formula, each off by 3e-7 of its argument.

    Sums of bfloat16 are float32: products, which are exact there, are added one after the other, to one sum or to a few that are added
    in the end, and each addition is rounded to the nearest. So a sum of finite products is off by (k + 2) * 2**-24 times the sum of
    |a| * |b| at most, to the first order, and by k * 2**-126 * (1 + the largest |a| or |b|), since instructions for it take what is
    denormal, of operands and of sums, for zero. Whole numbers make exact sums where that of |a| * |b| is at most 2**24. A NaN makes NaN
    of all sums it is in, and so does an infinity times zero; another infinity makes them infinite.
    """

def conv(
    images: int,
    b: int,
    result: int,
    count: int,
    channels: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    out: tuple[int, ...],
    taps: bool,
    n: int,
    b_strides: tuple[int, ...],
    dtype: Literal["float32", "bfloat16"],
    a_scale: int = 0,
    b_scale: int = 0,
    b_scale_each: bool = False,
    bias: int = 0,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Multiplies the windows of int8 images by `b`, as `gemm` does; `n` is the number of columns of `b` and of the result.

    `count` images of `size` (height and width, as all pairs) lie with their `channels` last, without gaps. Their windows are a matrix: a
    row for each image and place of `out`, a column for each place of the kernel and channel; its value is that of the image at
    place * stride - padding + place of the kernel * dilation, or zero beside the image. With `taps` it is transposed, so that sums go
    over windows. Sums have 131071 products at most; `a_scale` is one number.
    """

def turn(
    src: int, dst: int, count: int, rows: int, columns: int, bytes: int, threads: int = 1
) -> None:
    """Writes `count` matrices of `rows` x `columns` values of 1, 2 or 4 `bytes`, one behind the other in `src`, to `dst`, each turned.

    Values are moved as they are. `dst` shares no memory with `src`.
    """

def gemm_peak(isa: str | None = None, operands: Operands = "int8") -> float:
    """Returns what the unit for products can do: multiplications and additions a second, of one thread and from its cache."""

def gemm_instructions(isa: str | None = None) -> dict[Operands, str]:
    """Returns the instructions that `gemm` multiplies by; "none" where the compiler chose."""

def adam(
    params: Sequence[int],
    grads: Sequence[int],
    exp_avgs: Sequence[int],
    exp_avg_sqs: Sequence[int],
    max_exp_avg_sqs: Sequence[int],
    steps: Sequence[int],
    sizes: Sequence[int],
    step_sizes: Sequence[float],
    roots: Sequence[float],
    *,
    beta1: float,
    beta2: float,
    eps: float,
    kept: float | None = None,
    weight_decay: float = 0.0,
    maximize: bool = False,
    grad_scale: float | None = None,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Steps on float32 tensors of `sizes` values: addresses of parameters, gradients and both moments, of their bounds or none, and of
    the counts of their steps, which grow by one.

    In float32, fma being rounded once, with g the gradient, divided by `grad_scale` (and stored) where one is given, negated to `maximize`:

    - p = p * kept, where it is given; else g = fma(p, weight_decay, g), where that is not zero
    - m = fma(w, g - m, m) with w = 1 - beta1, or fma(w - 1, g - m, g) from w = 1/2 on
    - v = fma((1 - beta2) * g, g, v * beta2); b = v, or max(b, v) where there are bounds, NaN where either is
    - p = p + -step_size * m / (sqrt(b) / root + eps)
    """

def sgd(
    params: Sequence[int],
    grads: Sequence[int],
    buffers: Sequence[int],
    first: Sequence[bool],
    sizes: Sequence[int],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    grad_scale: float | None = None,
    threads: int = 1,
    isa: str | None = None,
) -> None:
    """Steps on float32 tensors of `sizes` values: addresses of parameters, gradients and momenta, or of no momentum.

    In float32, fma being rounded once, with g the gradient, divided by `grad_scale` (and stored) where one is given, negated to `maximize`:

    - g = fma(p, weight_decay, g), where that is not zero
    - with momenta: b = g where `first`, else fma(g, 1 - dampening, b * momentum); g = b, or fma(b, momentum, g) with `nesterov`
    - p = fma(g, -lr, p)
    """

def isa() -> str:
    """Returns the path in use: the best of `available_isas` that gives the scalar path's results, or what QSYNC_CPU_ISA asks for.

    That is tried once, on first use. Raises OptionError where the path that QSYNC_CPU_ISA asks for is not there, or gives other results.
    """

def refused_isas() -> list[str]:
    """Returns the paths that were tried, and are not used since they gave other results than the scalar one; none before `isa` is known."""

def available_isas() -> list[str]:
    """Returns the paths that this build and this processor have, best first: "amx", "avx512_vnni", "avx512", "avx2", "scalar".

    The first three differ in their products of matrices alone.
    """

def agrees(isa: str) -> bool:
    """Tries whether a path gives the scalar path's bits: what `isa` asks of each before it is used."""

def corruptible() -> list[tuple[str, int]]:
    """Return the kernels that `corrupt` knows, with the number of variants of each.

    This function and the next two exist only in editable installs, for tests.
    """

def corrupt(isa: str, kernel: str, which: int = 0) -> None:
    """Make one kernel of a path flip a bit of its result, until `restore` or the next `corrupt`.

    Raises ValueError if there is no such path or kernel.
    """

def restore() -> None:
    """Undo `corrupt`."""
