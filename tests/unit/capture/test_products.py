"""The compiled counter of FLOPs on single operators, against hand counts and FlopCounterMode."""

import threading

import pytest
import torch
from tests.labs.training import CACHE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from kansoku.capture.payload import products


@pytest.fixture(scope="module")
def counter():
    patch = pytest.MonkeyPatch()
    patch.setenv("KANSOKU_CACHE_DIR", str(CACHE))
    CACHE.mkdir(parents=True, exist_ok=True)
    yield products.Products(products.build(torch))
    patch.undo()


def count(counter, call, share=1.0, parts=()):
    assert counter.begin(share, parts)
    try:
        call()
        return counter.read()
    finally:
        counter.end()


def flops(counter, call, **options):
    seen = count(counter, call, **options)
    return seen.matrix + seen.attention


X = torch.randn(3, 48, 32)
Q, K, V = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24, 8)
IMAGES = torch.randn(2, 6, 9, 11)
AS_TORCH_COUNTS = {
    "matmul": lambda: X @ torch.randn(32, 7),
    "folded": lambda: torch.randn(32) @ torch.randn(3, 32, 7),
    "scores": lambda: Q @ K.transpose(-1, -2),
    "einsum": lambda: torch.einsum("bhid,bhjd->bhij", Q, K),
    "baddbmm": lambda: torch.baddbmm(torch.zeros(3, 48, 48), X, X.transpose(1, 2)),
    "addmm": lambda: torch.addmm(torch.zeros(7), torch.randn(5, 32), torch.randn(32, 7)),
    "linear": lambda: nn.Linear(32, 8)(X),
    "grouped convolution": lambda: nn.Conv2d(6, 8, 3, 2, 1, groups=2)(IMAGES),
    "transposed convolution": lambda: nn.ConvTranspose2d(6, 8, 3, 2)(IMAGES),
    "padding by name": lambda: nn.Conv1d(6, 8, 3, padding="same")(torch.randn(2, 6, 20)),
    "one image": lambda: nn.Conv2d(6, 8, (3, 1), dilation=(2, 1))(IMAGES[0]),
    "vmap": lambda: torch.vmap(lambda row: row @ torch.ones(32, 7))(X),
    "half": lambda: X.bfloat16() @ torch.randn(32, 7).bfloat16(),
}


@pytest.mark.parametrize("name", AS_TORCH_COUNTS)
def test_an_operator_as_torchs_own_counter_has_it(counter, name):
    with FlopCounterMode(display=False) as peer:
        AS_TORCH_COUNTS[name]()
    assert flops(counter, AS_TORCH_COUNTS[name]) == peer.get_total_flops() > 0


def test_attention_counts_whole_and_once(counter):
    whole = 4 * 2 * 4 * 16 * 24 * 8  # 2 products × 2 × batch × heads × queries × keys × width
    attend = functional.scaled_dot_product_attention
    assert flops(counter, lambda: attend(Q, K, V)) == whole
    assert flops(counter, lambda: attend(Q, K, V, is_causal=True)) == whole
    assert flops(counter, lambda: attend(Q, K, V, attn_mask=torch.zeros(16, 24))) == whole
    assert count(counter, lambda: attend(Q, K, V)).attentions == 1
    wide = torch.randn(2, 4, 24, 12)
    assert flops(counter, lambda: attend(Q, K, wide)) == whole / 16 * 20
    shared = (K[:, :2], V[:, :2])  # two heads of keys for four of queries
    assert flops(counter, lambda: attend(Q, *shared, enable_gqa=True)) == whole


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_every_token_passes_every_recurrent_weight(counter, make):
    layer = make(16, 24, num_layers=2, bidirectional=True)
    weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert flops(counter, lambda: layer(torch.randn(7, 5, 16))) == 2 * 35 * weights
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(7, 2, 16), [7, 3])
    assert flops(counter, lambda: layer(packed)) == 2 * 10 * weights


def test_torchs_attention_module(counter):
    """48 tokens of 3: projections of 4 · 32², a head is 8 wide; with and without its weights."""
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    whole = 2 * 144 * 4 * 32 * 32 + 4 * 3 * 48 * 48 * 32
    assert flops(counter, lambda: module(X, X, X, need_weights=False)) == whole
    assert flops(counter, lambda: module(X, X, X)) == whole


