"""Operators whose results are integers, truth values or ranks."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = (
    *fixed(
        "its result is a truth value",
        "eq ne not_equal lt less le less_equal gt greater ge greater_equal equal isclose allclose isfinite isinf "
        "isnan isneginf isposinf isreal signbit isin all any logical_and logical_or logical_xor logical_not "
        "is_nonzero _is_all_true _is_any_true is_same_size",
    ),
    *fixed(
        "it works on integers",
        "bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ "
        "__lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ gcd lcm one_hot bincount",
    ),
    *fixed(
        "it ranks values, and rounded ones would tie",
        "argmax argmin argsort sort msort topk kthvalue mode cummax cummin searchsorted bucketize unique_consecutive "
        "unique_dim unique_dim_consecutive _unique _unique2 histc histogram histogramdd quantile nanquantile",
    ),
    *fixed(
        "it finds or counts positions",
        "nonzero nonzero_numpy nonzero_static argwhere count_nonzero where.default hash_tensor",
    ),
    *fixed(
        "its result is a number of the program, no tensor of the model",
        "item _local_scalar_dense size stride numel dim storage_offset sym_size sym_stride sym_numel "
        "sym_storage_offset sym_is_contiguous is_contiguous _shape_as_tensor _assert_async _assert_scalar "
        "_assert_tensor_metadata _functional_assert_async _functional_assert_scalar sym_constrain_range "
        "sym_constrain_range_for_size _functional_sym_constrain_range _functional_sym_constrain_range_for_size _print "
        "result_type promote_types can_cast is_floating_point is_complex is_conj is_neg is_inference is_pinned",
    ),
)
