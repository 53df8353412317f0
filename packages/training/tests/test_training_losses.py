"""Losses of microbatches, weighed, make the mean of one process over the whole batch; what cannot is a typed error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig, PipelineError, WithLoss
from pipegrid.schedules.errors import StageOutputError
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline
from pipegrid.training.pipeline.counts import MICROBATCHES, sums_of
from pipegrid.training.pipeline.losses import GivenLoss, OwnLoss, require_mean, sum_of, sum_on_host
from pipegrid.training.pipeline.microbatches import Share, microbatch, shared_microbatches
from pipegrid.training.pipeline.rows import Rows
from stages_kit.gradients import require_gradients

from .kit.jobs import counted

CPU, LENGTH, CLASSES = torch.device("cpu"), 6, 5


def each_of(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def tokens(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens_by_sum(logits, labels):
    return each_of(logits, labels).sum() / (labels != -100).sum()


def tokens_by_mask(logits, labels):
    counted = labels != -100
    return (each_of(logits, labels) * counted).sum() / counted.sum()


def rows(logits, labels):
    return (each_of(logits, labels).sum(1) / (labels != -100).sum(1)).mean()


def rows_by_weights(logits, labels):
    return (each_of(logits, labels) / (labels != -100).sum(1, keepdim=True)).sum() / len(labels)


def padded(logits, labels):
    return each_of(logits, labels).mean()


def following(loss):
    return lambda logits, labels: loss(logits[:, :-1], labels[:, 1:])


MEANS = (tokens, tokens_by_sum, tokens_by_mask, rows, rows_by_weights, padded)


def drawn(seed, sizes, *, padding=True, alike=False):
    """A batch of rows with 2 labels or more, and its logits in microbatches of ``sizes`` rows."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    labels = torch.randint(0, CLASSES, (count, LENGTH), generator=generator)
    if padding:
        lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
        labels[torch.arange(LENGTH) >= lengths] = -100
    logits = torch.randn(count, LENGTH, CLASSES, generator=generator, dtype=torch.float64)
    return (logits * (not alike)).requires_grad_(), labels


def weighed(losses, logits, labels, sizes, beside=None):
    """The gradient of a step in which the microbatches have those losses, one object for each replica; and its mean."""
    parts = [microbatch({"labels": each}, Share(), CPU) for each in labels.split(sizes)]
    counts = counted(sums_of(parts))
    found = [
        losses[number % len(losses)](output, part, counts)
        for number, (output, part) in enumerate(zip(outputs_of(losses[0], logits, labels, sizes), parts, strict=True))
    ]
    total = sum(loss if beside is None else loss + beside for loss, _, _ in found) / sum(each for _, each, _ in found)
    told = sum_on_host([each for _, _, each in found])
    assert told == pytest.approx(sum_of([each for _, _, each in found]).tolist(), rel=1e-12, nan_ok=True)
    require_mean(told, counts.numbers()[MICROBATCHES], attached=beside is not None)
    return torch.autograd.grad(total, logits)[0], told[0] / told[1]


def outputs_of(loss, logits, labels, sizes):
    own = getattr(loss, "own", None)
    for some, given_labels in zip(logits.split(sizes), labels.split(sizes), strict=True):
        yield SimpleNamespace(loss=None if own is None else own(some, given_labels), logits=some)


def own_loss(mean):
    found = OwnLoss()
    found.own = mean
    return found


def of_mean(mean):
    return GivenLoss(lambda output, batch: mean(output.logits, batch["labels"]))


def of_sum(count):
    """A sum of squares of logits, and what it counts."""
    return GivenLoss(lambda output, batch: (output.logits.square().sum(), count(output, batch["labels"])))


def require_step(losses, mean, logits, labels, sizes):
    expected = mean(logits, labels)
    gradient, value = weighed(losses, logits, labels, sizes)
    torch.testing.assert_close(value, expected.item(), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-9, atol=1e-12)


STEPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.booleans()),
    min_size=1,
    max_size=3,
)


@given(mean=st.sampled_from(MEANS), shifted=st.booleans(), own=st.booleans(), replicas=st.integers(1, 2), steps=STEPS)
def test_a_mean_is_that_of_one_process_or_an_error(mean, shifted, own, replicas, steps):
    """Over tokens or rows, by a user's function or the model's own, in steps with padding and without."""
    by_rows = mean in (rows, rows_by_weights)
    mean = following(mean) if shifted else mean
    losses = [own_loss(mean) if own else of_mean(mean) for _ in range(replicas)]
    for seed, sizes, padding in steps:
        logits, labels = drawn(seed, sizes, padding=padding)
        try:
            require_step(losses, mean, logits, labels, sizes)
        except StageOutputError:
            assert (own, by_rows) == (True, True), "rows that nothing tells from tokens until others come"
            return


def test_what_the_recipes_of_the_world_return_is_known():
    """A text in each microbatch, of unequal lengths, from the first step: no error, and no wrong rule."""
    sizes = [1, 1, 1, 1]
    logits, labels = drawn(3, sizes)
    for mean in (tokens, tokens_by_sum, tokens_by_mask, following(tokens), following(tokens_by_sum)):
        require_step([own_loss(mean)], mean, logits, labels, sizes)
        require_step([of_mean(mean)], mean, logits, labels, sizes)
    for mean in (padded, following(padded)):
        require_step([own_loss(mean)], mean, logits, labels, sizes)


@pytest.mark.parametrize("mean", [tokens, following(tokens)])
def test_a_head_that_starts_at_zero_is_told_by_gradients(mean):
    sizes = [2, 1, 2]
    logits, labels = drawn(5, sizes, alike=True)
    require_step([own_loss(mean)], mean, logits, labels, sizes)
    require_step([of_mean(mean)], mean, logits, labels, sizes)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("mean", [rows, rows_by_weights])
def test_rows_that_nothing_tells_from_tokens_are_an_error_where_it_matters(mean, first):
    own = own_loss(mean)
    if first:
        require_step([own], mean, *drawn(1, [1, 1], padding=False), [1, 1])
    with pytest.raises(StageOutputError, match=r"over all labels or rows.* Give more rows to a microbatch"):
        weighed([own], *drawn(2, [1, 1, 1]), [1, 1, 1])
    require_step([own_loss(mean)], mean, *drawn(2, [3, 2]), [3, 2])


def test_weights_and_curricula_that_come_later_are_an_error_in_their_step():
    """The weights of tokens are one at first; a z loss is added where there is padding."""
    own, plain = OwnLoss(), tokens_by_sum
    (logits, labels), sizes = drawn(1, [2, 2], padding=False), [2, 2]
    own.own = plain
    require_step([own], plain, logits, labels, sizes)
    weights = torch.rand(4, LENGTH, generator=torch.Generator().manual_seed(0)).double()
    part = microbatch({"labels": labels, "w": weights}, Share(), CPU)
    counts = counted(sums_of([part]))
    loss = (each_of(logits, labels) * weights).sum() / weights.sum()
    with pytest.raises(StageOutputError, match=r"what it is a mean over is not known"):
        own(SimpleNamespace(loss=loss, logits=logits), part, counts)
    own.own = lambda logits, labels: plain(logits, labels) + 0.1 * (labels == -100).any() * logits.logsumexp(-1).mean()
    with pytest.raises(StageOutputError, match=r"earlier microbatches had a mean over"):
        weighed([own], *drawn(2, [2, 2]), [2, 2])


