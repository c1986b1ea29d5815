"""Measured costs: every rank measures, the slowest counts, and all plan alike."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.comm.transport import C10dTransport
from dmuon.config import KernelOptions, PlannerOptions
from dmuon.kernel_tuning import Kernels, choose_kernels
from dmuon.measure import measured_costs
from dmuon.scheduler import cost_cache
from dmuon.scheduler.costs import CostTable, ShapeKey
from dmuon.types import ConsensusError
from dmuon.workbench import NewtonSchulzBench
from tests.distributed.harness import distributed
from tests.distributed.models import Net, batch, loss_of, seeded

CPU = torch.device("cpu")
A: ShapeKey = (4, 6, "float32")
B: ShapeKey = (8, 8, "float32")
KEYS = [A, A, A, B]
BATCHES = [(A, 1), (A, 2), (A, 3), (B, 1)]


class Bench:
    """Takes no time, and says what it is told to; notes what it was asked for."""

    def __init__(self, ms: Callable[[ShapeKey, int], float]) -> None:
        self.ms = ms
        self.prepared: set[tuple[ShapeKey, int]] = set()
        self.ns_dtypes: list[torch.dtype] = []

    def __call__(self, ns_dtype: torch.dtype, sharing: int, kernels: Kernels) -> Bench:
        self.ns_dtypes.append(ns_dtype)
        self.kernels = kernels
        return self

    def fits(self, key: ShapeKey, batch: int) -> bool:
        return True

    def prepare(self, key: ShapeKey, batch: int) -> Callable[[], float]:
        self.prepared.add((key, batch))
        return lambda: self.ms(key, batch)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all ranks, with nothing in it."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        shutil.rmtree(names[0], ignore_errors=True)


@contextmanager
def transport_of(world: int) -> Iterator[C10dTransport]:
    transport = C10dTransport(range(world))
    try:
        yield transport
    finally:
        transport.close()


def costs_of(transport, folder: Path, bench: Bench, **kwargs) -> CostTable:
    options = PlannerOptions(cache_dir=str(folder))
    table = measured_costs(transport, KEYS, CPU, options, bench=bench, **kwargs)
    everyone = transport.gather_objects(table.entries)
    assert all(entries == everyone[0] for entries in everyone)
    return table


def edit(path, change) -> None:
    """Change a cache's text as another process could have written it: with the digest that fits."""
    text = path.read_text()
    assert change(text) != text
    data = json.loads(change(text))
    path.write_text(json.dumps(data | {"digest": cost_cache._digest(data)}))


def flat(table: CostTable) -> dict[tuple[ShapeKey, int], float]:
    return {(key, b): ms for key, by in table.entries.items() for b, ms in by.items()}


@distributed(2, 4)
def test_the_slowest_rank_counts_for_each_entry(rank, world):
    slowest = {pair: i % world for i, pair in enumerate(BATCHES)}
    bench = Bench(lambda key, b: 10.0 + b + (5.0 if slowest[key, b] == rank else 0.0))
    with shared_folder() as folder, transport_of(world) as transport:
        table = costs_of(transport, folder, bench)
        assert flat(table) == {(key, b): 15.0 + b for key, b in BATCHES}
        assert f"{world} processes" in table.source
        # What was agreed on is what is kept, and what every rank finds the next time.
        again = Bench(lambda key, b: 1.0)
        assert flat(costs_of(transport, folder, again)) == flat(table)
        assert again.prepared == set()


