"""nemo-automodel: ``optimizer: {_target_: dmuon.integrations.nemo_automodel.DMuon, lr: 1e-3}``."""

from __future__ import annotations

import dmuon


class DMuon(dmuon.Muon):
    """`dmuon.Muon` by another name: nemo-automodel 0.7 takes every class called ``Muon`` for that
    of the package dion."""
