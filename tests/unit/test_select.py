"""Which parameters are matrices, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize, prune, spectral_norm
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from dmuon.scheduler.select import Member, collect, trainable_parameters
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm, DmuonError, SelectionError
from tests.unit.models import Block, Conv1D, numbered, routes, tree

MUON, ADAMW = Algorithm.MUON, Algorithm.ADAMW


def by_name(named: Iterable[tuple[str, Tensor]], frozen: bool = False) -> ModelSpecs:
    """Of parameters that no module is known to hold."""
    return collect(
        [Member(name, p) for name, p in named], frozen=frozen, partial=True, allow_meta=True
    )


def with_matrix(**modules: nn.Module) -> nn.Module:
    """The given modules beside one ordinary matrix, so that the selection is never empty."""
    return nn.ModuleDict({**modules, "anchor": nn.Linear(4, 4, bias=False)})


def matrices(model: nn.Module, **options: object) -> list[tuple[str, tuple[int, int], int]]:
    """Name, shape and first element of each matrix."""
    return [(m.name, m.shape, m.start) for m in collect(model, **options).matrices]  # type: ignore[arg-type]


# ---- routes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "reason"), [
    (nn.Embedding(9, 4), "Embedding"),
    (nn.EmbeddingBag(9, 4), "EmbeddingBag"),
    (nn.LayerNorm((4, 6)), "LayerNorm"),
    (nn.Conv2d(3, 1, 3), "1 x 27 is a vector"),
    (nn.ConvTranspose1d(4, 4, 3, groups=2), "grouped transposed"),
    (nn.Conv2d(4, 8, 3, groups=4), "depthwise"),
    (nn.Conv2d(3, 8, 3), "first layer (convolution of 3 channels)"),
])  # fmt: skip
def test_modules_whose_weights_go_to_adamw_whatever_their_name(module, reason):
    spec = routes(with_matrix(projection=module))["projection.weight"]
    assert spec.algorithm is ADAMW and reason in spec.reason


@pytest.mark.parametrize(("first", "second", "reason"), [
    ("embed", "unembed", "embedding (Embedding), tied to 'unembed.weight'"),
    ("unembed", "embed", "tied to embedding 'embed.weight'"),
])  # fmt: skip
def test_a_weight_tied_to_an_embedding_goes_to_adamw(first, second, reason):
    made = {"embed": nn.Embedding(9, 4), "unembed": nn.Linear(4, 9, bias=False)}
    made["unembed"].weight = made["embed"].weight
    found = routes(with_matrix(**{name: made[name] for name in (first, second)}))
    spec = found[f"{first}.weight"]
    assert (spec.algorithm, spec.reason) == (ADAMW, reason)
    assert f"{second}.weight" not in found


WEIGHTS = "embedding.proj attention.output.dense overhead multihead blocks.0.attn.output header "
WEIGHTS += "encoder.layer.3.output.dense scores lm_head_norm"
OTHERS = "blocks.0.mlp.w1 w2 blocks.1.w13 experts.kernel experts.gate_up_proj attn.in_proj_weight"
HEADS = "lm_head head output embed_out score classifier transformer.lm_head model.decoder.lm_head "
HEADS += "classifier.dense head.layers.0 model.classifier"
BARE = "pos_embed cls_token mixer.A_log encoder.pos_embed bias weights wq weight_scale"


def test_named_like_a_weight_is_a_matrix():
    for name in (*(f"{module}.weight" for module in WEIGHTS.split()), *OTHERS.split()):
        assert routes(tree({name: (4, 6)}))[name].algorithm is MUON, name


@pytest.mark.parametrize(("name", "shape", "reason"), [
    *((f"{head}.weight", (4, 6), "head") for head in HEADS.split()),
    *((bare, s, bare.split(".")[-1]) for bare in BARE.split() for s in ((4, 6), (1, 4, 6))),
    *(("a.weight", s, f"{s[-2]} x {s[-1]}") for s in ((1, 8), (8, 1), (5, 1, 8), (5, 8, 1))),
    ("a.weight", (0, 8), "empty"),
    ("a.bias", (4,), "1-D"),
])  # fmt: skip
def test_heads_bare_parameters_and_vectors_go_to_adamw(name, shape, reason):
    spec = routes(tree({name: shape, "anchor.weight": (4, 4)}))[name]
    assert spec.algorithm is ADAMW
    assert reason in spec.reason


def nested(path: str, module: nn.Module, **beside: nn.Module) -> nn.Module:
    """The module at a dotted path, of dicts and (by numbers) of lists of it."""
    *parents, _ = path.split(".")
    for name in reversed(parents):
        module = nn.ModuleList([module] * 2) if name.isdigit() else nn.ModuleDict({name: module})
    return with_matrix(**module, **beside)


EMBED = {"embed": nn.Embedding(9, 6)}


@pytest.mark.parametrize(("name", "module", "beside", "expected"), [
    ("moe.gate.weight", nn.Linear(6, 4), {"experts": nn.Linear(6, 6)}, (MUON, "weight")),
    ("mlp.router.classifier.weight", nn.Linear(6, 4), {}, (MUON, "router")),
    ("decoder.weight", nn.Linear(6, 9), EMBED, (ADAMW, "as large as embedding 'embed.weight'")),
    ("h.0.weight", nn.Linear(6, 9), EMBED, (ADAMW, "as large as embedding")),
    ("h.0.up.weight", nn.Linear(6, 9), EMBED, (MUON, "weight")),
    ("up.weight", nn.Linear(6, 9), {"pos_embed": nn.Embedding(9, 6)}, (MUON, "weight")),
    ("up.weight", nn.Linear(6, 9), {"wpe": nn.Embedding(9, 6)}, (MUON, "weight")),
    ("conv.weight", tree({"weight": (8, 4, 3)}), {}, (MUON, "weight")),
    ("mix.weight", tree({"weight": (8, 4, 3, 3)}), {}, (MUON, "weight")),
    ("experts.weight", tree({"weight": (2, 4, 4, 3)}), {}, (MUON, "weight, 8 matrices")),
    ("fc.weight", nn.Linear(6, 9), {}, (ADAMW, "'fc'")),
    ("mlp.fc.weight", nn.Linear(6, 9), {}, (MUON, "weight")),
    ("patch_embed.proj.weight", nn.Conv2d(4, 8, 2), {}, (ADAMW, "patch embedding")),
    ("patch_embeds.0.proj.weight", nn.Conv2d(4, 8, 2), {}, (ADAMW, "patch embedding")),
])  # fmt: skip
def test_rules_that_look_at_the_rest_of_the_model(name, module, beside, expected):
    spec = routes(nested(name, module, **beside))[name]
    assert spec.algorithm is expected[0] and expected[1] in spec.reason
    assert "matrices" in expected[1] or "matrices" not in spec.reason


def test_routers_and_the_first_patch_embedding_are_told_by_what_is_beside_them():
    moe = nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": nn.Linear(6, 6)})
    assert "router" in routes(with_matrix(moe=moe))["moe.gate.weight"].reason
    stages = nn.ModuleList(nn.ModuleDict({"patch_embed": nn.Linear(6, 8)}) for _ in range(2))
    found = routes(with_matrix(stages=stages))
    assert [found[f"stages.{i}.patch_embed.weight"].algorithm for i in (0, 1)] == [ADAMW, MUON]


def test_what_a_model_calls_its_output_is_a_head():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.readout = nn.Linear(4, 4), nn.Linear(4, 9)

        def get_output_embeddings(self) -> nn.Module:
            return self.readout

    class Without(nn.Linear):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert routes(with_matrix(up=Without(4, 8)))["up.weight"].algorithm is MUON
    found = routes(torch.compile(Model()))
    assert found["readout.weight"].reason == "output head (get_output_embeddings)"
    assert found["body.weight"].algorithm is MUON


@pytest.mark.parametrize(("module", "cols"), [
    (nn.Conv1d(4, 8, 5), 20),
    (nn.Conv2d(2, 8, (2, 5)), 20),
    (nn.Conv3d(4, 8, (2, 5, 1)), 40),
    (nn.Conv2d(8, 8, 3, groups=4), 18),
    (nn.ConvTranspose1d(3, 8, 5), 15),
    (nn.ConvTranspose2d(3, 8, (2, 5)), 30),
    (nn.ConvTranspose3d(3, 8, (2, 5, 1)), 30),
])  # fmt: skip
def test_a_convolution_is_flattened_to_out_by_the_others(module, cols):
    (matrix,) = collect(nn.ModuleDict({"c": module})).matrices
    assert (matrix.name, matrix.shape) == ("c.weight", (8, cols))
    weight = module.weight.detach()
    out_first = weight.transpose(0, 1) if "Transpose" in type(module).__name__ else weight
    assert torch.equal(matrix.view(weight).reshape(8, cols), out_first.reshape(8, -1))
    # Heads cut output channels.
    heads = matrices(nn.ModuleDict({"c": module}), heads={"c.weight": 2})
    assert [shape for _, shape, _ in heads] == [(4, cols)] * 2
    assert ("[:, 0:4]" in heads[0][0]) == ("Transpose" in type(module).__name__)


# ---- splits and heads --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape", "options", "expected"), [
    ("blocks.0.qkv_proj.weight", (12, 5), {"splits": {"*.qkv_proj.weight": [6, 4, 2]}},
     [("[0:6]", (6, 5), 0), ("[6:10]", (4, 5), 30), ("[10:12]", (2, 5), 50)]),
    # of a stack, every item is cut
    ("experts.gate_up_proj", (2, 6, 3), {"splits": {"experts.*": [4, 2]}},
     [("[0][0:4]", (4, 3), 0), ("[0][4:6]", (2, 3), 12),
      ("[1][0:4]", (4, 3), 18), ("[1][4:6]", (2, 3), 30)]),
    # patterns that agree
    ("a.weight", (12, 5), {"splits": {"a.*": [6, 6]}, "heads": {"*.weight": 2}},
     [("[0:6]", (6, 5), 0), ("[6:12]", (6, 5), 30)]),
    ("experts.w1", (3, 4, 6), {}, [(f"[{i}]", (4, 6), 24 * i) for i in range(3)]),
    ("experts.w1", (1, 4, 6), {}, [("", (4, 6), 0)]),
])  # fmt: skip
def test_splits_heads_and_stacks_make_several_matrices(name, shape, options, expected):
    model = tree({name: shape})
    assert matrices(model, **options) == [(name + piece, *found) for piece, *found in expected]
    several = f", {len(expected)} matrices" if len(expected) > 1 else ""
    assert collect(model, **options).parameters[0].reason == f"weight{several}"


def test_a_form_is_what_its_sizes_say():
    """Every way to read and cut a parameter, against slicing by hand."""
    w = numbered(6, 8)
    for said, pieces in (
        ({"sizes": [2, 4]}, [w[:2], w[2:]]),
        ({"sizes": [3, 5], "dim": 1}, [w[:, :3], w[:, 3:]]),
        ({"sizes": [3, 5], "dim": -1}, [w[:, :3], w[:, 3:]]),
        ({"sizes": [3, 5], "transposed": True}, [w[:, :3].t(), w[:, 3:].t()]),
        ({"sizes": [2, 4], "transposed": True, "dim": 0}, [w[:2].t(), w[2:].t()]),
    ):
        found = collect(tree({"a.weight": (6, 8)}), splits={"a.weight": said}).matrices
        assert [m.shape for m in found] == [tuple(p.shape) for p in pieces]
        assert all(torch.equal(m.view(w), p) for m, p in zip(found, pieces, strict=True))
    stack = numbered(2, 4, 6)
    found = collect(
        tree({"w1": (2, 4, 6)}), heads={"w1": {"heads": 3, "transposed": True}}
    ).matrices
    assert [m.name for m in found][2:4] == ["w1[0][:, 4:6]", "w1[1][:, 0:2]"]
    assert torch.equal(found[3].view(stack), stack[1, :, 0:2].t())
    conv = numbered(4, 6, 3)
    found = collect(
        nn.ModuleDict({"c": nn.Conv1d(6, 4, 3)}), splits={"c.weight": {"sizes": [1, 5], "dim": 1}}
    ).matrices
    assert [m.shape for m in found] == [(4, 3), (4, 15)]
    assert torch.equal(found[1].view(conv), conv[:, 1:])


def test_interleaved_pieces_are_every_other_output():
    """Also where outputs come last, and of the experts of a stack."""
    cut = {"a": "interleaved:2", "b": {"sizes": "interleaved:3", "transposed": True},
           "e": {"sizes": "interleaved:2", "dim": -1}}  # fmt: skip
    model = tree({"a": (4, 5), "b": (5, 6), "e": (2, 3, 4)})
    specs = collect(model, select=lambda name, p: True, splits=cut)
    named = {name: p.detach() for name, p in model.named_parameters()}
    a, b, e = named.values()
    expected = {f"a[{k}::2]": a[k::2] for k in (0, 1)}
    expected |= {f"b[:, {k}::3]": b[:, k::3].T for k in (0, 1, 2)}
    expected |= {f"e[{i}][:, {k}::2]": e[i, :, k::2] for i in (0, 1) for k in (0, 1)}
    for matrix in specs.matrices:
        piece = expected.pop(matrix.name)
        assert torch.equal(matrix.view(named[matrix.name[0]]), piece)
        assert matrix.shape == piece.shape
    assert not expected
    assert specs.parameters[1].reason == "selected, 3 matrices [:, 0::3], [:, 1::3], [:, 2::3]"


@pytest.mark.parametrize(("module", "shapes"), [
    (Conv1D(12, 4), {"weight": (12, 4)}),
    (Conv1D(4, 4), {"weight": (4, 4)}),
    (tree({"weight": (4, 12), "bias": (12,)}), {"weight": (12, 4)}),
    (tree({"weight": (4, 12), "bias": (4,)}), {"weight": (4, 12)}),
    (nn.Linear(12, 4), {"weight": (4, 12)}),
    # gpt-oss; down_proj is square, and follows the other
    (tree({"gate_up_proj": (2, 4, 8), "gate_up_proj_bias": (2, 8),
           "down_proj": (2, 4, 4), "down_proj_bias": (2, 4)}),
     {"gate_up_proj[0]": (8, 4), "down_proj[0]": (4, 4)}),
    # Llama 4: without biases
    (tree({"gate_up_proj": (2, 4, 12), "down_proj": (2, 6, 4)}),
     {"gate_up_proj[0]": (12, 4), "down_proj[0]": (4, 6)}),
    # Mixtral in transformers 5
    (tree({"gate_up_proj": (2, 12, 4), "down_proj": (2, 4, 6)}),
     {"gate_up_proj[0]": (12, 4), "down_proj[0]": (4, 6)}),
])  # fmt: skip
def test_weights_stored_in_out_are_recognised_by_their_module(module, shapes):
    model = nn.ModuleDict({"experts": module})
    specs = collect(model)
    found = {m.name.removeprefix("experts."): m for m in specs.matrices}
    assert {name: found[name].shape for name in shapes} == shapes
    turned = isinstance(module, Conv1D) or any(
        m.shape != specs.parameters[m.parameter].shape[-2:] for m in found.values()
    )
    assert {m.form.is_in_out for m in found.values()} == {turned}
    if not isinstance(module, Conv1D):
        assert by_name(model.named_parameters()).matrices == specs.matrices


DIVIDES = r": the number must be an integer >= 1 that divides the 12 rows of 'a.weight'"
COUNTS = r"must map name patterns to row counts, found"
LIST = r"splits\['\*'\] = .*: it must be a list of positive counts that add up to the 12 rows"
# What one pattern says of the form does not hold for the next.
FORM = {"sizes": [6, 6], "dim": 0}
CONTRARY = {"a.*": FORM | {"transposed": True}, "*.weight": FORM}


@pytest.mark.parametrize(("options", "told"), [
    *(({"splits": {"a.weight": sizes}}, r"12 rows of 'a.weight'")
      for sizes in ([6, 4], [12, 0], [13, -1], [6.0, 6.0])),
    *(({"heads": {"a.weight": count}}, DIVIDES) for count in (5, 0, -2, 2.0, "interleaved:2")),
    ({"splits": "3,4"}, rf"splits {COUNTS} '3,4': pass"),
    ({"heads": 3}, rf"heads {COUNTS} 3: pass"),
    ({"splits": {"*": 3}}, LIST + r".*\. For equal pieces say heads=\{'\*': 2\}"),
    *(({"splits": {"*": sizes}}, r"splits\['\*'\] = 'interleaved:\d'" + DIVIDES)
      for sizes in ("interleaved:5", "interleaved:0")),
    *(({"splits": {"*": sizes}}, LIST + r".*or 'interleaved:2'$")
      for sizes in ("interleaved", "interleaved:2,3")),
    ({"splits": {"*": {"sizes": "interleaved:2", "dim": 1}}}, "the 5 columns of 'a.weight'"),
    ({"splits": {"*": {"sizes": [6, 6], "axis": 1}}}, r"must be \[512.*'axis'"),
    ({"splits": {"*": {"sizes": [6, 6], "dim": 2}}}, r"dim must be one of \[0, 1\].*found 2"),
    ({"heads": {"*": {"heads": 2, "dim": 1}}}, r"divides the 5 columns of 'a.weight'"),
    ({"splits": {"b.weight": [6, 6]}}, r"splits\['b.weight'\].*a.weight"),
    ({"heads": {"pos_embed": 2}}, r"heads\['pos_embed'\].*a.weight"),
    ({"splits": {"a.*": [6, 6]}, "heads": {"*.weight": 3}}, r"disagree"),
    ({"splits": CONTRARY}, r"disagree"),
    ({"select": "weight"}, r"select must be a function \(name, parameter\) -> bool"),
    *(({"select": lambda name, p, answer=answer: answer}, r"select\('\w+', parameter\)")
      for answer in (None, 1, torch.tensor(True))),
    ({"select": lambda name, p: False}, "not selected"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_named(options, told):
    with pytest.raises(SelectionError, match=told):
        collect(tree({"a.weight": (12, 5), "pos_embed": (12, 5)}), **options)


@pytest.mark.parametrize("options", [
    {"splits": {"*": "interleaved:3"}}, {"splits": {"*": [4, 2]}}, {"heads": {"*": 3}},
])  # fmt: skip
def test_what_would_fit_a_weight_stored_the_other_way_is_named(options):
    ((setting, ((_, given),)),) = ((k, v.items()) for k, v in options.items())
    with pytest.raises(SelectionError, match=r"If it is stored inputs first, say \{") as caught:
        collect(tree({"a.weight": (5, 6)}), **options)
    said = ast.literal_eval("{" + str(caught.value).partition("{")[2])
    assert said == {"heads" if setting == "heads" else "sizes": given, "transposed": True}
    assert collect(tree({"a.weight": (5, 6)}), **{setting: {"*": said}}).matrices
    # Not of a module that is known, nor what fits neither way.
    for model in (nn.Linear(6, 5, bias=False), tree({"a.weight": (5, 7)})):
        with pytest.raises(SelectionError, match=r"^(?!.*stored)"):
            collect(model, **options)


def test_a_fused_weight_must_be_contiguous_and_a_single_matrix_need_not():
    model = nn.Module()
    model.weight = nn.Parameter(numbered(6, 12).t())
    (matrix,) = collect(model).matrices
    assert matrix.view(model.weight).data_ptr() == model.weight.data_ptr()
    with pytest.raises(SelectionError, match=r"'weight'.*contiguous"):
        collect(model, heads={"weight": 2})


def test_weights_under_parametrizations_go_by_the_kind_of_their_module():
    """Gains beside them, embeddings and heads go to AdamW; so do hooks of older torch name them."""
    model = nn.ModuleDict({
        "embed": weight_norm(nn.Embedding(11, 8)),
        "norm": weight_norm(nn.Linear(8, 8)),
        "whole": orthogonal(nn.Linear(8, 8)),
        "conv": weight_norm(nn.Conv1d(8, 6, 3)),
        "turned": weight_norm(nn.ConvTranspose1d(8, 6, 3), dim=1),
        "pruned": prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
        "hooks": spectral_norm(nn.Linear(8, 8)),
        "older": nn.utils.weight_norm(nn.Linear(8, 8)),
        "lm_head": weight_norm(nn.Linear(8, 11)),
    })  # fmt: skip
    made = collect(model)
    routes = {p.name: (p.algorithm.value, p.reason) for p in made.parameters}
    of = "{}.parametrizations.weight.{}".format
    weight = ("muon", "weight, under a parametrization")
    for name in (
        of("norm", "original1"), of("whole", "original"), of("conv", "original1"),
        of("turned", "original1"), "pruned.weight_orig", "hooks.weight_orig",
        "older.weight_v",
    ):  # fmt: skip
        assert routes.pop(name) == weight
    gain = "'original0', a gain beside a larger one, under a parametrization"
    assert {routes[of(n, "original0")][1] for n in ("norm", "conv", "turned", "lm_head")} == {gain}
    assert routes["older.weight_g"][1] == gain.replace("original0", "g")
    assert routes[of("lm_head", "original1")][1].startswith("output head ('lm_head')")
    assert routes[of("embed", "original1")][1].startswith("embedding (")
    assert {algorithm for algorithm, _ in routes.values()} == {"adamw"}
    shapes = {m.name.split(".")[0]: m.shape for m in made.matrices}
    assert (shapes["conv"], shapes["turned"]) == ((6, 24), (6, 24))


class LowRank(nn.Module):
    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        return weight[:, :4].clone(), weight[:4].clone()


def test_factors_of_a_parametrization_are_weights_both():
    layer = nn.Linear(16, 24, bias=False)
    parametrize.register_parametrization(layer, "weight", LowRank(), unsafe=True)
    specs = collect(nn.ModuleDict({"a": layer}))
    assert [m.shape for m in specs.matrices] == [(24, 4), (4, 16)]


def test_names_that_look_like_originals_are_no_parametrizations():
    """A parameter of the user's own, beside which there is no weight that is computed."""
    linear = nn.Linear(4, 4)
    linear.low_v = nn.Parameter(torch.ones(4, 4))
    specs = collect(nn.ModuleDict({"a": linear}))
    assert [p.reason for p in specs.parameters if "low" in p.name] == [
        "bare parameter 'low_v' is not named as a weight"
    ]