def test_a_mean_that_no_rule_makes_is_an_error_with_the_numbers():
    def contrastive(output, batch):
        return F.cross_entropy(output.logits[:, 0] @ output.logits[:, 1].T, torch.arange(len(output.logits)))

    logits, labels = drawn(1, [2, 2], padding=False)
    with pytest.raises(StageOutputError, match=r"of a microbatch, and .* a mean over rows is .*\(mean, 1\) for a mean"):
        weighed([GivenLoss(contrastive)], logits, labels, [2, 2])
    of_microbatches = GivenLoss(lambda output, batch: (contrastive(output, batch), 1))
    expected = sum(contrastive(SimpleNamespace(logits=some), None) for some in logits.split(2)) / 2
    gradient, value = weighed([of_microbatches], logits, labels, [2, 2], beside=0.0)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert value == pytest.approx(expected.item())


def test_padding_in_an_entry_of_another_name_is_found_where_halves_tell_it():
    def mean(output, batch):
        return F.cross_entropy(output.logits, batch["y"])

    logits, loss = torch.randn(8, 5), GivenLoss(mean)
    of_halves, of_one_half = torch.tensor([-100, 1, 2, -100]), torch.tensor([-100, -100, 2, 3])
    for some, targets in zip(logits.split(4), (of_halves, of_one_half), strict=True):
        part = microbatch({"y": targets}, Share(), CPU)
        counts = counted(sums_of([part]))
        if targets is of_halves:
            loss(SimpleNamespace(logits=some), part, counts)
        else:
            with pytest.raises(StageOutputError, match=r"a mean over rows is .* Return \(sum, count\)"):
                loss(SimpleNamespace(logits=some), part, counts)


def made_by_the_model(targets, ignored, *, microbatches=2):
    """The weight of a microbatch beside others, whose mean is in the output of the model, by `GivenLoss`."""
    part = microbatch({"targets": targets}, Share(), CPU)
    logits = torch.randn(len(targets), LENGTH, CLASSES)
    output = SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.mT, targets, ignore_index=ignored))
    loss = GivenLoss(lambda output, batch: output.loss)
    return loss(output, part, counted(sums_of([part] * microbatches)))[1].item()


@pytest.mark.parametrize("ignored", [-1, -100])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_that_a_loss_of_the_model_ignores_is_an_error_where_rows_have_unequal_numbers(ignored, rows):
    """nanoGPT's model returns ``(logits, loss)``, of targets of which -1 does not count."""
    targets = torch.ones(rows, LENGTH, dtype=torch.long)
    assert made_by_the_model(targets, ignored) == 1.0
    targets[0, 2:] = ignored
    with pytest.raises(StageOutputError, match=r"over what is not negative in 'targets', .* Return \(sum, count\)"):
        made_by_the_model(targets, ignored)
    assert made_by_the_model(targets, ignored, microbatches=1) == 1.0
    if rows > 1:  # equally many in each: a mean over rows as well
        targets[:, 2:] = ignored
        assert made_by_the_model(targets, ignored) == 1.0


@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.int64])
def test_a_mean_over_what_a_mask_has_is_found_in_microbatches_of_one_row(kind):
    """As Megatron's scripts have it: labels without padding, and a ``loss_mask``."""

    def over_mask(logits, batch):
        mask = batch["loss_mask"].float()
        return (each_of(logits, batch["labels"]).view(mask.shape) * mask).sum() / mask.sum()

    def over_rows(logits, batch):
        mask = batch["loss_mask"].float()
        return ((each_of(logits, batch["labels"]).view(mask.shape) * mask).sum(1) / mask.sum(1)).mean()

    def mean_of(mean, *numbers):
        masks = torch.arange(LENGTH) < torch.tensor(numbers)[:, None]
        parts = [{"labels": torch.ones(1, LENGTH, dtype=torch.long), "loss_mask": one[None].to(kind)} for one in masks]
        made = shared_microbatches(parts, [""] * len(parts), Share(), CPU, Rows(), counts=True)
        loss, counts = GivenLoss(mean), counted(sums_of(made))
        return [loss(torch.randn(1, LENGTH, CLASSES), one, counts)[1].item() for one in made]

    def of_one_row(logits, batch):
        return F.cross_entropy(logits[0], batch["labels"][0])

    assert mean_of(over_mask, 3, 3) == mean_of(over_rows, 3, 2) == mean_of(of_one_row, 3, 2) == [1.0, 1.0]
    with pytest.raises(StageOutputError, match=r"with all of 'loss_mask' and as it is, .*Return \(sum, count\)"):
        mean_of(over_mask, LENGTH, 2)


