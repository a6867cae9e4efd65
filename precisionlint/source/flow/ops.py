"""Which torch names compute what, as families of ops, and what becomes of dtypes in each. Read in torch 2.13."""

from __future__ import annotations

from precisionlint.patterns import regex


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEW_OPS = names(
    """
    view reshape permute transpose t mT T H mH contiguous expand expand_as unsqueeze squeeze flatten unflatten
    repeat repeat_interleave detach detach_ clone cuda cpu roll flip chunk split tensor_split unbind narrow
    movedim moveaxis swapaxes swapdims tile broadcast_to tril triu diag diagonal requires_grad_ pin_memory
    as_strided view_as reshape_as unsqueeze_ squeeze_ transpose_ t_ tril_ triu_ data numpy tolist rearrange checkpoint wait all_gather all_reduce
    gather_from_sequence_parallel_region unfold ravel rot90 atleast_1d atleast_2d full_tensor to_local
    """
)
"""They show the values of their first input again, in its dtype."""

INDEX_OPS = names(
    """
    index_select gather masked_select take take_along_dim select
    """
)
"""They pick some of the values of their first input."""

STACKS = names(
    """
    cat concat concatenate stack hstack vstack dstack broadcast_tensors meshgrid
    """
)

SAME = names(
    """
    relu relu_ gelu silu sigmoid tanh softplus elu leaky_relu mish hardtanh swish logsigmoid dropout dropout_
    layer_norm group_norm batch_norm instance_norm rms_norm normalize neg abs absolute sign floor ceil round
    round_ trunc frac sqrt rsqrt reciprocal exp exp_ expm1 log log_ log2 log10 log1p sin cos tan sinh cosh asin
    acos atan erf erfinv exp2 sort mean var std var_mean std_mean norm vector_norm amax amin max min cummax cummin softmax
    log_softmax logsumexp logcumsumexp cumprod prod median clamp clamp_ clip clamp_min clamp_max clamp_min_
    clamp_max_ masked_fill masked_fill_ nan_to_num nan_to_num_ interpolate pad conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d embedding empty_like zeros_like
    ones_like rand_like randn_like full_like new_zeros new_ones new_empty new_full new_tensor
    scaled_dot_product_attention lerp addcmul addcdiv index_add index_add_ scatter scatter_ scatter_add
    scatter_add_ index_copy index_fill fill_ zero_ copy_ bernoulli bernoulli_ uniform_ normal_ tile sigmoid_ tanh_
    neg_ sqrt_ rsqrt_ kthvalue quantile topk huber_loss lerp_ scatter_reduce scatter_reduce_ index_reduce
    index_reduce_
    """
)
"""Their result has the dtype of their first input."""

PROMOTING = {
    "add": "add", "add_": "add", "sub": "sub", "sub_": "sub", "subtract": "sub", "mul": "mul", "mul_": "mul", "multiply": "mul", "div": "div",
    "div_": "div", "divide": "div", "true_divide": "div", "pow": "pow", "pow_": "pow", "maximum": "maximum", "minimum": "minimum",
    "fmax": "maximum", "fmin": "minimum", "matmul": "matmul", "mm": "matmul", "bmm": "matmul", "mv": "mv", "addmm": "matmul",
    "baddbmm": "matmul", "dot": "dot", "einsum": "matmul", "outer": "outer", "ger": "outer", "linear": "linear", "atan2": "atan2",
    "addbmm": "matmul", "addmm_": "matmul", "addbmm_": "matmul", "baddbmm_": "matmul", "addmv_": "matmul", "addr_": "matmul",
    "remainder": "remainder", "fmod": "remainder", "where": "where", "addr": "outer", "tensordot": "matmul", "kl_div": "loss", "mse_loss": "loss",
    "l1_loss": "loss", "smooth_l1_loss": "loss", "cosine_similarity": "cosine_similarity",
    "cov": "matmul", "logaddexp": "logaddexp", "hypot": "hypot",
}  # fmt: skip
"""Ops over several inputs, whose dtypes are promoted: torch's name -> family."""