def test_select_overrides_every_default_rule():
    """It is given the stripped name, as patterns are, and the parameter."""
    model = tree({"pos_embed": (4, 6), "lm_head.weight": (1, 6), "a.weight": (4, 6)})
    model.embed = nn.Embedding(9, 4)
    seen = {}
    found = routes(
        torch.compile(model),
        select=lambda name, p: seen.setdefault(name, p) is not None and name != "a.weight",
        splits={"pos_*": [1, 3]},
    )
    assert {n: s.reason for n, s in found.items() if s.algorithm is MUON} == {
        "pos_embed": "selected, 2 matrices", "lm_head.weight": "selected",
        "embed.weight": "selected",
    }  # fmt: skip
    assert (found["a.weight"].algorithm, found["a.weight"].reason) == (ADAMW, "not selected")
    assert {name: id(p) for name, p in seen.items()} == {
        name: id(p) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("shape", [(6,), (), (0, 6)])
def test_select_cannot_force_what_is_no_matrix(shape):
    model = tree({"a.weight": (4, 6), "odd": shape})
    with pytest.raises(SelectionError, match=r"'odd'.*return False"):
        collect(model, select=lambda name, p: True)


def elsewhere() -> nn.Module:
    class Elsewhere(nn.Parameter):
        device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    module = nn.Linear(4, 4, bias=False)
    module.weight = Elsewhere(torch.zeros(4, 4))
    return module


@pytest.mark.parametrize(("build", "told"), [
    (lambda: nn.Linear(4, 4, device="meta"), r"'odd.weight' is on the meta device"),
    (lambda: nn.LazyLinear(4), r"'odd.weight'.*lazy"),
    (lambda: nn.Linear(4, 4, dtype=torch.complex64), r"'odd.weight' is complex"),
    (lambda: nn.Embedding(9, 4, sparse=True), r"'odd.weight'.*sparse=False"),
    (lambda: nn.EmbeddingBag(9, 4, sparse=True), r"'odd.weight'.*sparse=False"),
    (elsewhere, r"'odd.weight' is on cuda:0 but 'anchor.weight' is on cpu"),
])  # fmt: skip
def test_parameters_that_cannot_be_handled_are_named_unless_frozen(build, told):
    model = nn.ModuleDict({"anchor": nn.Linear(4, 4, bias=False), "odd": build()})
    with pytest.raises(DmuonError, match=told):
        collect(model)
    if "lazy" not in told:  # what has no shape yet cannot be frozen
        model["odd"].requires_grad_(False)
        assert [name for name, *_ in matrices(model)] == ["anchor.weight"]


def test_a_model_without_trainable_parameters_is_refused():
    for model in (nn.Identity(), nn.Linear(4, 4).requires_grad_(False)):
        with pytest.raises(DmuonError, match=r"no trainable parameter"):
            collect(model)


def wrapped_in_module_attribute(model: nn.Module) -> nn.Module:
    """As `DistributedDataParallel` holds its model."""
    outer = nn.Module()
    outer.module = model
    return outer


@pytest.mark.parametrize("wrap", [
    torch.compile, checkpoint_wrapper, wrapped_in_module_attribute,
    lambda m: wrapped_in_module_attribute(torch.compile(checkpoint_wrapper(m))),
])  # fmt: skip
def test_wrappers_leave_no_trace_in_names_and_routes(wrap):
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"head": nn.Linear(8, 6), "body": Block()})

    inner = build()
    inner["body"].up = wrap(inner["body"].up)
    assert collect(build()) == collect(wrap(build())) == collect(inner)