def test_samples_of_a_signal_and_differences_are_no_padding():
    for numbers in (torch.tensor([[1, -1, -1], [1, 1, 1]]).short(), torch.tensor([[1, -1, -2], [1, 1, 1]])):
        assert microbatch({"x": numbers}, Share(), CPU).pattern == {"rows", "x varies"}


def test_an_index_below_zero_that_a_loss_ignores_in_a_later_microbatch_is_found():
    loss, whole = GivenLoss(lambda logits, batch: F.cross_entropy(logits.mT, batch["y"], ignore_index=-1)), []
    for targets in (torch.ones(4, LENGTH, dtype=torch.long), torch.ones(4, LENGTH, dtype=torch.long).tril(-3) - 1):
        part = microbatch({"y": targets}, Share(), CPU)
        whole.append(part.pattern)
        if targets.min() == 1:
            loss(torch.randn(4, LENGTH, CLASSES), part, counted(sums_of([part])))
            continue
        with pytest.raises(StageOutputError, match=r"a mean over rows is .* Return \(sum, count\)"):
            loss(torch.randn(4, LENGTH, CLASSES), part, counted(sums_of([part])))
    assert whole == [{"rows"}, {"rows", "y padded", "y varies"}]


def test_a_microbatch_without_labels_adds_nothing_where_the_model_has_a_loss_of_its_own():
    logits, labels = drawn(3, [2, 2], padding=False)
    labels[:2] = -100
    loss = of_mean(tokens)
    loss.own = tokens  # NaN there
    require_step([loss], tokens, logits, labels, [2, 2])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda each: each, r"a tensor of shape \(24,\); expected a mean"),
        (lambda each: (each, 12), "a tuple of 2; expected a mean"),
        (lambda each: (each.sum(), each.mean()), "where a count needs no gradient"),
        (lambda each: (each.sum(), each.detach()), "where a count needs no gradient"),
        (lambda each: (each.sum(), (each > 3).double().mean()), r"the count 0\.\d+ of a microbatch, and .*accuracy"),
    ],
    ids=["unreduced", "unreduced sum", "two losses", "many counts", "accuracy"],
)
def test_what_is_no_loss_is_a_typed_error(result, text):
    logits, labels = drawn(4, [4], padding=False)
    loss = GivenLoss(lambda output, batch: result(each_of(output.logits, batch["labels"]).flatten()))
    with pytest.raises(StageOutputError, match=text):
        weighed([loss], logits, labels, [4])


def test_an_accuracy_that_is_1_at_first_is_found_later():
    loss = GivenLoss(lambda output, batch: (output.sum(), (batch["y"] > 0).double().mean()))
    right, mixed = (microbatch({"y": torch.tensor(y)}, Share(), CPU) for y in ([1, 1, 1, 1], [1, 1, 1, 0]))
    counts = counted(sums_of([right, mixed]))
    loss(torch.randn(4), right, counts)
    with pytest.raises(StageOutputError, match=r"the count 0\.75 of a microbatch, and 1 and 0\.5 .*accuracy"):
        loss(torch.randn(4), mixed, counts)


def test_a_count_by_weights_is_a_count():
    logits, labels = drawn(5, [2, 3], padding=False)
    weights = torch.linspace(0.1, 1, 100)

    def mean(logits, labels):
        total, count = parts(logits, labels)
        return total / count

    def parts(logits, labels):
        of_labels = weights[labels].double()
        return (each_of(logits, labels).view(labels.shape) * of_labels).sum(), of_labels.sum()

    loss = GivenLoss(lambda output, batch: parts(output.logits, batch["labels"]))
    require_step([loss], mean, logits, labels, [2, 3])


