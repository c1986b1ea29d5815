"""The private names that tests reach for, in one place: a rename in the package is one line here.

Tests patch these to plant faults, to watch what is sent, or to be told what planning sees.
"""

from dmuon.__main__ import _parser as parser_of
from dmuon.api import Given, Request, assemble, mesh_topology
from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.comm.pipeline import Turns
from dmuon.comm.process_groups import solve_on_first
from dmuon.comm.transport import C10dTransport, Meter, Transport, Work, timeout_of
from dmuon.comm.transport import _Issued as IssuedWork
from dmuon.devices import SideStream
from dmuon.kernels.runner import Orthogonalizer
from dmuon.measure import _Links as LinkTimer
from dmuon.rule import Hyper, momentum_update
from dmuon.scheduler.network import parts_of
from dmuon.step.at_owners import OwnersEngine, OwnerState
from dmuon.step.on_params import ParamsEngine
from dmuon.step.operands import BlockState

__all__ = [
    "BlockState",
    "C10dTransport",
    "Given",
    "Hyper",
    "IssuedWork",
    "LinkTimer",
    "Meter",
    "Orthogonalizer",
    "OwnerState",
    "OwnersEngine",
    "ParamsEngine",
    "ParamsRuntime",
    "Request",
    "SideStream",
    "Transport",
    "Turns",
    "Work",
    "assemble",
    "mesh_topology",
    "momentum_update",
    "parser_of",
    "parts_of",
    "solve_on_first",
    "timeout_of",
]  # fmt: skip