def test_two_parameters_never_share_a_name():
    # A user's own attribute may be called `module`; stripping it must not merge two names.
    model = wrapped_in_module_attribute(nn.Linear(4, 4, bias=False))
    model.weight = nn.Parameter(torch.zeros(4, 4))
    assert len({p.name for p in collect(model).parameters}) == 2


# ---- properties of any selection ---------------------------------------------------------


def test_every_parameter_is_routed_once_in_order_with_a_reason():
    """Of modules that are shared, weights that are tied, and what is frozen."""
    shared, model = nn.Bilinear(2, 3, 4), nn.ModuleDict({"anchor": nn.Linear(3, 4)})
    model["head"] = nn.ModuleDict({"a": shared, "lstm": nn.LSTM(3, 4)})
    model["inner"] = nn.ModuleDict({"b": shared, "mha": nn.MultiheadAttention(4, 2)})
    model["tied"] = nn.Linear(3, 4)
    model["tied"].weight = model["anchor"].weight
    model["inner"]["mha"].requires_grad_(False)
    specs, unique = collect(model), list(model.parameters())
    named = trainable_parameters(model)
    assert [(p.name, p.shape) for p in specs.parameters] == [(n, tuple(p.shape)) for n, p in named]
    assert [id(p) for _, p in named] == [id(p) for p in unique if p.requires_grad]
    everything = specs.parameters + specs.frozen
    assert all(p.reason for p in everything)
    assert {p.algorithm for p in specs.frozen} == {Algorithm.FROZEN}
    assert sum(p.numel for p in everything) == sum(p.numel() for p in unique)
    assert {m.parameter for m in specs.matrices} == set(specs.muon_parameters())


