"""The live modules that hold parameters say how these are updated, in whatever form they come."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dmuon
from dmuon.types import OwnershipError, SelectionError
from tests.unit.models import Mixed, TinyGPT, assert_bitwise, clone, tokens, train, tree, weights

Form = Callable[[nn.Module], Any]


def halves(given: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Two groups, as layers are given rates of their own."""
    entries = list(given)
    for part in (entries[::2], entries[1::2]):
        yield {"params": part, "weight_decay": 0.0}


FORMS: dict[str, Form] = {
    "named": lambda m: m.named_parameters(),
    "bare": lambda m: m.parameters(),
    "groups of pairs": lambda m: list(halves(m.named_parameters())),
    "groups of bare": lambda m: list(halves(m.parameters())),
    "by their last names": lambda m: {
        p: (n, p) for n, p in m.named_parameters(remove_duplicate=False)
    }.values(),
}


def routes(given: Any, **dedicate: Any) -> dict[str, Any]:
    """By name: the algorithm and its reason, and the matrices; nothing is planned."""
    found = dmuon.Muon(given, dedicate=dedicate)._run.groups.routes
    return {
        name: (spec.algorithm, spec.reason, [(m.shape, m.form, m.start) for m in matrices])
        for name, (spec, matrices) in found.items()
    }


def alike(given: Any, model: nn.Module, by_the_same_names: bool = False, **dedicate: Any) -> None:
    expected = routes(model, **dedicate)
    found = routes(given, **dedicate)
    assert sorted(map(str, found.values())) == sorted(map(str, expected.values()))
    assert all(found[name] == expected[name] for name in found.keys() & expected.keys())
    assert not by_the_same_names or found.keys() == expected.keys()