@distributed(2, 4)
def test_all_measure_what_one_lacks(rank, world):
    with shared_folder() as root, transport_of(world) as transport:
        own = root / str(rank)  # as on machines with a cache each
        first = costs_of(transport, own, Bench(lambda key, b: 10.0 + b))
        if rank == 1:
            shutil.rmtree(own)
        everything = Bench(lambda key, b: 20.0 + rank)
        table = costs_of(transport, own, everything)
        assert everything.prepared == set(BATCHES)
        # A new time replaces a cached one, though every rank's new time counts.
        assert set(flat(table).values()) == {19.0 + world}
        assert flat(table) != flat(first)

        if rank == 0:  # one entry is lost on one rank
            (path,) = own.glob("*.json")
            key = CostTable.load(path).entries
            assert key[A].keys() == {1, 2, 3}
            edit(path, lambda text: text.replace(f'"2": {19.0 + world},', ""))
        one = Bench(lambda key, b: 1.0)
        table = costs_of(transport, own, one)
        assert one.prepared == {(A, 2)}
        assert flat(table)[A, 2] == 1.0 and flat(table)[A, 1] == 19.0 + world
        none = Bench(lambda key, b: 1.0)
        costs_of(transport, own, none)
        assert none.prepared == set()


@distributed(2)
def test_caches_that_differ_are_merged_to_the_slowest_without_measuring(rank, world):
    with shared_folder() as root, transport_of(world) as transport:
        own = root / str(rank)
        costs_of(transport, own, Bench(lambda key, b: 10.0 + b))
        if rank == 1:
            (path,) = own.glob("*.json")
            edit(path, lambda text: text.replace("12.0", "50.0").replace("11.0", "5.0"))
        none = Bench(lambda key, b: 1.0)
        expected = {(A, 1): 11.0, (A, 2): 50.0, (A, 3): 13.0, (B, 1): 11.0}
        assert flat(costs_of(transport, own, none)) == expected
        assert flat(costs_of(transport, own, none)) == expected
        assert none.prepared == set()


