"""Rows of elementwise operators: pointwise, integer and boolean results, random numbers.

Random streams depend on the dtype, so random operators stay as the model wrote them.
"""

from __future__ import annotations

from qsync_fx.ops.spec import Kind, OperatorRow, dependent, fixed

VALUES = "it works value by value, so it takes the precision of its inputs"


ROWS = (
    *dependent(
        VALUES,
        "abs absolute add sub subtract rsub mul multiply div divide true_divide neg negative "
        "positive addcmul addcdiv lerp maximum minimum fmax fmin clamp clamp_min clamp_max clip "
        "where copysign sign sgn nan_to_num sqrt floor ceil round trunc fix frac heaviside "
        "deg2rad rad2deg dropout native_dropout feature_dropout alpha_dropout "
        "feature_alpha_dropout _add_relu",
    ),
    *dependent(
        "an activation function: it takes the precision of its inputs",
        "relu relu6 leaky_relu elu celu selu gelu glu silu mish sigmoid special_expit tanh "
        "hardtanh hardsigmoid hardswish hardshrink softshrink threshold erf special_erf",
    ),
    OperatorRow(
        "prelu",
        ("aten::prelu", "aten::_prelu_kernel"),
        Kind.ADJUSTABLE,
        "an activation function with a weight: the plan chooses among the float precisions",
        operands=(0, 1),
    ),
    *fixed(
        "torch has no kernel for it in a narrow float on every device", "rrelu rrelu_with_noise"
    ),
    *fixed(
        "its values leave the range or the resolution of a narrow float",
        "exp exp2 special_exp2 expm1 special_expm1 log log2 log10 log1p special_log1p pow "
        "float_power square rsqrt reciprocal softplus cosh sinh tan acos arccos asin arcsin acosh "
        "arccosh asinh arcsinh atanh arctanh erfinv special_erfinv erfc special_erfc "
        "special_erfcx logit special_logit xlogy special_xlogy special_xlog1py ldexp hypot frexp "
        "nextafter",
    ),
    *fixed(
        "an angle, rounded, points elsewhere: near 1000 radians one step of BF16 is 4",
        "sin cos sinc special_sinc atan arctan atan2 arctan2 polar",
    ),
    *fixed(
        "a remainder, rounded, is another remainder",
        "remainder fmod floor_divide div.Tensor_mode div.Scalar_mode divide.Tensor_mode "
        "divide.Scalar_mode",
    ),
    *fixed(
        "a special function, which torch computes in FP32 or wider",
        "lgamma special_gammaln digamma special_digamma special_psi polygamma special_polygamma "
        "mvlgamma special_multigammaln igamma igammac special_gammainc special_gammaincc i0 "
        "special_i0 special_i0e special_i1 special_i1e special_entr special_ndtr special_ndtri "
        "special_log_ndtr special_zeta special_airy_ai special_bessel_j0 special_bessel_j1 "
        "special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 "
        "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
        "special_spherical_bessel_j0 special_chebyshev_polynomial_t "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_hermite_polynomial_h "
        "special_hermite_polynomial_he special_laguerre_polynomial_l "
        "special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w special_round",
    ),
    *fixed(
        "its result is a truth value",
        "eq ne not_equal lt less le less_equal gt greater ge greater_equal equal isclose allclose "
        "isfinite isinf isnan isneginf isposinf isreal signbit isin all any logical_and "
        "logical_or logical_xor logical_not is_nonzero _is_all_true _is_any_true is_same_size",
    ),
    *fixed(
        "it works on integers",
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
        "__and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ "
        "__irshift__ gcd lcm one_hot bincount",
    ),
    *fixed(
        "it ranks values, and rounded ones would tie",
        "argmax argmin argsort sort msort topk kthvalue mode cummax cummin searchsorted bucketize "
        "unique_consecutive unique_dim unique_dim_consecutive _unique _unique2 histc histogram "
        "histogramdd quantile nanquantile",
    ),
    *fixed(
        "it finds or counts positions",
        "nonzero nonzero_numpy nonzero_static argwhere count_nonzero where.default hash_tensor",
    ),
    *fixed(
        "its result is a number of the program, no tensor of the model",
        "item _local_scalar_dense size stride numel dim storage_offset sym_size sym_stride "
        "sym_numel sym_storage_offset sym_is_contiguous is_contiguous _shape_as_tensor "
        "_assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async "
        "_functional_assert_scalar sym_constrain_range sym_constrain_range_for_size "
        "_functional_sym_constrain_range _functional_sym_constrain_range_for_size _print "
        "result_type promote_types can_cast is_floating_point is_complex is_conj is_neg "
        "is_inference is_pinned",
    ),
    *fixed(
        "it draws random numbers, and another precision would draw others",
        "rand rand_like randn randn_like randint randint_like randperm bernoulli normal "
        "normal_functional uniform random exponential geometric cauchy log_normal poisson "
        "binomial multinomial _standard_gamma _sample_dirichlet",
    ),
)
