"""Families of kernels: names as CUDA, CUTLASS, PyTorch, FBGEMM and vLLM write them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kansoku.catalog.kernels import kernel_rules


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64> >(Flash_fwd_params)", "attention"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn", "matrix product"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "matrix product"),
        ("Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", "matrix product"),
        ("sm80_xmma_fprop_implicit_gemm_f16f16", "matrix product"),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float>", "convolution"),
        ("void bn_fw_tr_1C11_kernel_NCHW<float>", "normalisation"),
        ("multimem_all_reduce_kernel<bf16, 16>", "custom all-reduce"),
        ("void vllm::cross_device_reduce_1stage<bf16, 4>", "custom all-reduce"),
        ("void at::native::lamb_update_kernel<float>", "optimizer"),
        ("multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float> >", "optimizer"),
        ("void cub::DeviceReduceSingleTileKernel<Policy600, float*>", "reduction"),
        ("triton_red_fused_add_mean_3", "generated"),
        ("something_else_entirely", "other"),
        # A C++ lambda is no LAMB, FBGEMM no matrix product, a conversion no convolution.
        (
            ("void at::native::vectorized_elementwise_kernel<4, at::native::sqrt_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}>(int)"),
            "elementwise",
        ),
        (
            ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda()#2}>(int)"),
            "copy and layout",
        ),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)", "embedding"),
        (
            "void split_embedding_codegen_forward_unweighted_kernel<float, fbgemm_gpu::Half>",
            "embedding",
        ),
        (
            ("std::enable_if<(8>0)&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
            "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>"),
            "normalisation",
        ),
    ],
)  # fmt: skip
def test_families(name, family):
    assert kernel_rules().family(name) == family
    assert kernel_rules().family(name) == family  # the same from memory


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("cudaStreamIsCapturing", True),
        ("cudaEventRecord", True),
        ("hipGetLastError", True),
        ("__cudaPushCallConfiguration", True),
        ("cudaLaunchKernel", False),
        ("cudaMemcpyAsync", False),
        ("cudaStreamSynchronize", False),
    ],
)
def test_calls_that_launch_nothing(name, idle):
    assert kernel_rules().is_idle_call(name) is idle


def test_a_name_is_searched_in_its_first_4096_characters():
    # Whole names would let a hostile file cost minutes: patterns with gaps are quadratic.
    assert kernel_rules().family("x" * 4096 + "gemm") == "other"
    assert kernel_rules().family("x" * 4092 + "gemm") == "matrix product"


PATTERNS = [
    rule
    for rules in ("sync_names", "idle_calls", "collective_names", "operations", "families")
    for rule in getattr(kernel_rules(), rules)
    if rule.pattern
]


@pytest.mark.parametrize("rule", PATTERNS, ids=[rule.pattern for rule in PATTERNS])
@given(data=st.data())
def test_where_a_pattern_is_found_stands_what_it_needs(rule, data):
    name = data.draw(st.from_regex(re.compile(rule.pattern, re.ASCII)))
    assert any(need in name for need in rule.needs)