COUNTS = {
    "rows": lambda output, labels: len(labels),
    "labels": lambda output, labels: (labels != -100).sum(),
    "following": lambda output, labels: (labels[:, 1:] != -100).sum(),
    "padded": lambda output, labels: labels.numel(),
    "microbatches": lambda output, labels: 1,
    "float": lambda output, labels: (labels != -100).sum().float(),
}


@given(
    name=st.sampled_from([*COUNTS, "weights"]),
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 3), min_size=1),
)
def test_what_is_counted_gives_an_attached_loss_the_mean_over_microbatches(name, seed, sizes):
    """A count that is known before the backward; another one is right without an attached loss, and else an error."""
    count = COUNTS.get(name, lambda output, labels: 0.25 * labels.clamp(min=0).sum() + 0.125)
    logits, labels = drawn(seed, sizes)
    expected = sum(some.square().sum() for some in logits.split(sizes)) / sum(
        count(None, some) for some in labels.split(sizes)
    )
    gradient, value = weighed([of_sum(count)], logits, labels, sizes)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert value == pytest.approx(expected.item())
    beside = logits.sin().mean()
    both = torch.autograd.grad(beside, logits, retain_graph=True)[0] + gradient
    if name != "weights":
        torch.testing.assert_close(weighed([of_sum(count)], logits, labels, sizes, beside)[0], both)
    else:
        with pytest.raises(StageOutputError, match="a layer attaches a loss"):
            weighed([of_sum(count)], logits, labels, sizes, beside)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 2], [3, 1, 2]])
@pytest.mark.parametrize("name", ["rows", "microbatches"])
def test_what_is_counted_is_known_without_labels(name, sizes):
    """In a microbatch of one row both are 1."""
    outputs = torch.randn(sum(sizes), 3, dtype=torch.float64).requires_grad_()
    parts = [microbatch({"x": some.detach()}, Share(), CPU) for some in outputs.split(sizes)]
    counts = counted(sums_of(parts))
    loss = GivenLoss(lambda output, _: (output.square().sum(), len(output) if name == "rows" else 1))
    found = [loss(output, part, counts) for output, part in zip(outputs.split(sizes), parts, strict=True)]
    told = sum_on_host([each for _, _, each in found])
    assert told == pytest.approx(sum_of([each for _, _, each in found]).tolist(), rel=1e-12, nan_ok=True)
    require_mean(told, counts.numbers()[MICROBATCHES], attached=True)
    of = sum(sizes) if name == "rows" else len(sizes)
    assert told[0] / told[1] == pytest.approx((outputs.square().sum() / of).item())


def test_a_count_by_the_mask_is_the_same_on_a_replica_without_padding():
    """In its first microbatch such a count is also that of all places, which another replica's is not."""
    labels = torch.tensor([[1, 2, 3, 0]] * 2 + [[1, 2, -100, -100], [3, 1, 2, -100]])
    parts = [
        microbatch({"labels": some, "attention_mask": (some != -100).long()}, Share(), CPU) for some in labels.split(2)
    ]
    counts = counted(sums_of(parts))

    def loss(output, batch):
        return output.logits.sum(), batch["attention_mask"][:, 1:].sum()

    outputs = [SimpleNamespace(logits=torch.ones(2, 4, CLASSES)) for _ in parts]
    replicas = [GivenLoss(loss)(output, part, counts) for output, part in zip(outputs, parts, strict=True)]
    weights = [weight.item() for _, weight, _ in replicas]
    assert weights == pytest.approx([2 * 6 / 9, 2 * 3 / 9])


