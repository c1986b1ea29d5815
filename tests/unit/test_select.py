"""Which parameters are matrices, and why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import canonical_name
from dmuon.types import Algorithm, DmuonError, SelectionError
from tests.unit.models import Block, numbered, routes, tree

MUON, ADAMW = Algorithm.MUON, Algorithm.ADAMW


def with_matrix(**modules: nn.Module) -> nn.Module:
    """The given modules beside one ordinary matrix, so that the selection is never empty."""
    return nn.ModuleDict({**modules, "anchor": nn.Linear(4, 4, bias=False)})


# ---- by module type ----------------------------------------------------------------------


@pytest.mark.parametrize("module", [nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)])
def test_embeddings_go_to_adamw_by_type_whatever_their_name(module):
    spec = routes(with_matrix(projection=module))["projection.weight"]
    assert spec.algorithm is ADAMW
    assert type(module).__name__ in spec.reason


def test_a_linear_named_embedding_is_a_matrix():
    assert routes(with_matrix(embedding=nn.Linear(4, 6)))["embedding.weight"].algorithm is MUON


@pytest.mark.parametrize("embedding_first", [True, False])
def test_a_weight_tied_to_an_embedding_goes_to_adamw(embedding_first):
    model = nn.Module()
    names = ["embed", "unembed"] if embedding_first else ["unembed", "embed"]
    for name in names:
        module = nn.Embedding(9, 4) if name == "embed" else nn.Linear(4, 9, bias=False)
        model.add_module(name, module)
    model.unembed.weight = model.embed.weight
    model.anchor = nn.Linear(4, 4)
    found = routes(model)
    spec = found[f"{names[0]}.weight"]
    assert spec.algorithm is ADAMW
    assert "tied to embedding 'embed.weight'" in spec.reason
    assert f"{names[1]}.weight" not in found


def test_biases_and_norms_go_to_adamw():
    found = routes(with_matrix(linear=nn.Linear(4, 4), norm=nn.LayerNorm(4)))
    for name in ("linear.bias", "norm.weight", "norm.bias"):
        assert (found[name].algorithm, found[name].reason) == (ADAMW, "1-D")


# ---- by name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "attention.output.dense.weight",
        "overhead.weight",
        "multihead.weight",
        "blocks.0.attn.output.weight",
        "encoder.layer.3.output.dense.weight",
        "header.weight",
        "scores.weight",
        "lm_head_norm.weight",
        "blocks.0.mlp.w1",
        "w2",
        "blocks.1.w13",
        "experts.kernel",
        "experts.gate_up_proj",
        "experts.down_proj",
        "attn.in_proj_weight",
        "lora.v_weight",
    ],
)
def test_named_like_a_weight_is_a_matrix(name):
    assert routes(tree({name: (4, 6)}))[name].algorithm is MUON


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "head.weight",
        "output.weight",
        "embed_out.weight",
        "score.weight",
        "classifier.weight",
        "transformer.lm_head.weight",
        "model.decoder.lm_head.weight",
        "classifier.dense.weight",
        "head.layers.0.weight",
        "model.classifier.weight",
    ],
)
def test_output_heads_go_to_adamw(name):
    spec = routes(tree({name: (4, 6), "anchor.weight": (4, 4)}))[name]
    assert spec.algorithm is ADAMW
    assert "head" in spec.reason


@pytest.mark.parametrize(
    "name",
    [
        "pos_embed",
        "cls_token",
        "A_log",
        "mixer.A_log",
        "encoder.pos_embed",
        "bias",
        "weights",
        "wq",
        "weight_scale",
    ],
)
@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6)])
def test_a_bare_parameter_goes_to_adamw_with_its_name_as_reason(name, shape):
    spec = routes(tree({name: shape, "anchor.weight": (4, 4)}))[name]
    assert spec.algorithm is ADAMW
    assert name.rsplit(".", 1)[-1] in spec.reason


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (1, 1), (5, 1, 8), (5, 8, 1)])
def test_a_vector_in_disguise_goes_to_adamw(shape):
    spec = routes(tree({"a.weight": shape, "anchor.weight": (4, 4)}))["a.weight"]
    assert spec.algorithm is ADAMW
    assert f"{shape[-2]} x {shape[-1]}" in spec.reason


def test_an_empty_weight_goes_to_adamw():
    spec = routes(tree({"a.weight": (0, 8), "anchor.weight": (4, 4)}))["a.weight"]
    assert (spec.algorithm, spec.reason) == (ADAMW, "empty")


# ---- shapes of matrices ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "rows", "cols"),
    [
        (nn.Conv1d(3, 8, 5), 8, 15),
        (nn.Conv2d(3, 8, (2, 5)), 8, 30),
        (nn.Conv3d(3, 8, (2, 5, 1)), 8, 30),
        (nn.Conv2d(6, 6, 3, groups=6), 6, 9),
        (nn.ConvTranspose1d(3, 8, 5), 8, 15),
        (nn.ConvTranspose2d(3, 8, (2, 5)), 8, 30),
        (nn.ConvTranspose3d(3, 8, (2, 5, 1)), 8, 30),
    ],
)
def test_a_convolution_is_flattened_to_out_by_rest(module, rows, cols):
    (matrix,) = collect(nn.ModuleDict({"c": module})).matrices
    assert (matrix.name, matrix.shape) == ("c.weight", (rows, cols))
    weight = module.weight.detach()
    out_first = weight.transpose(0, 1) if "Transpose" in type(module).__name__ else weight
    torch.testing.assert_close(
        matrix.view(weight).reshape(rows, cols), out_first.reshape(rows, -1), rtol=0, atol=0
    )


def test_a_convolution_with_one_output_channel_is_a_vector():
    assert routes(with_matrix(c=nn.Conv2d(3, 1, 3)))["c.weight"].algorithm is ADAMW


def test_a_3d_parameter_is_a_stack_of_matrices():
    specs = collect(tree({"experts.w1": (3, 4, 6)}))
    assert [(m.name, m.shape, m.start) for m in specs.matrices] == [
        ("experts.w1[0]", (4, 6), 0),
        ("experts.w1[1]", (4, 6), 24),
        ("experts.w1[2]", (4, 6), 48),
    ]
    assert specs.parameters[0].reason == "weight, 3 matrices"


def test_a_stack_of_one_is_one_matrix_of_the_last_two_dims():
    specs = collect(tree({"experts.w1": (1, 4, 6)}))
    (matrix,) = specs.matrices
    assert (matrix.name, matrix.shape) == ("experts.w1", (4, 6))
    assert matrix.view(torch.zeros(1, 4, 6)).shape == (4, 6)


def test_the_same_3d_shape_means_different_things_in_and_out_of_a_convolution():
    model = nn.Module()
    model.conv = nn.Conv1d(4, 3, 6, bias=False)
    model.w1 = nn.Parameter(torch.zeros(3, 4, 6))
    found: dict[str, list[tuple[int, int]]] = {}
    for matrix in collect(model).matrices:
        found.setdefault(matrix.name.split("[")[0], []).append(matrix.shape)
    assert found == {"w1": [(4, 6)] * 3, "conv.weight": [(3, 24)]}


# ---- splits and heads --------------------------------------------------------------------


def test_splits_make_one_matrix_of_each_row_range():
    specs = collect(
        tree({"blocks.0.qkv_proj.weight": (12, 5)}), splits={"*.qkv_proj.weight": [6, 4, 2]}
    )
    assert [(m.name, m.shape, m.start) for m in specs.matrices] == [
        ("blocks.0.qkv_proj.weight[0:6]", (6, 5), 0),
        ("blocks.0.qkv_proj.weight[6:10]", (4, 5), 30),
        ("blocks.0.qkv_proj.weight[10:12]", (2, 5), 50),
    ]


def test_heads_make_equal_row_ranges():
    specs = collect(tree({"a.weight": (12, 5), "b.weight": (8, 5)}), heads={"a.*": 3})
    assert [(m.name, m.rows) for m in specs.matrices] == [
        ("a.weight[0:4]", 4),
        ("a.weight[4:8]", 4),
        ("a.weight[8:12]", 4),
        ("b.weight", 8),
    ]


def test_splits_of_a_stack_cut_every_item():
    specs = collect(tree({"experts.gate_up_proj": (2, 6, 3)}), splits={"experts.*": [4, 2]})
    assert [(m.name, m.start) for m in specs.matrices] == [
        ("experts.gate_up_proj[0][0:4]", 0),
        ("experts.gate_up_proj[0][4:6]", 12),
        ("experts.gate_up_proj[1][0:4]", 18),
        ("experts.gate_up_proj[1][4:6]", 30),
    ]


def test_splits_of_a_convolution_cut_its_output_channels():
    model = nn.ModuleDict({"c": nn.Conv1d(3, 8, 5, bias=False)})
    assert [m.shape for m in collect(model, heads={"c.weight": 2}).matrices] == [(4, 15), (4, 15)]


def test_a_pattern_is_matched_against_the_stripped_name():
    model = torch.compile(tree({"qkv.weight": (6, 3)}))
    assert len(collect(model, splits={"qkv.weight": [4, 2]}).matrices) == 2


@pytest.mark.parametrize("sizes", [[6, 4], [6, 6, 1], [12, 0], [13, -1], [6.0, 6.0]])
def test_row_sizes_must_be_positive_and_add_up(sizes):
    with pytest.raises(SelectionError, match=r"12 rows of 'a.weight'"):
        collect(tree({"a.weight": (12, 5)}), splits={"a.weight": sizes})


@pytest.mark.parametrize("count", [5, 0, -2, 2.0])
def test_heads_must_divide_the_rows(count):
    with pytest.raises(SelectionError, match=r"does not divide the 12 rows of 'a.weight'"):
        collect(tree({"a.weight": (12, 5)}), heads={"a.weight": count})


@pytest.mark.parametrize("kind", ["splits", "heads"])
def test_a_pattern_that_matches_no_matrix_is_refused_with_the_names_there_are(kind):
    model = tree({"a.weight": (12, 5), "pos_embed": (12, 5)})
    for pattern in ("b.weight", "pos_embed"):
        with pytest.raises(SelectionError, match=rf"{kind}\['{pattern}'\].*a.weight"):
            collect(model, **{kind: {pattern: [6, 6] if kind == "splits" else 2}})


def test_patterns_that_disagree_are_refused_and_equal_ones_are_not():
    model = tree({"a.weight": (12, 5)})
    assert len(collect(model, splits={"a.*": [6, 6]}, heads={"*.weight": 2}).matrices) == 2
    with pytest.raises(SelectionError, match=r"disagree"):
        collect(model, splits={"a.*": [6, 6]}, heads={"*.weight": 3})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"splits": "3,4"}, r"splits must map name patterns to row counts, found '3,4': pass"),
        ({"heads": 3}, r"heads must map name patterns to row counts, found 3: pass"),
        ({"splits": {"weight": 3}}, r"splits\['weight'\] must be a list of row counts"),
        ({"splits": {"weight": "35"}}, r"splits\['weight'\] must be a list of row counts"),
        ({"splits": {"weight": ["3", 5]}}, r"\['3', 5\] must be positive row counts"),
        ({"splits": {"weight": [3, 4]}}, r"8 rows of 'weight'; they add up to 7"),
        ({"splits": {"weight": [9, -1]}}, r"\[9, -1\] must be positive row counts"),
        ({"select": "weight"}, r"select must be a function \(name, parameter\) -> bool"),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings, told):
    with pytest.raises(SelectionError, match=told):
        collect(nn.Linear(6, 8, bias=False), **settings)


def test_a_transposed_convolution_cannot_be_split():
    model = nn.ModuleDict({"c": nn.ConvTranspose1d(3, 8, 5)})
    with pytest.raises(SelectionError, match=r"'c.weight'.*transposed"):
        collect(model, heads={"c.weight": 2})


def test_a_fused_weight_must_be_contiguous_and_a_single_matrix_need_not():
    model = nn.Module()
    model.weight = nn.Parameter(numbered(6, 12).t())
    (matrix,) = collect(model).matrices
    assert matrix.view(model.weight).data_ptr() == model.weight.data_ptr()
    with pytest.raises(SelectionError, match=r"'weight'.*contiguous"):
        collect(model, heads={"weight": 2})


# ---- select= -----------------------------------------------------------------------------


def test_select_overrides_every_default_rule():
    model = tree({"pos_embed": (4, 6), "lm_head.weight": (4, 6), "a.weight": (4, 6)})
    model.embed = nn.Embedding(9, 4)
    found = routes(model, select=lambda name, p: name != "a.weight")
    assert {n for n, s in found.items() if s.algorithm is MUON} == {
        "pos_embed", "lm_head.weight", "embed.weight",
    }  # fmt: skip
    assert found["a.weight"].reason == "not selected"
    assert found["pos_embed"].reason == "selected"


def test_select_is_given_the_stripped_name_and_the_parameter():
    seen = {}
    model = tree({"a.weight": (4, 6), "b.bias": (4,)})
    collect(torch.compile(model), select=lambda name, p: seen.setdefault(name, p).ndim == 2)
    assert {name: id(p) for name, p in seen.items()} == {
        name: id(p) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("shape", [(6,), (), (0, 6)])
def test_select_cannot_force_what_is_no_matrix(shape):
    model = tree({"a.weight": (4, 6), "odd": shape})
    with pytest.raises(SelectionError, match=r"'odd'.*return False"):
        collect(model, select=lambda name, p: True)


def test_select_may_choose_a_row_or_a_column():
    specs = collect(tree({"a.weight": (1, 6), "b.weight": (6, 1)}), select=lambda name, p: True)
    assert [m.shape for m in specs.matrices] == [(1, 6), (6, 1)]


@pytest.mark.parametrize("answer", [None, 1, torch.tensor(True)])
def test_select_must_answer_with_a_bool(answer):
    with pytest.raises(SelectionError, match=r"select\('a.weight', parameter\)"):
        collect(tree({"a.weight": (4, 6)}), select=lambda name, p: answer)


def test_an_empty_selection_is_refused_with_the_reason_of_every_parameter():
    model = tree({"lm_head.weight": (4, 6), "norm.weight": (4,), "pos_embed": (3, 4)})
    with pytest.raises(SelectionError) as error:
        collect(model)
    for name in ("lm_head.weight", "norm.weight", "pos_embed"):
        assert name in str(error.value)
    with pytest.raises(SelectionError, match=r"not selected"):
        collect(tree({"a.weight": (4, 6)}), select=lambda name, p: False)


# ---- what cannot be handled --------------------------------------------------------------


def test_the_meta_device_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(DmuonError, match=r"'0.weight' is on the meta device"):
        collect(model)


def test_a_lazy_module_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(DmuonError, match=r"'1.weight'.*lazy"):
        collect(model)


def test_a_complex_parameter_is_refused_unless_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False, dtype=torch.complex64))
    with pytest.raises(DmuonError, match=r"'1.weight' is complex"):
        collect(model)
    model[1].requires_grad_(False)
    assert [m.name for m in collect(model).matrices] == ["0.weight"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_unless_frozen(kind):
    embedding = kind(9, 4, sparse=True)
    model = with_matrix(embed=embedding)
    with pytest.raises(SelectionError, match=r"'embed.weight'.*sparse=False"):
        collect(model)
    embedding.requires_grad_(False)
    assert [m.name for m in collect(model).matrices] == ["anchor.weight"]


def test_parameters_on_two_devices_are_refused_by_name():
    class Elsewhere(nn.Parameter):
        device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = Elsewhere(torch.zeros(4, 4))
    with pytest.raises(DmuonError, match=r"'1.weight' is on cuda:0 but '0.weight' is on cpu"):
        collect(model)


def test_a_model_without_trainable_parameters_is_refused():
    for model in (nn.Identity(), nn.Linear(4, 4).requires_grad_(False)):
        with pytest.raises(DmuonError, match=r"no trainable parameter"):
            collect(model)


# ---- names -------------------------------------------------------------------------------


def wrapped_in_module_attribute(model: nn.Module) -> nn.Module:
    """As `DistributedDataParallel` holds its model."""
    outer = nn.Module()
    outer.module = model
    return outer


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        checkpoint_wrapper,
        wrapped_in_module_attribute,
        lambda m: wrapped_in_module_attribute(torch.compile(checkpoint_wrapper(m))),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap):
    plain = Block()
    names = [p.name for p in collect(plain).parameters]
    inner_wrapped = Block()
    inner_wrapped.up = wrap(inner_wrapped.up)
    for model in (wrap(plain), inner_wrapped):
        assert [p.name for p in collect(model).parameters] == names


def test_wrapped_and_plain_models_are_routed_alike():
    def build() -> nn.Module:
        return nn.ModuleDict({"head": nn.Linear(4, 6), "body": nn.Linear(4, 4)})

    assert collect(wrapped_in_module_attribute(build())) == collect(build())


def test_two_parameters_never_share_a_name():
    # A user's own attribute may be called `module`; stripping it must not merge two names.
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4, 4))
    model.module = nn.Linear(4, 4, bias=False)
    names = [p.name for p in collect(model).parameters]
    assert len(names) == 2
    assert len(set(names)) == 2


def test_canonical_name_strips_components_not_substrings():
    assert canonical_name("my_module.modules.0.module_list") == "my_module.modules.0.module_list"


# ---- properties of any selection ---------------------------------------------------------


def test_frozen_parameters_are_listed_apart_and_never_matrices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    specs = collect(model)
    assert [p.name for p in specs.frozen] == ["0.weight", "0.bias"]
    assert all(p.algorithm is Algorithm.FROZEN and p.reason for p in specs.frozen)
    assert [p.name for p in specs.parameters] == ["1.weight", "1.bias"]


def test_a_shared_module_counts_once():
    linear = nn.Linear(4, 4)
    specs = collect(nn.ModuleDict({"a": linear, "b": linear}))
    assert [p.name for p in specs.parameters] == ["a.weight", "a.bias"]


_MODULES = st.sampled_from(
    [
        lambda: nn.Linear(3, 5),
        lambda: nn.Linear(5, 1),
        lambda: nn.Embedding(7, 3),
        lambda: nn.Conv1d(2, 3, 2),
        lambda: nn.ConvTranspose2d(2, 3, 2),
        lambda: nn.LayerNorm(4),
        lambda: nn.Bilinear(2, 3, 4),
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        lambda: nn.LSTM(3, 4),
        lambda: tree({"w1": (2, 3, 4), "pos_embed": (1, 5, 4), "gate": ()}),
    ]
)


@st.composite
def models(draw) -> nn.Module:
    """Modules of many kinds, some shared, some tied, some frozen."""
    root = nn.ModuleDict({"anchor": nn.Linear(3, 4)})
    made: list[nn.Module] = []
    for i, build in enumerate(draw(st.lists(_MODULES, max_size=6))):
        shared = draw(st.booleans()) and made
        module = draw(st.sampled_from(made)) if shared else build()
        if draw(st.integers(0, 4)) == 0:
            module.requires_grad_(False)
        made.append(module)
        parent = draw(st.sampled_from(["", "head", "inner"]))
        if parent and parent not in root:
            root[parent] = nn.ModuleDict()
        (root[parent] if parent else root)[f"m{i}"] = module
    return root


@settings(max_examples=60)
@given(models())
def test_every_parameter_is_routed_exactly_once_with_a_reason(model):
    specs = collect(model)
    unique = list(model.parameters())
    assert len(specs.parameters) == sum(p.requires_grad for p in unique)
    assert len(specs.frozen) == sum(not p.requires_grad for p in unique)
    assert all(p.reason for p in specs.parameters + specs.frozen)
    assert sorted(specs.adamw_parameters() + specs.muon_parameters()) == list(
        range(len(specs.parameters))
    )
    assert {m.parameter for m in specs.matrices} == set(specs.muon_parameters())
    everything = specs.parameters + specs.frozen
    assert sum(p.numel for p in everything) == sum(p.numel() for p in unique)
    assert len({m.name for m in specs.matrices}) == len(specs.matrices)


@settings(max_examples=60)
@given(models())
def test_specs_follow_the_order_of_trainable_parameters(model):
    named = trainable_parameters(model)
    specs = collect(model)
    assert [(p.name, p.shape) for p in specs.parameters] == [(n, tuple(p.shape)) for n, p in named]
    by_name = dict(model.named_parameters(remove_duplicate=False))
    assert all(by_name[name] is p for name, p in named)


def assert_matrices_tile(model: nn.Module, **options: object) -> None:
    specs = collect(model, **options)  # type: ignore[arg-type]
    parameters = [p for _, p in trainable_parameters(model)]
    for index in specs.muon_parameters():
        p = parameters[index].detach()
        p.copy_(numbered(*p.shape))
        seen = []
        for matrix in specs.matrices:
            if matrix.parameter != index:
                continue
            view = matrix.view(p)
            assert view.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
            assert (view.shape[0], view.numel()) == (matrix.rows, matrix.numel)
            assert matrix.transposed or view.flatten()[0] == matrix.start
            seen.append(view.flatten())
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(float(p.numel())))


@settings(max_examples=40)
@given(models())
def test_views_of_matrices_tile_their_parameter(model):
    assert_matrices_tile(model)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cols=st.integers(2, 6),
    stack=st.one_of(st.none(), st.integers(1, 4)),
)
def test_views_of_split_matrices_tile_their_parameter(sizes, cols, stack):
    shape = (sum(sizes), cols) if stack is None else (stack, sum(sizes), cols)
    model = tree({"a.weight": shape})
    assert_matrices_tile(model, select=lambda name, p: True, splits={"a.weight": sizes})
    assert_matrices_tile(model, select=lambda name, p: True, heads={"a.weight": sum(sizes)})


@pytest.mark.parametrize("convolution", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_view_of_a_channels_last_convolution_writes_to_it(convolution):
    module = convolution(3, 4, 2).to(memory_format=torch.channels_last)
    (matrix,) = collect(nn.ModuleDict({"c": module})).matrices
    matrix.view(module.weight.detach()).fill_(7.0)
    assert bool((module.weight == 7.0).all())