RENAMED = {
    "clamp_": "clamp", "clip": "clamp", "clip_": "clamp", "clamp_min": "clamp", "clamp_min_": "clamp", "clamp_max": "clamp",
    "clamp_max_": "clamp", "masked_fill_": "masked_fill", "vector_norm": "norm", "absolute": "abs", "exp_": "exp", "log_": "log",
    "nan_to_num_": "nan_to_num", "index_add_": "index_add", "scatter_add_": "scatter_add", "scatter_reduce_": "scatter_reduce",
    "index_reduce_": "index_reduce",
    "sqrt_": "sqrt", "rsqrt_": "rsqrt", "relu_": "relu", "round_": "round", "lerp_": "lerp", "sigmoid_": "sigmoid", "tanh_": "tanh",
    "binary_cross_entropy": "bce", "cross_entropy": "cross_entropy", "nll_loss": "nll_loss",
    "binary_cross_entropy_with_logits": "bce_with_logits", "huber_loss": "loss",
}  # fmt: skip
IN_PLACE = frozenset(
    {"round_", "lerp_", "index_add_", "scatter_add_", "masked_fill_", "clamp_", "clamp_min_", "clamp_max_"}
)

REDUCING = frozenset({"sum", "cumsum", "nansum"})
"""Over integers they give int64."""

LOSSES = frozenset({"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"})

TESTS = names(
    """
    isnan isinf isfinite eq ne lt le gt ge equal any all isclose allclose logical_and logical_or logical_not
    is_nonzero
    """
)
INDICES = names(
    """
    argmax argmin argsort multinomial nonzero searchsorted bucketize randint randperm one_hot numel
    """
)

FACTORIES = names(
    """
    zeros ones empty full rand randn linspace logspace eye tensor as_tensor scalar_tensor
    """
)
NUMBERS = names(
    """
    item size dim ndim ndimension element_size __len__ stride
    """
)

CASTS = {
    "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16", "int": "int32", "long": "int64", "bool": "bool",
    "short": "int16", "byte": "uint8",
}  # fmt: skip

MODULES = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "BCELoss": "bce", "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss",
    "Identity": "view", "Dropout": "dropout", "Flatten": "view", "Sigmoid": "sigmoid", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
    "Tanh": "tanh", "Softplus": "softplus", "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm",
    "BCEWithLogitsLoss": "bce_with_logits", "CosineSimilarity": "cosine_similarity",
}  # fmt: skip
"""torch.nn's modules that compute one op of their input; all others are layers, whose results follow their weights."""

MODULE_ITSELF = frozenset(
    {*CASTS, "to", "type", "cuda", "cpu", "train", "eval", "requires_grad_", "apply", "share_memory", "to_empty"}
)
"""Methods of modules that return the module."""

FP32_ON_CUDA = names(
    """
    softmax log_softmax logsumexp exp expm1 log log2 log10 log1p pow square_pow rsqrt reciprocal sum cumsum
    cumprod prod norm layer_norm group_norm rms_norm loss nll_loss cross_entropy cosh sinh tan acos asin softplus
    erfinv renorm cdist normalize bce_with_logits cosine_similarity
    """
)
"""Families that autocast on CUDA runs in fp32. ``sqrt``, ``mean``, ``var`` and products are not among them; ``square()`` is, as it calls
pow. (cross_entropy has no kernel of its own there: its result is fp32, its log-softmax is in the dtype of the logits, see
rules/half-arithmetic/loss-on-half-logits.md.)"""
FP32_ON_CPU = frozenset({"prod", "loss", "nll_loss", "cross_entropy", "bce", "bce_with_logits"})
"""Families that autocast on the CPU runs in fp32: softmax, exp, pow, sums and norms are not among them."""
HALF_ON_CPU = names(
    """
    matmul linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d scaled_dot_product_attention
    """
)
HALF_ON_CUDA = HALF_ON_CPU | {"mv"}
"""Families that autocast runs in half."""

DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16", "fp16": "float16",
    "bf16": "bfloat16", "fp32": "float32", "cfloat": "complex64",
}  # fmt: skip
"""Other names of dtypes."""

SQUARES = regex(r"([\w.]+),\1->([\w.]*)")
"""An equation of products of what stands at one place: its dimensions, and those that are left."""


def adds_squares(equation: object) -> bool:
    """Whether ``einsum`` adds up squares: ``"...d,...d->..."``."""
    found = SQUARES.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    return found is not None and set(found[2]) < set(found[1])
