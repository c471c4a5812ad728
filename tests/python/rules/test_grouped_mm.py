"""`_grouped_mm`: the rows of all instances are sorted by expert in one batch."""

import pytest
import torch
import torch_autobatch as ab

EXPERTS, WIDTH, OUT = 4, 8, 16

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this PyTorch has no _grouped_mm", allow_module_level=True)


def cases(counts):
    """Returns the rows of each instance, and the end of each expert's rows."""
    xs = [torch.randn(sum(n), WIDTH, requires_grad=True) for n in counts]
    ends = [torch.tensor(n).cumsum(0).to(torch.int32) for n in counts]
    return list(zip(xs, ends, strict=True))


COUNTS = [[3, 0, 2, 1], [0, 0, 5, 0], [1, 1, 1, 1], [2, 4, 0, 3]]


@pytest.fixture(params=["rows", "columns"])
def weight(request):
    if request.param == "rows":
        return torch.randn(EXPERTS, WIDTH, OUT, requires_grad=True)
    return torch.randn(EXPERTS, OUT, WIDTH, requires_grad=True)


def multiply(x, weight, ends):
    matrices = weight if weight.shape[1] == WIDTH else weight.transpose(-2, -1)
    return torch._grouped_mm(x, matrices, offs=ends)


def test_values_and_gradients_are_eagers_in_one_batch(weight):
    data = cases(COUNTS)
    with ab.batch(adaptive=False) as scope:
        ours = [multiply(x * 1, weight, ends) for x, ends in data]
    theirs = [multiply(x, weight, ends) for x, ends in data]
    torch.testing.assert_close(ours, theirs)
    batches = [s for s in scope.report().signatures if "_grouped_mm" in s.op]
    assert sum(s.batches for s in batches) == 1
    assert batches[0].rule == "native"
    inputs = [weight, *(x for x, _ in data)]
    factors = [torch.randn_like(y) for y in theirs]
    grads = [
        torch.autograd.grad(sum((y * f).sum() for y, f in zip(ys, factors, strict=True)), inputs)
        for ys in (ours, theirs)
    ]
    torch.testing.assert_close(grads[0], grads[1])


def test_gradients_of_some_instances(weight):
    data = cases(COUNTS)
    with ab.batch(adaptive=False):
        ours = [multiply(x * 1, weight, ends) for x, ends in data]
    theirs = [multiply(x, weight, ends) for x, ends in data]
    inputs = [weight, data[1][0], data[2][0]]
    losses = [(ys[1] * ys[1]).sum() + (ys[2] * ys[2]).sum() for ys in (ours, theirs)]
    grads = [torch.autograd.grad(loss, inputs) for loss in losses]
    torch.testing.assert_close(grads[0], grads[1])


def test_one_instance_alone_and_without_gradients(weight):
    (x, ends), *_ = cases(COUNTS)
    with torch.no_grad(), ab.batch(adaptive=False):
        ours = multiply(x * 1, weight, ends) * 1
    torch.testing.assert_close(ours, multiply(x, weight, ends).detach())


def test_rows_behind_the_last_end(weight):
    """The results of rows after the last end are undefined, and the rows get no gradient."""
    data = [(torch.randn(9, WIDTH, requires_grad=True), ends) for _, ends in cases(COUNTS)[:3]]
    with ab.batch(adaptive=False):
        ours = [multiply(x * 1, weight, ends)[: ends[-1]] for x, ends in data]
    theirs = [multiply(x, weight, ends)[: ends[-1]] for x, ends in data]
    torch.testing.assert_close(ours, theirs)
    inputs = [weight, *(x for x, _ in data)]
    grads = [torch.autograd.grad(sum((y * y).sum() for y in ys), inputs) for ys in (ours, theirs)]
    for (_, ends), a, b in zip(data, grads[0][1:], grads[1][1:], strict=True):
        torch.testing.assert_close(a[: ends[-1]], b[: ends[-1]])
    torch.testing.assert_close(grads[0][0], grads[1][0])


def test_other_types_run_as_they_are(weight):
    data = cases(COUNTS)
    matrices = weight.detach().to(torch.bfloat16).requires_grad_()
    xs = [(x.detach().to(torch.bfloat16), ends) for x, ends in data]
    with ab.batch(adaptive=False):
        ours = [multiply(x * 1, matrices, ends) for x, ends in xs]
    torch.testing.assert_close(ours, [multiply(x, matrices, ends) for x, ends in xs])