class Peculiar(nn.Module):
    """Where names and modules tell different things."""

    def __init__(self) -> None:
        super().__init__()
        self.mtp = nn.Linear(8, 40, bias=False)
        self.embed = nn.Embedding(40, 8)
        self.mtp.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.ModuleDict({"down": nn.Conv1d(7, 7, 3)}) for _ in range(2))
        self.word_embeddings = nn.Linear(8, 8, bias=False)
        self.conv_proj = nn.Linear(8, 6)
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Headed(nn.Module):
    """A head that only `get_output_embeddings` names, with adapters in it, and ones elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(self.adapted() for _ in range(2))
        self.decode = self.adapted()

    def adapted(self) -> nn.Module:
        module = nn.Linear(8, 8)
        module.lora_A, module.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        return module

    def get_output_embeddings(self) -> nn.Module:
        return self.decode


def computed() -> nn.Module:
    """A weight that is computed from others, and the last stage of a pipeline."""
    model = nn.ModuleDict({"a": parametrizations.weight_norm(nn.Linear(6, 5))})
    model["word_embeddings"] = nn.Linear(8, 30, bias=False)
    return model


SMALL = {
    "TinyGPT": TinyGPT, "Mixed": Mixed, "Peculiar": Peculiar, "Headed": Headed,
    "computed": computed,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", SMALL)
def test_every_form_is_routed_as_the_model(name, form):
    model = SMALL[name]()
    alike(form(model), model, form is not FORMS["by their last names"])


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": torch.compile,
    "in an attribute": lambda m: nn.ModuleDict({"net": m}),
    "twice": lambda m: nn.ModuleDict({"a": nn.ModuleDict({"net": m})}),
    "beside a frozen one": lambda m: nn.ModuleDict({
        "net": m, "teacher": copy.deepcopy(m).requires_grad_(False)
    }),
    "beside a trained one": lambda m: nn.ModuleDict({"net": m, "critic": nn.Linear(3, 3)}),
    "in a list": lambda m: nn.ModuleList([nn.Linear(3, 3), m]),
}  # fmt: skip


@pytest.mark.parametrize("name", ["Peculiar", "Headed", "computed"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_what_is_around_a_model_changes_no_route(name, wrap):
    model = SMALL[name]()
    expected = sorted(map(str, routes(model).values()))
    around = wrap(model)
    for form in FORMS.values():
        found = [re.sub(r"\b(a\.|net\.|1\.)+", "", str(r)) for r in routes(form(model)).values()]
        assert sorted(found) == expected, around


@pytest.mark.parametrize("part", ["lora", "trunk", "decode", "trunk.1.lora_B"])
def test_a_part_is_routed_as_in_its_model(part):
    """Adapters: all else is frozen."""
    model = Headed().requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name and part in name)
    given = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = dmuon.Muon(list(model.named_parameters()))._run.groups.routes
    found = dmuon.Muon(list(given.values()))._run.groups.routes
    assert [(s.algorithm, s.reason) for s, _ in found.values()] == [
        (whole[name][0].algorithm, whole[name][0].reason) for name in given
    ]
    for name in given:
        assert ("get_output_embeddings" in whole[name][0].reason) is name.startswith("decode")


def test_a_single_layer_and_the_layers_of_a_list_belong_to_their_model():
    model = tree({"out.weight": (9, 6)})
    model.embed = nn.Embedding(9, 6)
    model.layers = nn.ModuleList(
        nn.ModuleDict({"score": nn.Linear(6, 6), "mix": nn.Linear(6, 4)}) for _ in range(3)
    )
    expected = routes(model)
    assert "as large as embedding" in expected["out.weight"][1]
    assert routes([model.out.weight]) == {"out.weight": expected["out.weight"]}
    for i, layer in enumerate(model.layers):
        found = routes(layer.parameters())
        assert found == {n: expected[n] for n in found} and f"layers.{i}.score.weight" in found


def test_two_models_of_one_optimizer_and_one_of_two():
    generator, critic = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
    both = nn.ModuleDict({"generator": generator, "critic": critic})
    assert {*routes(generator.parameters())} == {f"generator.{n}" for n in routes(generator)}
    del both
    found = routes([*generator.parameters(), *critic.parameters()])
    assert {*found} == {n for name in routes(critic) for n in (name, f"1.{name}")}
    other = nn.Linear(5, 3)
    opt = dmuon.Muon([*generator.parameters(), *other.parameters()])
    for p in (*generator.parameters(), *other.parameters()):
        p.grad = torch.ones_like(p)
    before = other.weight.detach().clone()
    opt.step()
    assert not torch.equal(before, other.weight)


def test_nothing_stays_alive_because_something_else_is_frozen():
    gc.freeze()
    model = Peculiar()
    model.around = [model]  # only the collector can free it
    opt = dmuon.Muon(model.parameters())
    gone = weakref.ref(model), weakref.ref(opt)
    del model, opt
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


# Modules that the caller does not keep. Of lists the model decides how parameters are updated.
DROPPED: dict[str, Form] = {
    "a list of children": lambda m: nn.ModuleList(m.children()),
    "a sequence of children": lambda m: nn.Sequential(*m.children()),
    "parameters of a list": lambda m: [*nn.ModuleList(m.children()).parameters()],
    "two lists": lambda m: [
        {"params": nn.ModuleList([*m.children()][i::2]).parameters()} for i in range(2)
    ],
    "around": Around,
    "compiled": torch.compile,
}  # fmt: skip

ALL_FORMS = {name: FORMS[name] for name in ("bare", "groups of pairs")} | DROPPED | {
    "module": lambda m: m,
    "roles": lambda m: [
        {"params": [p for n, p in m.named_parameters() if ("blocks" in n and p.ndim > 1) is muon],
         "use_muon": muon} for muon in (True, False)
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", ALL_FORMS.values(), ids=ALL_FORMS)
@pytest.mark.parametrize("where", ["groups", "module", "both"])
def test_parameters_that_a_framework_exchanges_are_trained(where, form):
    """In the groups, for those of a copy, while the module lives that the optimizer was made of; in
    the module alone, as `fully_shard` and `to_empty` do; in both, as accelerate does."""
    model = TinyGPT()
    opt = dmuon.Muon(form(model), lr=0.02, weight_decay=0.0)
    trained = copy.deepcopy(model) if where == "groups" else model
    before = weights(model)
    made = {}
    for module, its in zip(model.modules(), trained.modules(), strict=True):
        for name, p in list(module.named_parameters(recurse=False)):
            made[p] = nn.Parameter(p.detach().clone())
            setattr(its, name, made[p])
    if where != "module":
        for group in opt.param_groups:
            group["params"] = [made[p] for p in group["params"]]
    twin = clone(trained)
    train(trained, opt, tokens(), range(2))
    train(twin, dmuon.Muon(twin, lr=0.02, weight_decay=0.0), tokens(), range(2))
    assert_bitwise(weights(trained), weights(twin))
    assert opt.state.keys() == set(trained.parameters())
    if where == "groups":
        assert_bitwise(weights(model), before)


@pytest.mark.parametrize("kind", ["dict", "module", "one"])
def test_what_holds_a_models_parameters_once_more_is_not_the_model(kind):
    """Routing is that of the model: its embeddings and head go to AdamW."""
    model = TinyGPT()
    named = {name.replace(".", "_"): p for name, p in model.named_parameters()}
    if kind == "dict":
        copy = nn.ParameterDict(named)
    elif kind == "one":
        copy = [nn.ParameterDict({"w": p}) for p in named.values()]
    else:
        copy = nn.Module()
        for name, p in named.items():
            copy.register_parameter(name, p)
    alike(model.parameters(), model, by_the_same_names=True)
    assert copy


def test_a_parameter_that_no_module_holds_any_more_needs_a_gradient():
    model = TinyGPT()
    opt = dmuon.Muon(model.parameters())
    dropped = model.blocks[1]
    model.blocks = model.blocks[:1]
    train(model, opt, tokens(), range(1))  # `dropped` lives
    assert dropped is not None
    for p in [*(opt := dmuon.Muon(model := TinyGPT())).param_groups[0]["params"]]:
        p.grad = torch.ones_like(p)
    model.blocks = model.blocks[:1]
    opt.step()
    opt = dmuon.Muon(model := TinyGPT())
    model.blocks = model.blocks[:1]
    with pytest.raises(OwnershipError, match=r"no module holds parameter 'blocks\.1\..*afterwards"):
        train(model, opt, tokens(), range(1))
    # With the whole model gone there is nothing that should be trained.
    assert dmuon.Muon(TinyGPT()).report().plan.specs.matrices


def parameter(*shape: int) -> Tensor:
    return nn.Parameter(torch.randn(shape))


def test_a_stack_or_a_convolution_that_no_module_holds_is_refused():
    named = [("down.weight", parameter(7, 7, 3)), ("up.weight", parameter(6, 4))]
    ways = r"pass the model.*dedicate_params\(model\) first.*algorithm="
    with pytest.raises(SelectionError, match=rf"'down\.weight' of shape \[7, 7, 3\].*{ways}"):
        dmuon.Muon(named)
    assert len(routes(named, splits={"down.weight": [3, 4]})["down.weight"][2]) == 14
    assert len(routes(named, select=lambda n, p: True)["down.weight"][2]) == 7
    with pytest.raises(OwnershipError, match=r"a param group has|names"):
        dmuon.Muon([{"params": [named[0]]}, {"params": [named[1][1]]}])
    roles = [{"params": [named[0][1]], "algorithm": "muon"}]
    assert len(routes(roles)["param_groups.0.0"][2]) == 7


def test_splits_and_heads_go_by_the_names_that_are_found():
    model = Mixed()
    settings = {"splits": dict(model.splits), "heads": dict(model.heads)}
    for form in FORMS.values():
        alike(form(model), model, **settings)
