"""Members: several heads side by side equal the same heads built alone, averaged."""

import pytest
import torch
from torch.export import Dim

import vecroute as vr
from vecroute.compose.members import Each
from vecroute.heads.inputs import Linears

SIZES = {"d_emb": 12, "depth": 3, "n_cls": 4}
OPTIONS = {
    "default": {},
    "no MLPs": {"d_mlp": 0},
    "plain MLPs": {"gated": False, "d_mlp": 5},
    "three routings": {"n_routings": 3, "n_hid": 5, "d_hid": 7},
}


def make(k=3, **options):
    """Return a head of k members in float64 without zero weights, as after training."""
    torch.manual_seed(0)
    head = vr.RoutingHead(**SIZES, **options, n_members=k).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def alone(head):
    """Return each member as a separate head, with its part of the weights."""
    heads, like = [], next(head.parameters())
    sizes = {"d_emb": head.d_emb, "depth": head.depth, "n_cls": head.n_cls}
    for m in range(head.n_members):
        single = vr.RoutingHead(**sizes, **(head.options | {"n_members": 1})).to(like.dtype)
        single.load_state_dict(dict(zip(single.state_dict(), parts(head, m), strict=True)))
        heads.append(single)
    return heads


def parts(head, m, of=lambda parameter: parameter):
    """Return the parameters of member m, or ``of`` each, in the order of a head of one member."""
    found = []
    for module in head.modules():
        if isinstance(module, Linears):
            found += [of(p)[m] for p in module.parameters()]
        elif isinstance(module, Each):
            found += [of(p) for p in module[m].parameters()]
    return found


def inputs(batch=(2,)):
    torch.manual_seed(1)
    hidden = torch.randn(*batch, 5, 3, 12, dtype=torch.float64)
    mask = torch.rand(*batch, 5) > 0.3
    mask[..., 0] = True
    return hidden, mask


@pytest.fixture(params=OPTIONS.values(), ids=OPTIONS)
def head(request):
    return make(**request.param)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
@pytest.mark.parametrize("masked", [True, False])
def test_scores_are_the_mean_of_the_members(head, batch, masked):
    hidden, mask = inputs(batch)
    mask = mask if masked else None
    each = torch.stack([single(hidden, mask) for single in alone(head)])  # [k, ..., n_cls]
    torch.testing.assert_close(head(hidden, mask), each.mean(0))
    torch.testing.assert_close(head.member_scores(hidden, mask), each)
    assert (each[0] - each[1]).abs().min() > 1e-6


def test_credit_is_the_mean_of_the_members(head):
    hidden, mask = inputs()
    routed = head.route(hidden, mask)
    each = [single.route(hidden, mask).phi for single in alone(head)]
    mean = torch.stack([phi.dense() for phi in each]).mean(0)  # [b, i, n_cls]
    torch.testing.assert_close(routed.x_out, head(hidden, mask))
    torch.testing.assert_close(routed.phi.dense(), mean)
    torch.testing.assert_close(routed.phi.column(2), mean[..., 2])
    torch.testing.assert_close(routed.phi[1].dense(), mean[1])
    scaled = vr.Credit(mean, each[0].input_mask).unit_variance().dense()  # [b, i, n_cls]
    torch.testing.assert_close(routed.phi.unit_variance().dense(), scaled)
    index = torch.arange(15) // 3
    torch.testing.assert_close(
        routed.phi.sum_groups(index).dense(), vr.Credit(mean).sum_groups(index).dense()
    )


def test_credit_can_be_saved(tmp_path):
    phi = make().route(*inputs()).phi
    phi.save(tmp_path / "credit")
    assert torch.equal(vr.Credit.load(tmp_path / "credit").dense(), phi.dense())


