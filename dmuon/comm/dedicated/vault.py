"""What one rank keeps of a model in the `dedicated` layout, and how it is read directly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from dmuon.comm.dedicated.homes import Cell, Group, LiveCarrier, placeholder
from dmuon.comm.dedicated.module_groups import ModuleGroup
from dmuon.comm.dedicated.routes import Carrier, Run, Slices, carriers_of
from dmuon.comm.transport import Transport
from dmuon.dtensors import local_cell
from dmuon.types import OwnershipError

__all__ = ["Vault", "shed_on_meta"]


@torch.no_grad()
def shed_on_meta(slices: Slices, parameters: Sequence[nn.Parameter], rank: int) -> None:
    """Placeholders on the meta device: `to_empty` then allocates what is kept here only."""
    _, shard, tensor = slices.grid.place(rank)
    for p in slices.plan.specs.muon():
        runs = slices.runs(p, tensor)
        if runs and all(run.shard != shard for run in runs):
            cell = local_cell(parameters[p])
            cell.data = placeholder(cell)


class Vault:
    """The dedicated parameters' cells and carriers, in ``groups`` in the order of registration.

    Making one takes over the weights: what this rank keeps goes into carriers, and placeholders
    take the place of the rest.
    """

    def __init__(
        self,
        slices: Slices,
        modules: Sequence[ModuleGroup],
        parameters: Sequence[nn.Parameter],
        rank: int,
        transport: Transport,
        param_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self._slices = slices
        self._transport = transport
        self._param_dtype = param_dtype
        self._device = device
        self._specs = slices.plan.specs.parameters
        _, self._shard, self._tensor = slices.grid.place(rank)
        self.cells: dict[int, Cell] = {}
        self._where: dict[int, tuple[LiveCarrier, int]] = {}  # its carrier, and where in it
        self._pins: dict[int, int] = {}
        self.groups: list[Group] = []
        muon = set(slices.plan.specs.muon())
        with torch.no_grad():
            for spec in modules:
                members = tuple(p for p in spec.parameters if p in muon)
                live = [
                    self._carry(carrier, parameters)
                    for carrier in carriers_of(slices, members, self._tensor)
                ]
                cells = [self.cells[p] for p in members]
                matrices = frozenset(i for p in members for i in slices.matrices_of[p])
                group = Group(spec.name, members, live, cells, matrices=matrices)
                group.expected = spec.uses
                self.groups.append(group)
        self.group_of = {p: group for group in self.groups for p in group.parameters}

    def _carry(self, carrier: Carrier, parameters: Sequence[nn.Parameter]) -> LiveCarrier:
        stored: torch.dtype = getattr(torch, carrier.dtype)
        live = LiveCarrier(carrier, self._param_dtype or stored, self._shard, self._device)
        for p, start, numel in carrier.cells:
            cell = local_cell(parameters[p])
            shape = self._slices.shape(p, self._tensor)
            values = cell.detach()
            if values.numel() == numel:  # not so where it was made on the meta device
                live.keep(start, values.reshape(-1))
            if live.is_home:
                home = live.stored(start, numel).view(shape) if numel else values.view(shape)
            else:
                home = torch.empty((0, *shape[1:]), dtype=stored, device=self._device)
            self.cells[p] = Cell(cell, home, live.cells[p].view(shape))
            self._where[p] = live, start
            self.cells[p].rest()
        live.release()
        return live

    def casts(self, parameter: int) -> bool:
        """Whether a parameter is used in another dtype than it is kept in."""
        cell = self.cells[parameter]
        return cell.view.dtype is not cell.home.dtype

    def weight_of(self, matrix: int) -> Tensor:
        """This rank's part of a matrix, flat: a view of what is kept here."""
        live, start = self._where[self._slices.plan.specs.matrices[matrix].parameter]
        part = self._slices.part(matrix, self._tensor)
        if not part.numel:
            return live.kept.narrow(0, 0, 0)
        return live.stored(start + part.start, part.numel)

    # ---- what users may have done --------------------------------------------------------

    def check(self) -> None:
        """Follow weights that were moved.

        Raises:
            OwnershipError: a weight has another shape, dtype or device than it is kept in, or was
                replaced by other values, which ranks without it cannot have followed.
        """
        for p, cell in self.cells.items():
            if cell.pinned is not None or self.group_of[p].in_use:
                continue
            data, home = cell.tensor, cell.home
            alike = (data.dtype, data.device) == (home.dtype, home.device)
            if alike and data.data_ptr() == home.data_ptr():
                continue
            local = local_cell(data.detach())
            if not alike or not torch.equal(local, home):
                raise OwnershipError(
                    f"parameter {self._specs[p].name!r} is now {list(local.shape)} {data.dtype} on "
                    f"{data.device}, by an assignment to its data; it was kept as "
                    f"{list(home.shape)} {home.dtype} on {home.device}. Move or convert the model "
                    "before dmuon.dedicate_params(model), and change values in place inside "
                    "`with own.materialized(module):`"
                )
            cell.rest()

    # ---- direct reading ------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, parameters: Iterable[int]) -> list[Tensor]:
        """Whole weights (tensor-parallel slices) in the dtype in which they are kept.

        What is home comes as it is, not as a copy. A collective call along shards.
        """
        found, works = [], []
        for p in parameters:
            live, start = self._where[p]
            whole = self.cells[p].home
            if not live.is_home:
                shape = self._slices.shape(p, self._tensor)
                whole = torch.empty(shape, dtype=whole.dtype, device=self._device)
            for run in self._slices.runs(p, self._tensor):
                piece = whole.view(-1).narrow(0, run.start, run.numel)
                if run.shard == self._shard and not live.is_home:
                    piece.copy_(live.stored(start + run.start, run.numel))
                works.append(self._transport.broadcast(piece, run.shard, tag="materialized"))
            found.append(whole)
        for work in works:
            work.wait()
        return found

    def pin(self, parameters: Sequence[int]) -> None:
        """Have these parameters whole until `unpin`; may be nested."""
        fresh = [p for p in parameters if not self._pins.get(p)]
        for p, whole in zip(fresh, self.gather(fresh), strict=True):
            self.cells[p].pinned = whole
            if not self.group_of[p].in_use:
                self.cells[p].rest()
        for p in parameters:
            self._pins[p] = self._pins.get(p, 0) + 1

    @torch.no_grad()
    def unpin(self, parameters: Sequence[int]) -> None:
        """Placeholders again; what was written is kept where it is kept."""
        for p in parameters:
            self._pins[p] -= 1
            if self._pins[p]:
                continue
            cell, (live, start) = self.cells[p], self._where[p]
            whole, cell.pinned = cell.pinned, None
            if whole is not None and not live.is_home:
                for run in self._kept_runs(p):
                    part = whole.view(-1).narrow(0, run.start, run.numel)
                    live.stored(start + run.start, run.numel).copy_(part)
            if not self.group_of[p].in_use:
                cell.rest()

    def _kept_runs(self, p: int) -> list[Run]:
        return [run for run in self._slices.runs(p, self._tensor) if run.shard == self._shard]

    def is_pinned(self, parameter: int) -> bool:
        return bool(self._pins.get(parameter))

    def restore(self) -> None:
        """Give every rank the whole weights for good, group by group; a collective call."""
        for group in self.groups:
            for cell, whole in zip(group.cells, self.gather(group.parameters), strict=True):
                cell.tensor.data = whole
