"""Refusal reasons: why some ATen ops have no translation, and what to use instead. Messages and
`docs/aten.md` take them from here."""

from __future__ import annotations

import torch

_COUNTED = (
    "the number of elements in its result depends on the data; fix: keep all places, and weigh "
    "those that do not count with 0"
)
_READ = (
    "it reads a number of a tensor into Python, which a graph of many batches cannot hold; fix: "
    "keep it a tensor, or give the number to the model"
)
_FACTORED = (
    "it factorises or inverts matrices, which no op of ONNX does; fix: compute it before the step "
    "and make it an input or a buffer, or write it with matmul"
)
_SPECIAL = (
    "no op of ONNX computes this function; fix: write it by a series of other ops, or compute it "
    "before the step"
)
_FOURIER = (
    "of the Fourier transforms only fft and ifft have translations, also over several dims; fix: "
    "write it with these, or compute it before the step"
)
_BACKWARD = (
    "it is the gradient of another op; fix: call that op, whose gradient the step writes itself"
)
_LOW_BITS = "it reads the bits of a number; fix: write it with abs, log2 and floor"
_OUT = "it writes into a tensor given by out=; fix: use the result that it returns without it"
_DRAWN = (
    "no generator of a graph draws from this distribution; fix: draw before the step, and make it "
    "an input of the batch"
)
_RESIZED = "it resizes its input in place; fix: make a new tensor by reshape, slicing or padding"

_UNSAID = (
    "torch leaves open which of several equally frequent values it returns, and which of its "
    "indices; fix: count them with one_hot and sum, and take argmax"
)
_RENORMED = (
    "it rescales rows of its table in place whenever they are read; fix: leave out max_norm, and "
    "divide the result by its norm"
)

_BY_REASON: dict[str, str] = {
    _COUNTED: "nonzero nonzero_static argwhere masked_select _unique _unique2 unique_dim "
    "unique_consecutive unique_dim_consecutive bincount",
    _READ: "_local_scalar_dense item equal allclose is_nonzero",
    _FACTORED: "cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky linalg_cholesky_ex "
    "linalg_cond _linalg_det linalg_det linalg_eig _linalg_eigh linalg_eigh linalg_eigvals "
    "linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor "
    "linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor "
    "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_rank linalg_pinv "
    "linalg_qr _linalg_slogdet linalg_slogdet _linalg_solve_ex linalg_solve linalg_solve_ex "
    "linalg_solve_triangular _linalg_svd linalg_svd linalg_svdvals linalg_tensorinv "
    "linalg_tensorsolve logdet _lu_with_info lu_solve lu_unpack matrix_exp nuclear_norm ormqr "
    "pinverse qr svd triangular_solve",
    _SPECIAL: "erfinv i0 igamma igammac nextafter polygamma "
    "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
    "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_hermite_polynomial_h "
    "special_hermite_polynomial_he special_i0e special_i1 special_i1e "
    "special_laguerre_polynomial_l special_legendre_polynomial_p "
    "special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 "
    "special_modified_bessel_k1 special_ndtri special_polygamma special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta",
    _FOURIER: "_fft_c2c _fft_c2r _fft_r2c fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 "
    "fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn istft stft",
    _BACKWARD: "_adaptive_avg_pool2d_backward avg_pool2d_backward convolution_backward "
    "embedding_dense_backward max_pool2d_with_indices_backward native_group_norm_backward "
    "native_layer_norm_backward",
    _LOW_BITS: "frexp hash_tensor",
    _DRAWN: "binomial cauchy geometric log_normal poisson _sample_dirichlet _standard_gamma",
    _UNSAID: "mode",
    _RENORMED: "embedding_renorm",
    _RESIZED: "resize resize_as set",
}  # fmt: skip

REASONS: dict[str, str] = {op: why for why, ops in _BY_REASON.items() for op in ops.split()}


def reason(overload: str) -> str | None:
    """Returns why an ATen overload, `nonzero.default` or `atan2.out`, has no translation; None
    where no reason is listed."""
    stem, _, which = overload.partition(".")
    packet = getattr(torch.ops.aten, stem, None)
    if packet is not None and which in packet.overloads():
        arguments = getattr(packet, which)._schema.arguments
        if any(a.kwarg_only and a.alias_info and a.alias_info.is_write for a in arguments):
            return _OUT
    return REASONS.get(stem, REASONS.get(stem.removesuffix("_")))


__all__ = ["REASONS", "reason"]
