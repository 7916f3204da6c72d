"""Operators that work value by value: those that a narrow float does not harm, and those that it does."""

from __future__ import annotations

from qsync_fx.ops.row import Kind, OperatorRow, dependent, fixed

VALUES = "it works value by value, so it takes the precision of its inputs"

ROWS = (
    *dependent(
        VALUES,
        "abs absolute add sub subtract rsub mul multiply div divide true_divide neg negative positive addcmul addcdiv "
        "lerp maximum minimum fmax fmin clamp clamp_min clamp_max clip where copysign sign sgn nan_to_num sqrt floor "
        "ceil round trunc fix frac heaviside deg2rad rad2deg dropout native_dropout feature_dropout alpha_dropout "
        "feature_alpha_dropout _add_relu",
    ),
    *dependent(
        "an activation function: it takes the precision of its inputs",
        "relu relu6 leaky_relu elu celu selu gelu glu silu mish sigmoid special_expit tanh hardtanh hardsigmoid "
        "hardswish hardshrink softshrink threshold erf special_erf",
    ),
    OperatorRow(
        "prelu",
        ("aten::prelu", "aten::_prelu_kernel"),
        Kind.ADJUSTABLE,
        "an activation function with a weight: the plan chooses among the float precisions",
        operands=(0, 1),
    ),
    *fixed("torch has no kernel for it in a narrow float on every device", "rrelu rrelu_with_noise"),
    *fixed(
        "its values leave the range or the resolution of a narrow float",
        "exp exp2 special_exp2 expm1 special_expm1 log log2 log10 log1p special_log1p pow float_power square rsqrt "
        "reciprocal softplus cosh sinh tan acos arccos asin arcsin acosh arccosh asinh arcsinh atanh arctanh erfinv "
        "special_erfinv erfc special_erfc special_erfcx logit special_logit xlogy special_xlogy special_xlog1py ldexp "
        "hypot frexp nextafter",
    ),
    *fixed(
        "an angle, rounded, points elsewhere: near 1000 radians one step of BF16 is 4",
        "sin cos sinc special_sinc atan arctan atan2 arctan2 polar",
    ),
    *fixed(
        "a remainder, rounded, is another remainder",
        "remainder fmod floor_divide div.Tensor_mode div.Scalar_mode divide.Tensor_mode divide.Scalar_mode",
    ),
    *fixed(
        "a special function, which torch computes in FP32 or wider",
        "lgamma special_gammaln digamma special_digamma special_psi polygamma special_polygamma mvlgamma "
        "special_multigammaln igamma igammac special_gammainc special_gammaincc i0 special_i0 special_i0e special_i1 "
        "special_i1e special_entr special_ndtr special_ndtri special_log_ndtr special_zeta special_airy_ai "
        "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 "
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_round",
    ),
)