@distributed(2, 4)
def test_one_rank_writes_for_all_that_share_a_cache(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        with mock.patch.object(cost_cache, "add", wraps=cost_cache.add) as add:
            costs_of(transport, folder, Bench(lambda key, b: 1.0))
        assert sum(transport.gather_objects(add.call_count)) == 1


@pytest.mark.parametrize("where", ["prepare", "fits", "bench"])
@distributed(2, 4)
def test_a_rank_that_fails_to_measure_makes_all_raise(rank, world, where):
    class Broken(Bench):
        pass

    def fail(*_):
        raise RuntimeError("the device is on fire")

    bench = Broken(lambda key, b: 1.0)
    if rank == 1:
        target = {"prepare": "prepare", "fits": "fits", "bench": "__call__"}[where]
        setattr(Broken, target, fail)
    with shared_folder() as folder, transport_of(world) as transport:
        expected = RuntimeError if rank == 1 else ConsensusError
        with pytest.raises(expected, match="on fire"):
            costs_of(transport, folder, bench)
        # Nothing is left half done.
        costs_of(transport, folder, Bench(lambda key, b: 1.0))


@distributed(2)
def test_what_one_rank_did_not_reach_is_taken_from_the_other(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        bench = Bench(lambda key, b: 1.0 + rank)
        if rank == 1:
            bench.fits = lambda key, b: key == A
        table = costs_of(transport, folder, bench)
        assert flat(table) == {(A, 1): 2.0, (A, 2): 2.0, (A, 3): 2.0, (B, 1): 1.0}


@distributed(2)
def test_ranks_with_other_instructions_measure_in_float32(rank, world):
    native = [torch.bfloat16, torch.float32][rank]
    bench = Bench(lambda key, b: 1.0)
    with shared_folder() as folder, transport_of(world) as transport:
        with mock.patch("dmuon.measure.resolve_ns_dtype", return_value=native):
            costs_of(transport, folder, bench)
        assert bench.ns_dtypes == [torch.float32]
        assert all("float32" in path.name for path in folder.glob("*.json"))


@distributed(2)
def test_a_damaged_cache_is_reported_by_one_rank(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        costs_of(transport, folder, Bench(lambda key, b: 1.0))
        if rank == 0:
            (path,) = folder.glob("*.json")
            path.write_text("{")
        dist.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            costs_of(transport, folder, Bench(lambda key, b: 1.0))
        texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert len(texts) == (1 if rank == 0 else 0)
        assert all("ignored and rebuilt" in text for text in texts)


GRAM = "gram[1,3]/torch_strips/float32"
STANDARD = "standard/torch_strips/float32"


@distributed(2, 4)
def test_the_first_rank_chooses_kernels_for_all(rank, world):
    def chosen(wants, *args, **kwargs):
        assert rank == 0, "only the first rank measures kernels"
        return {w.key: dict.fromkeys((1, 2, 3), GRAM) for w in wants}, {}

    bench = Bench(lambda key, b: 1.0)
    with (
        shared_folder() as folder,
        transport_of(world) as transport,
        mock.patch("dmuon.measure.choose_kernels", chosen),
        mock.patch("dmuon.measure.resolve_ns_dtype", return_value=torch.float32),
    ):
        table = costs_of(transport, folder, bench)
        assert {table.kernel(key, b) for key, b in BATCHES} == {GRAM}
        assert bench.kernels[A][2] == GRAM
        everyone = transport.gather_objects(table.kernels)
        assert all(kernels == everyone[0] for kernels in everyone)


@distributed(2)
def test_a_cached_time_counts_only_with_the_kernel_it_was_measured_with(rank, world):
    with (
        shared_folder() as root,
        transport_of(world) as transport,
        mock.patch("dmuon.measure.resolve_ns_dtype", return_value=torch.float32),
    ):
        own = root / str(rank)
        standard = KernelOptions(method="standard")
        costs_of(transport, own, Bench(lambda key, b: 10.0 + b), kernels=standard)
        again = Bench(lambda key, b: 1.0)
        costs_of(transport, own, again, kernels=standard)
        assert again.prepared == set()
        if rank == 1:  # its times are of other kernels than the first rank has chosen
            (path,) = own.glob("*.json")
            path.write_text(path.read_text().replace(STANDARD, GRAM))
        table = costs_of(transport, own, again, kernels=standard)
        assert again.prepared == set(BATCHES)
        assert {table.kernel(key, b) for key, b in BATCHES} == {STANDARD}
        gram = Bench(lambda key, b: 2.0)
        table = costs_of(transport, own, gram, kernels=KernelOptions(method="gram[1,3]"))
        assert gram.prepared == set(BATCHES) and set(flat(table).values()) == {2.0}
        assert {table.kernel(key, b) for key, b in BATCHES} == {GRAM}


@distributed(2)
def test_a_kernel_that_cannot_run_makes_all_raise(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        expected = ValueError if rank == 0 else ConsensusError
        with pytest.raises(expected, match="'triton' cannot run on cpu"):
            kernels = KernelOptions(backend="triton")
            costs_of(transport, folder, Bench(lambda key, b: 1.0), kernels=kernels)


@distributed(2)
def test_chosen_kernels_are_remembered(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        with mock.patch("dmuon.measure.choose_kernels", wraps=choose_kernels) as choose:
            first = costs_of(transport, folder, Bench(lambda key, b: 1.0))
            dist.barrier()
            second = costs_of(transport, folder, Bench(lambda key, b: 1.0))
        assert first.kernels == second.kernels
        if rank == 0:
            known = choose.call_args_list[1].args[1]
            assert {b for by in known.values() for b in by} == {1, 2, 3}


@distributed(2)
def test_what_there_was_no_time_to_choose_is_chosen_another_time(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        seen = []

        def choose(wants, cached, model, device, dtype, options, **kwargs):
            seen.append(cached)
            return choose_kernels(wants, cached, model, device, dtype, options, **kwargs)

        none, some = KernelOptions(tune_budget_s=0.0), KernelOptions(tune_budget_s=60.0)
        with mock.patch("dmuon.measure.choose_kernels", choose):
            for kernels in (none, none, some, some):
                bench = Bench(lambda key, b: 1.0)
                costs_of(transport, folder, bench, kernels=kernels)
                dist.barrier()
        if rank == 0:
            sizes = [{b for by in cached.values() for b in by} for cached in seen]
            assert sizes == [set(), set(), set(), {1, 2, 3}]


@distributed(2)
def test_choices_among_a_few_kernels_do_not_count_for_all(rank, world):
    with shared_folder() as folder, transport_of(world) as transport:
        with mock.patch("dmuon.measure.choose_kernels", wraps=choose_kernels) as choose:
            for kernels in (KernelOptions(method="standard"), KernelOptions()):
                costs_of(transport, folder, Bench(lambda key, b: 1.0), kernels=kernels)
                dist.barrier()
        if rank == 0:
            assert [call.args[1] for call in choose.call_args_list] == [{}, {}]


SIDES: list[ShapeKey] = [(4, 6, "float32"), (4, 9, "float32"), (12, 4, "float32"), B]


@distributed(2)
def test_the_square_part_is_measured_where_widths_differ(rank, world):
    with (
        shared_folder() as folder,
        transport_of(world) as transport,
        mock.patch("dmuon.measure.resolve_ns_dtype", return_value=torch.float32),
    ):
        options = PlannerOptions(cache_dir=str(folder))

        def costs(method="gram[1,3]"):
            return measured_costs(
                transport,
                SIDES,
                CPU,
                options,
                kernels=KernelOptions(method=method),
                bench=Bench(lambda key, b: 1.0),
                squares=True,
            )

        table = costs()
        assert {key: set(by) for key, by in table.squares.items()} == {(4, "float32"): {1, 2, 3}}
        assert table.square_ms((4, 6, "float32"), 2) > 0
        everyone = transport.gather_objects(table.squares)
        assert everyone[0] == everyone[1]
        with mock.patch("dmuon.workbench.SquareBench.prepare", side_effect=AssertionError):
            assert costs().squares == table.squares
        dist.barrier()
        with (
            mock.patch("dmuon.measure.SquareBench", side_effect=RuntimeError("measured")),
            pytest.raises((RuntimeError, ConsensusError), match="measured"),
        ):
            costs("gram[2]")  # those were of another kernel


def plan_and_train(rank: int, planner: PlannerOptions) -> str:
    """The fingerprint of the plan, equal on all ranks; one step has been made under it."""
    model = seeded(Net)
    own = dmuon.dedicate_params(model, planner=planner)
    assert own.plan.cost_source.startswith("measured on ")
    (fingerprint,) = set(own.runtime.transport.gather_objects(own.plan.fingerprint()))
    opt = dmuon.Muon(model)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    own.close()
    return fingerprint


@distributed(2, 4)
def test_plans_from_measured_costs_are_equal_and_train(rank, world):
    with shared_folder() as folder, mock.patch("dmuon.api.measured_costs", measured_costs):
        planner = PlannerOptions(cache_dir=str(folder))
        first = plan_and_train(rank, planner)
        assert len(list(folder.glob("*.json"))) == 1
        # The second plan needs no measurement.
        with mock.patch.object(NewtonSchulzBench, "prepare", side_effect=AssertionError):
            assert plan_and_train(rank, planner) == first


@distributed(2)
def test_a_rank_may_keep_its_cache_where_it_likes(rank, world):
    with shared_folder() as root, mock.patch("dmuon.api.measured_costs", measured_costs):
        planner = PlannerOptions(cache_dir=str(root / str(rank)))
        dmuon.dedicate_params(seeded(Net), planner=planner).close()
        assert len(list((root / str(rank)).glob("*.json"))) == 1


@distributed(2)
def test_tables_that_differ_between_ranks_are_refused(rank, world):
    mine = CostTable("by hand", {A: {1: 1.0 + rank}}, CostTable.analytic().device)
    with pytest.raises(ValueError, match="disagree.*costs=by hand"):
        dmuon.dedicate_params(seeded(Net), costs=mine)
