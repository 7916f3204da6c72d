"""Native kernels of qsync_fx: pointers and sizes in, nothing of torch's ABI.

Invariant: every path (`available_isas`) gives the same bits, for any number of threads; a random number depends on the seed, the stream
and the element's index alone.

Pointers are addresses of contiguous, allocated memory (`tensor.data_ptr()`); nobody checks them. The interpreter lock is released
while kernels run. Wrong sizes, names and ranges raise `ValueError`; a wrong QSYNC_CPU_ISA raises `OptionError`.

The random number of element `i` (its index in memory order, plus `first`), all in uint32 with wrap-around:
    key = mix(seed_low ^ mix(seed_high ^ mix(stream + 0x9E3779B9)))
    h = mix(i_low * 0x9E3779B1 + mix(key ^ i_high));  r = (h >> 8) * 2**-24, in [0, 1)
    mix(x): x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16   (lowbias32, Wellons 2018)
"""

from typing import Literal

Rounding = Literal["stochastic", "nearest", "floor"]

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

def isa() -> str:
    """Returns the path in use: the best of `available_isas` that passed its self-test, or what QSYNC_CPU_ISA asks for."""

def available_isas() -> list[str]:
    """Returns the paths that this build and this processor have, best first: "avx512", "avx2", "scalar"."""
