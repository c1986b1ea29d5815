"""The states of a layer's weights, of a pass over the model and of a round of gradients.

Each is one attribute, set through `changed`, which allows what the table below it allows. None of
them depends on time, so the collectives issued in a state are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


def changed(state: S, new: S, follows: Mapping[S, tuple[S, ...]]) -> S:
    """The new state, which may be the same; RuntimeError if it may not follow, a bug in dmuon."""
    if new is not state and new not in follows[state]:
        allowed = ", ".join(one.name for one in follows[state])
        raise RuntimeError(
            f"internal error of dmuon: {type(state).__name__} cannot change from {state.name} to "
            f"{new.name}, only to {allowed}. Please report it, with the model's forward pass"
        )
    return new


class WeightState(Enum):
    """The state of the weights of a layer in the `dedicated` layout.

    ========  ==============  =================  =============================  ===============
    state     parameters show  buffers have      what has happened              may become
    ========  ==============  =================  =============================  ===============
    FREED     what is kept    no memory          nothing, or all uses ended     LAUNCHED
    LAUNCHED  what is kept    weights, or soon   the broadcasts were issued     IN_USE, FREED
    IN_USE    the buffers     weights            forward or backward runs       RECORDED, FREED
    RECORDED  the buffers     weights            autograd recorded a use        HELD, FREED
    HELD      the buffers     weights            as RECORDED, and nothing will  FREED
                                                 announce the backward, so they
                                                 stay until it is done
    ========  ==============  =================  =============================  ===============

    A layer in use may be broadcast again into the same buffers; this changes no state.
    """

    FREED = "freed"
    LAUNCHED = "launched"
    IN_USE = "in use"
    RECORDED = "recorded"
    HELD = "held"


WEIGHTS_FOLLOW = {
    WeightState.FREED: (WeightState.LAUNCHED,),
    WeightState.LAUNCHED: (WeightState.IN_USE, WeightState.FREED),
    WeightState.IN_USE: (WeightState.RECORDED, WeightState.FREED),
    WeightState.RECORDED: (WeightState.HELD, WeightState.FREED),
    WeightState.HELD: (WeightState.FREED,),
}


class PassState(Enum):
    """Which pass over the model has begun and not ended, on this rank.

    ========  ============================================================  =================
    state     what every rank issues while in it                            may become
    ========  ============================================================  =================
    IDLE      nothing                                                       FORWARD, BACKWARD
    FORWARD   the broadcast of each layer, in the order of registration     IDLE
    BACKWARD  the broadcast of each layer in reverse, gradients in between  IDLE
    ========  ============================================================  =================

    A pass goes back to IDLE once all of its collectives are issued, so none follows another
    directly.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


PASSES_FOLLOW = {
    PassState.IDLE: (PassState.FORWARD, PassState.BACKWARD),
    PassState.FORWARD: (PassState.IDLE,),
    PassState.BACKWARD: (PassState.IDLE,),
}


class RoundState(Enum):
    """Where the reduction of gradients is, since they were last cleared.

    =========  ==========================================================  ===================
    state      meaning                                                     may become
    =========  ==========================================================  ===================
    NONE       no round has been made                                      OPEN
    OPEN       a backward pass runs, or has raised                         DONE, OPEN_OWED
    OPEN_OWED  the same, and another round must follow                     OWED
    DONE       a round has ended; ``p.grad`` holds nothing it has not seen  OPEN, OWED, NONE
    OWED       ``p.grad`` may hold gradients that no round has seen        OPEN, NONE
    =========  ==========================================================  ===================
    """

    NONE = "none"
    OPEN = "open"
    OPEN_OWED = "open, another one owed"
    DONE = "done"
    OWED = "owed"


ROUNDS_FOLLOW = {
    RoundState.NONE: (RoundState.OPEN,),
    RoundState.OPEN: (RoundState.DONE, RoundState.OPEN_OWED),
    RoundState.OPEN_OWED: (RoundState.OWED,),
    RoundState.DONE: (RoundState.OPEN, RoundState.OWED, RoundState.NONE),
    RoundState.OWED: (RoundState.OPEN, RoundState.NONE),
}