def test_autocast_counts_once(counter):
    def call():
        with torch.autocast("cpu", torch.bfloat16):
            nn.Linear(32, 8)(X)

    assert flops(counter, call) == 2 * 144 * 32 * 8


def test_attention_of_other_packages_by_the_shapes_of_its_operator(counter):
    @torch.library.custom_op("kansoku_test_flash::_flash_attn_forward", mutates_args=())
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @torch.library.custom_op("kansoku_test_flash::_flash_attn_varlen_forward", mutates_args=())
    def packed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        return q.clone()

    rows = torch.randn(2, 16, 4, 8)
    assert flops(counter, lambda: forward(rows, rows, rows)) == 4 * 2 * 16 * 16 * 32
    tokens = torch.randn(32, 4, 8)
    starts = torch.tensor([0, 16, 32], dtype=torch.int32)
    assert flops(counter, lambda: packed(tokens, tokens, tokens, starts)) == 4 * 2 * 16 * 16 * 32


def test_what_is_no_product_counts_nothing(counter):
    seen = count(counter, lambda: (X * X).sum() + nn.Embedding(4, 2)(torch.ones(3).long()).sum())
    assert (seen.matrix, seen.attention, seen.matrixes, seen.attentions) == (0, 0, 0, 0)


def test_shapes_that_are_only_found_out_count_nothing(counter):
    def fake():
        with FakeTensorMode():
            torch.randn(4, 4) @ torch.randn(4, 4)

    for call in (fake, lambda: X.to("meta") @ torch.randn(32, 7, device="meta")):
        seen = count(counter, call)
        assert seen.matrix == 0
        assert seen.traced > 0


def test_a_backward_inside_counts_nothing(counter):
    weight = torch.randn(32, 7, requires_grad=True)
    product = X @ weight
    assert flops(counter, lambda: torch.autograd.grad(product.sum(), weight)) == 0


def test_an_operator_that_fails_leaves_the_count_in_order(counter):
    def call():
        with pytest.raises(RuntimeError):
            torch.randn(2, 3) @ torch.randn(2, 3)
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(Q, K[:, :3], V)
        X @ torch.randn(32, 7)

    seen = count(counter, call)
    assert seen.matrix >= 2 * 144 * 32 * 7
    assert flops(counter, lambda: X @ torch.randn(32, 7)) == 2 * 144 * 32 * 7


def test_only_the_thread_that_began_and_only_until_the_end(counter):
    def call():
        other = threading.Thread(target=lambda: X @ torch.randn(32, 7))
        other.start()
        other.join()

    assert flops(counter, call) == 0
    counter.begin(1.0, ())
    counter.end()
    counter.end()
    X @ torch.randn(32, 7)
    assert counter.begin(1.0, ())
    assert counter.begin(1.0, ())  # a begin left open by an error is taken back
    assert counter.read().matrix == 0
    counter.end()


def test_products_change_no_bit_and_hold_no_tensor(counter):
    torch.manual_seed(3)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    results = []
    for observed in (False, True):
        torch.manual_seed(4)
        if observed:
            counter.begin(0.5, [model.linear1.weight])
        output = model(X)
        if observed:
            counter.end()
        output.sum().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_part_counts_whole_and_what_is_repeated_its_share(counter):
    whole, part = torch.randn(32, 32), torch.randn(32, 16)
    assert flops(counter, lambda: X @ whole, share=0.5) == 144 * 32 * 32
    assert flops(counter, lambda: X @ part, share=0.5, parts=[part]) == 2 * 144 * 32 * 16

    def chain():  # what is computed from a part is one: the heads of this rank
        h = functional.gelu(X @ part).view(3, 48, 2, 8).transpose(1, 2)
        h @ h.transpose(-1, -2)

    expected = 2 * 144 * 32 * 16 + 2 * 3 * 2 * 48 * 48 * 8
    assert flops(counter, chain, share=0.5, parts=[part]) == expected
