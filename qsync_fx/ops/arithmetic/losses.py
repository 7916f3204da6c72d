"""Losses. Small differences of a loss steer training, so a loss and what goes into it stay in FP32."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "a loss and its inputs stay in FP32",
    "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward mse_loss l1_loss "
    "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div ctc_loss _ctc_loss "
    "poisson_nll_loss soft_margin_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward "
    "margin_ranking_loss hinge_embedding_loss cosine_embedding_loss triplet_margin_loss",
    loss=True,
)
