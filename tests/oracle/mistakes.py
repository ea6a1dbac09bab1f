"""One-place mistakes for the modelling file: what is wrong, the text replaced, its replacement."""

from __future__ import annotations

MISTAKES: tuple[tuple[str, str, str], ...] = (
    (
        "softmax of comb over first index",
        "comb = torch.softmax(comb_w * comb_scale + comb_b, dim=-1)",
        "comb = torch.softmax(comb_w * comb_scale + comb_b, dim=-2)",
    ),
    ("one Sinkhorn round only", "range(self.hc_sinkhorn_iters - 1)", "range(0)"),
    ("mHC input norm eps 1e-6", "Glm5NextTextUnweightedRMSNorm(eps=config.rms_norm_eps)", "Glm5NextTextUnweightedRMSNorm(eps=1e-6)"),
    ("post without the factor 2", "post = 2 * torch.sigmoid", "post = torch.sigmoid"),
    ("pre without hc_eps", "pre_w * pre_scale + pre_b) + self.hc_eps", "pre_w * pre_scale + pre_b)"),
    ("streams summed at the end", "hidden_streams.mean(dim=2)", "hidden_streams.sum(dim=2)"),
    ("softplus instead of bounded gate", ("if self.safe_gate_lower_bound is not None:\n            return"), ("if False:\n            return")),
    ("dt_bias after the scale", "decay_rate * g)", "decay_rate * forget_gate.view(hidden_shape) + self.dt_bias.view(1, 1, -1, self.head_dim))"),
    ("A_log negated", "decay_rate = torch.exp(A_log)", "decay_rate = torch.exp(-A_log)"),
    ("l2 eps 1e-5", "inv_norm = torch.sqrt((x * x).sum(dim=dim, keepdim=True) + eps)", "inv_norm = torch.sqrt((x * x).sum(dim=dim, keepdim=True) + 1e-5)"),
    ("output gate SiLU", 'self.activation = "sigmoid"', 'self.activation = "silu"'),
    (
        "conv taps reversed",
        ("        hidden_states.to(weight.dtype),\n        weight=weight.unsqueeze(1),"),
        ("        hidden_states.to(weight.dtype),\n        weight=weight.flip(-1).unsqueeze(1),"),
    ),
    ("k-pool without ape", "grouped_gate_scores.float() + self.index_kpool_compress_ape.float()[None, None]", "grouped_gate_scores.float()"),
    ("k-pool softmax over channels", "logits.softmax(dim=2)", "logits.softmax(dim=3)"),
    ("k-pool plain mean", "logits.softmax(dim=2)", "torch.zeros_like(logits).softmax(dim=2)"),
    ("no ReLU in the index score", "scores = F.relu(scores * self.softmax_scale)", "scores = scores * self.softmax_scale"),
    ("tail dropped", ("        if self.index_kpool_always_select_tail:\n            topk"), ("        if False:\n            topk")),
    ("index query before the norm", ("q_resid=q_resid,\n                attention"), ("q_resid=self.q_a_proj(hidden_states),\n                attention")),
    ("dense attention", "mask = selected_counts.ne(0).unsqueeze(1)", "mask = torch.ones_like(selected_counts, dtype=torch.bool).tril().unsqueeze(1)"),
    ("weights from biased scores", "topk_weights = scores.gather(1, topk_indices)", "topk_weights = scores_for_choice.gather(1, topk_indices)"),
    ("router bias ignored", "scores_for_choice = scores + self.e_score_correction_bias", "scores_for_choice = scores + 0"),
    ("groups ignored", 'masked_fill(~score_mask.bool(), float("-inf"))', "clone()"),
    ("scaling factor missing", "topk_weights = topk_weights * self.routed_scaling_factor", "topk_weights = topk_weights * 1"),
    ("normalisation flipped", ("        if self.norm_topk_prob:\n"), ("        if not self.norm_topk_prob:\n")),
    (
        "routed experts without clamp",
        ("        gate = gate.clamp(min=None, max=self.swiglu_limit)\n        up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)\n        # Simple"),
        "        # Simple",
    ),
    ("attention scale from kv_lora_rank", "self.scaling = self.qk_head_dim ** (-0.5)", "self.scaling = self.kv_lora_rank ** (-0.5)"),
)
