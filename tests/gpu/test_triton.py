"""The contract of the Triton kernels on a GPU, and what the interpreter cannot do."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton kernels need Triton")

from dmuon.kernels import triton_lists, triton_syrk
from dmuon.kernels.triton_syrk import TILES, Tile, tiles_for
from tests.triton_contract import *  # noqa: F403
from tests.triton_contract import BF16, F16, F32, Kernels, check_symm

GPU = Kernels("cuda", triton_syrk, triton_lists)
gpu, empty = GPU.random, GPU.empty


@pytest.fixture
def kernels() -> Kernels:
    return GPU


# ---- symmetric products --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, dtype):
    if tile not in tiles_for(torch.cuda.get_device_capability()):
        pytest.skip(f"{tile} is not offered on this GPU")
    for batch, m, k in ((1, 1024, 4096), (3, 512, 640), (2, 333, 777), (1, 1000, 1008)):
        a, bt = gpu(batch, m, k, dtype=dtype), gpu(batch, m, k, dtype=dtype)
        c = gpu(batch, m, m, dtype=dtype)
        out, plain = empty(2, batch, m, m, dtype=dtype)
        check_symm(GPU, a, bt, c, out=out, plain=plain, beta=0.5, diag=1.0, tile=tile)


def test_sizes_around_those_of_tiles():
    for m, k in itertools.product((1, 15, 16, 17, 64, 127, 128, 129, 1025), (1, 31, 64, 1000)):
        a, bt = gpu(m, k, dtype=F16), gpu(m, k, dtype=F16)
        check_symm(GPU, a, bt, out=empty(m, m, dtype=F16), diag=1.0)


@pytest.mark.parametrize(("batch", "m", "k"), [(1, 4096, 1024), (5, 1024, 2816), (64, 128, 512)])
def test_training_shapes(batch, m, k):
    x = gpu(batch, m, k, dtype=F16) / k**0.5
    out, square = empty(2, batch, m, m, dtype=F16)
    check_symm(GPU, x, x, out=out)
    check_symm(GPU, out, out.mT, out, out=square, alpha=-2.0, beta=3.0)


def test_more_than_2_31_elements():
    m = 46_400
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    a = gpu(m, 32, dtype=F16)
    out = empty(m, m, dtype=F16)
    triton_syrk.symm_mm(a, a, out=out)
    some = torch.tensor([0, 1, 4096, 30_001, m - 130, m - 1], device="cuda")
    wanted = a[some].double() @ a.double().mT
    torch.testing.assert_close(out[some].double(), wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(out[some], out[:, some].mT)


def test_coefficients_do_not_recompile():
    a, out = gpu(64, 64, dtype=F16), empty(64, 64, dtype=F16)
    tile = Tile(64, 64, 4, 2)

    def kernels() -> int:
        caches = triton_syrk.symm_kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)

    triton_syrk.symm_mm(a, a, a, out=out, alpha=0.3, beta=0.7, diag=2.0, tile=tile)
    before = kernels()
    assert before > 0
    for number in (1.0, 0.5, 16.0, -3.25):
        triton_syrk.symm_mm(a, a, a, out=out, alpha=number, beta=number, diag=number, tile=tile)
    assert kernels() == before


# ---- streams, graphs, repetition -----------------------------------------------------------


def test_a_side_stream_is_used():
    a, out = gpu(2048, 2048, dtype=F16), empty(2048, 2048, dtype=F16)
    triton_syrk.symm_mm(a, a, out=out)
    wanted = out.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The product has to wait for what its stream does before it.
        late = torch.zeros_like(a)
        for _ in range(50):
            late.add_(a, alpha=0.02).sub_(a, alpha=0.02)
        late.copy_(a)
        triton_syrk.symm_mm(late, late, out=out.zero_())
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_graph_replay():
    x = gpu(2, 100, 300, dtype=F16)
    x /= torch.linalg.matrix_norm(x.float(), keepdim=True).half()
    out, work = empty(2, 100, 100, dtype=F16), x.clone()

    def step() -> None:
        work.copy_(x)
        triton_syrk.symm_mm(work, work, out=out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


def test_the_same_bits_every_time():
    a = gpu(3, 700, 900, dtype=F16)
    buffer, grad = gpu(3, 700, 900, dtype=F32), gpu(3, 700, 900, dtype=BF16)
    found = []
    for _ in range(5):
        out, cast = empty(3, 700, 700, dtype=F16), torch.empty_like(a)
        triton_syrk.symm_mm(a, a, out=out)
        GPU.momentum(buffer.clone(), grad, cast)
        found.append((out, cast))
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], others))