# ---- parameters without a module ---------------------------------------------------------


NAMED = {
    "model.embed_tokens.weight": ADAMW, "transformer.wte.weight": ADAMW, "wpe.weight": ADAMW,
    "tok_embeddings.weight": ADAMW, "lm_head.weight": ADAMW, "pos_embed": ADAMW,
    "embeddings.word_embeddings.weight": ADAMW, "layers.0.o_proj.weight": MUON, "w1": MUON,
    "multi_modal_projector.linear_1.weight": MUON,
}  # fmt: skip


def test_names_alone_route_embeddings_heads_and_weights():
    size = {name: 4 if algorithm is MUON else 9 for name, algorithm in NAMED.items()}
    shapes = {name: torch.zeros(size[name], 6, requires_grad=True) for name in NAMED}
    shapes["norm.weight"] = torch.zeros(4, requires_grad=True)
    shapes["frozen.weight"] = torch.zeros(4, 6)
    specs = by_name(shapes.items())
    found = {p.name: p.algorithm for p in specs.parameters}
    assert found == NAMED | {"norm.weight": ADAMW}
    frozen = by_name(shapes.items(), frozen=True)
    assert [(p.name, p.algorithm) for p in frozen.parameters] == [("frozen.weight", MUON)]


def test_a_group_that_names_its_algorithm_wins_over_rules_and_select():
    named = [(f"p{i}", torch.zeros(4, 6, requires_grad=True)) for i in range(3)]
    said = (MUON, ADAMW, None, None)
    members = [Member(name, p, a) for (name, p), a in zip([*named, named[0]], said, strict=True)]
    specs = collect(members, select=lambda name, p: True)
    assert [(p.name, p.algorithm) for p in specs.parameters] == [
        ("p0", MUON), ("p1", ADAMW), ("p2", MUON)
    ]  # fmt: skip
    with pytest.raises(SelectionError, match=r"'bias'.*algorithm=\"adamw\""):
        collect([Member("bias", torch.zeros(4, requires_grad=True), MUON)])