def test_a_loss_that_is_asked_leaves_no_trace():
    calls = []

    def noisy(output, batch):
        calls.append(torch.is_grad_enabled())
        return tokens(output.logits, batch["labels"]) + 0.0 * torch.rand(())

    loss = GivenLoss(noisy)
    logits, labels = drawn(3, [2, 1, 2])
    torch.manual_seed(4)
    weighed([loss], logits, labels, [2, 1, 2])
    after = torch.rand(())
    torch.manual_seed(4)
    torch.rand(3)  # the three losses of the step
    assert after == torch.rand(())
    first = len(calls)
    weighed([loss], logits, labels, [2, 1, 2])
    assert (first > 3, len(calls) - first) == (True, 3)  # known by now


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, loss):
        ctx.shape = loss.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(ctx.shape)


class Experts(nn.Module):
    """Layers that attach a balance of their own to what they return."""

    def __init__(self, attach=Ones.apply):
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.layers = nn.ModuleList(Attaching(attach) for _ in range(4))
        self.head = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, input_ids, labels=None):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h)
        return SimpleNamespace(logits=self.head(h))


class Attaching(nn.Linear):
    def __init__(self, attach):
        super().__init__(8, 8)
        self.attach = attach

    def forward(self, h):
        h = super().forward(h).tanh()
        return self.attach(h, 0.1 * self.weight.square().mean() + 0.1 * h.square().mean())


def texts(count=8):
    _, labels = drawn(7, [count])
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def of_one_process(microbatches_of, batch):
    """Gradient accumulation of all replicas' microbatches: each with its attached losses, and a part of the mean."""
    added = []
    whole = Experts(lambda output, loss: added.append(loss) or output)
    count = (batch["labels"] != -100).sum()
    for number in range(0, len(batch["labels"]), microbatches_of):
        added.clear()
        part = {name: value[number : number + microbatches_of] for name, value in batch.items()}
        logits = whole(**part).logits
        total = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum") / count
        (total + sum(added) * microbatches_of / len(batch["labels"])).backward()
    return whole


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_losses_that_layers_attach_are_in_the_mean_of_a_step(ranks, schedule):
    """The main loss is a mean over valid tokens; with two replicas, and after an update."""
    batch = texts()
    grid = HyperCommGrid([2, 2], ["dp", "pp"])

    def loss(output, inputs):
        return WithLoss(
            F.cross_entropy(output.logits.flatten(0, 1), inputs["labels"].flatten()), 0.0 * output.logits.sum()
        )

    with Pipeline(Experts, "Ett|ttL", grid, schedule=schedule, microbatch_size=2, loss=loss) as pipeline:
        pipeline.step({name: value.chunk(2)[pipeline.replica] for name, value in batch.items()})
        whole = of_one_process(2, batch)
        require_gradients(pipeline.named_parameters(), whole)
        for model in (pipeline, whole):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected = dict(whole.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.ranks(2)
def test_an_attached_loss_beside_a_count_that_nothing_gives_is_an_error_on_every_rank(ranks):
    def loss(output, inputs):
        return output.logits.square().sum(), 0.3 * inputs["input_ids"].sum()

    with (
        Pipeline(Experts, "Ett|ttL", HyperCommGrid([2], ["pp"]), num_microbatches=2, loss=loss) as pipeline,
        pytest.raises(StageOutputError, match="a layer attaches a loss.* in place of 2 microbatches"),
    ):
        pipeline.step(texts())


@pytest.mark.ranks(2)
def test_a_loss_scale_beside_a_loss_without_one_is_an_error(ranks):
    config = PipelineConfig(variable_seq_lengths=True, grad_scale_func=lambda loss: loss * 8, deadline=20.0)

    def loss(output, inputs):
        return tokens(output.logits, inputs["labels"])

    with (
        Pipeline(
            Experts, "Ett|ttL", HyperCommGrid([2], ["pp"]), num_microbatches=2, loss=loss, config=config
        ) as pipeline,
        pytest.raises(PipelineError, match="function Ones of stage . attaches a loss .* gradient 1, .* by 8"),
    ):
        pipeline.step(texts())