@pytest.mark.parametrize("bias", ["base", "votes"])
def test_contributions_are_the_mean_of_the_members_and_add_up(head, bias):
    hidden, mask = inputs()
    found = vr.contributions(head, hidden, bias=bias, input_mask=mask)
    each = [vr.contributions(single, hidden, bias=bias, input_mask=mask) for single in alone(head)]
    torch.testing.assert_close(found.values, sum(c.values for c in each) / 3)
    torch.testing.assert_close(found.base, sum(c.base for c in each) / 3)
    torch.testing.assert_close(found.output, head(hidden, mask))
    assert found.completeness_error.max() < 1e-12


def test_members_with_inputs_of_their_own_have_the_gradients_of_heads_alone(head):
    torch.manual_seed(2)
    x_inp = torch.randn(3, 2, 15, 12, dtype=torch.float64, requires_grad=True)  # [k, b, i, d]
    mask = torch.rand(3, 2, 15) > 0.3
    scores = head.side_by_side()(x_inp, mask)  # [k, b, n_cls, 1]
    scores.sin().sum().backward()
    for m, single in enumerate(alone(head)):
        x = x_inp[m].detach().requires_grad_()
        expected = single.network(x, mask[m])
        expected.sin().sum().backward()
        torch.testing.assert_close(scores[m], expected)
        torch.testing.assert_close(x_inp.grad[m], x.grad)
        for found, parameter in zip(parts(head, m, lambda p: p.grad), single.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


def test_every_member_starts_with_weights_of_its_own():
    head = vr.RoutingHead(**SIZES, n_members=3)
    first, second = (parts(head, m) for m in range(2))
    drawn = [(a, b) for a, b in zip(first, second, strict=True) if a.any()]
    assert len(drawn) > 10
    assert not any(torch.equal(a, b) for a, b in drawn)


def test_widths_by_default():
    assert vr.RoutingHead(**SIZES).options["d_mlp"] == 8
    head = vr.RoutingHead(**SIZES, n_members=2)
    assert head.options == {
        "n_hid": 4, "d_hid": 12, "d_mlp": 4, "gated": True, "n_routings": 2, "n_iters": 2,
        "implementation": "auto", "n_members": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("d_emb", "one", "several", "wide"),
    [(1, 1, 1, 1), (23, 15, 7, 30), (24, 16, 8, 32), (32, 16, 8, 40), (384, 256, 128, 512),
     (1024, 680, 336, 1360)],
)  # fmt: skip
def test_default_widths_are_multiples_of_8(d_emb, one, several, wide):
    size = SIZES | {"d_emb": d_emb}
    heads = vr.RoutingHead(**size), vr.RoutingHead(**size, n_members=2), vr.RoutingHead.wide(**size)
    assert [head.options["d_mlp"] for head in heads] == [one, several, wide]


@pytest.mark.parametrize("n_members", [0, -1, 1.5, True])
def test_a_number_of_members_that_cannot_be(n_members):
    with pytest.raises((TypeError, ValueError), match="n_members must be a positive int"):
        vr.RoutingHead(**SIZES, n_members=n_members)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_and_exported():
    head, (hidden, mask) = make(), inputs()
    torch.testing.assert_close(torch.compile(head)(hidden, mask), head(hidden, mask))
    exported = torch.export.export(head, (hidden, mask)).module()
    torch.testing.assert_close(exported(hidden, mask), head(hidden, mask))


def test_a_batch_of_as_many_samples_as_members_exports_for_any_batch():
    head = vr.RoutingHead(d_emb=8, depth=2, n_cls=2, n_members=2)
    hidden, mask = torch.randn(2, 5, 2, 8), torch.ones(2, 5, dtype=torch.bool)
    batch = Dim("batch", min=1)
    exported = torch.export.export(head, (hidden, mask), dynamic_shapes=[{0: batch}, {0: batch}]).module()
    hidden, mask = torch.randn(7, 5, 2, 8), torch.rand(7, 5) < 0.7
    torch.testing.assert_close(exported(hidden, mask), head(hidden, mask))
