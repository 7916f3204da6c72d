"""Linear algebra, Fourier transforms, and complex and sparse tensors, which torch computes in no narrow float."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = (
    *fixed(
        "linear algebra needs FP32: rounding errors grow with the condition of the matrix",
        "cholesky cholesky_inverse cholesky_solve det logdet slogdet inverse pinverse geqrf orgqr ormqr qr svd "
        "lu_solve lu_unpack _lu_with_info triangular_solve matrix_exp matrix_power linalg_cholesky linalg_cholesky_ex "
        "linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product "
        "linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
        "linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_power "
        "linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_polar linalg_qr linalg_slogdet linalg_solve "
        "linalg_solve_ex linalg_solve_triangular "
        "linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander vander",
    ),
    *fixed(
        "a Fourier transform needs FP32: each result adds all inputs up",
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2 "
        "fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_fftshift fft_ifftshift "
        "fft_fftfreq fft_rfftfreq stft istft",
    ),
    *fixed(
        "sparse tensors stay as they are", "to_sparse to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_dense"
    ),
    *fixed(
        "complex numbers have no narrow format",
        "complex real imag angle conj _conj _conj_copy conj_physical _conj_physical view_as_complex "
        "view_as_complex_copy view_as_real view_as_real_copy",
    ),
)
