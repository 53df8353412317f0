"""The parts of the digit reader that need no pipeline: words, strips, the model and its cuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.nn import functional as F

from digit_reader import vocabulary
from digit_reader.decoding import exact, greedy
from digit_reader.encoder import IMAGE_TOKENS, ImageEncoder
from digit_reader.language import LanguageStage
from digit_reader.listener import NAMES, SIGNAL_TOKENS, SignalEncoder
from digit_reader.sizes import Sizes
from digit_reader.strips import (
    DIGITS,
    HEIGHT,
    JITTER,
    SCAN,
    SIGNAL,
    WIDTH,
    Split,
    draw_number,
    draw_signal,
    draw_strip,
    load_scans,
)
from digit_reader.vocabulary import BEGIN, PAD, TEXT_LENGTH, inputs_of, targets_of, words_of
from digit_reader.words import LARGEST, WORDS, NotANumberError, read, spell

ALL_NUMBERS = range(10 ** (DIGITS[0] - 1), 10 ** DIGITS[1])
SMALL = Sizes(hidden=16, heads=2, channels=4)


@pytest.fixture(scope="module")
def scans():
    return {split: load_scans(split) for split in Split}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- words


def test_every_number_of_3_to_5_digits_reads_back():
    assert all(read(spell(number)) == number for number in ALL_NUMBERS)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (7, "seven"),
        (100, "one hundred"),
        (407, "four hundred and seven"),
        (1000, "one thousand"),
        (1013, "one thousand and thirteen"),
        (2340, "two thousand three hundred and forty"),
        (70_000, "seventy thousand"),
        (99_999, "ninety nine thousand nine hundred and ninety nine"),
        (120_001, "one hundred and twenty thousand and one"),
    ],
)
def test_numbers_are_written_as_english_writes_them(number, words):
    assert " ".join(spell(number)) == words


@settings(deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=9))
def test_words_either_write_one_number_or_are_refused(words):
    try:
        number = read(words)
    except NotANumberError as error:
        assert f"{' '.join(words)!r} does not write a number" in str(error)
    else:
        assert spell(number) == tuple(words)


def test_an_unknown_word_is_named_with_the_known_ones():
    with pytest.raises(NotANumberError, match=r"'<pad>' is no number word; known are one, two, .*thousand, and"):
        read(["four", "<pad>"])


@pytest.mark.parametrize("number", [-1, 0, LARGEST + 1])
def test_a_number_without_words_is_refused(number):
    with pytest.raises(ValueError, match=f"{number} cannot be spelled; the words reach from 1 to {LARGEST}"):
        spell(number)


# --- vocabulary


def test_a_text_has_room_for_the_longest_number_and_no_more():
    assert max(len(spell(number)) for number in ALL_NUMBERS) + 1 == TEXT_LENGTH


@pytest.mark.parametrize("number", [100, 407, 73_462])
def test_inputs_are_the_targets_one_position_later(number):
    inputs, targets = inputs_of(number), targets_of(number)
    length = len(spell(number)) + 1
    assert inputs[0] == BEGIN
    assert inputs[1:length] == targets[: length - 1]
    assert inputs[length:] == targets[length:] == [PAD] * (TEXT_LENGTH - length)
    assert words_of(targets) == spell(number)


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"'seven hundred and .* <end>' takes 12 positions; a text has 9"):
        targets_of(777_777)


# --- strips


def digits_shown(strip, scans):
    """The digits on a strip from left to right, found by looking for the scans themselves."""
    found = [
        (left, digit)
        for down, left in itertools.product(range(JITTER + 1), range(WIDTH - SCAN + 1))
        for digit, pool in enumerate(scans.of_digit)
        if (pool == strip[down : down + SCAN, left : left + SCAN]).all(axis=(1, 2)).any()
    ]
    return [digit for _, digit in sorted(found)]


@pytest.mark.parametrize("split", list(Split))
def test_a_signal_is_the_ink_in_the_rows_of_the_strips_own_scans(scans, split):
    for index in range(12):
        strip, signal = (draw(scans[split], seed=3, index=index) for draw in (draw_strip, draw_signal))
        digits = len(str(draw_number(split, seed=3, index=index)))
        heard, silence = signal[: digits * SCAN].reshape(digits, SCAN), signal[digits * SCAN :]
        assert (silence == 0).all()
        assert len(signal) == SIGNAL
        # The rows of a scan lie on the strip one under the other, so all that is heard is all the ink that is seen.
        assert heard.sum() * SCAN == pytest.approx(strip.sum(), rel=1e-5)
        for digit, rows in zip(str(draw_number(split, seed=3, index=index)), heard, strict=True):
            assert (scans[split].of_digit[int(digit)].mean(axis=2) == rows).all(axis=1).any()


@pytest.mark.parametrize("split", list(Split))
def test_a_strip_shows_its_number_in_scans_of_its_split(scans, split):
    for index in range(12):
        strip = draw_strip(scans[split], seed=3, index=index)
        assert strip.shape == (HEIGHT, WIDTH)
        shown = "".join(map(str, digits_shown(strip, scans[split])))
        assert shown == str(draw_number(split, seed=3, index=index))


def test_every_scan_is_in_one_split_and_no_unseen_one_is_copied_into_training(scans):
    train = [pool[: len(pool) // 2] for pool in scans[Split.TRAIN].of_digit]
    copies = [pool[len(pool) // 2 :] for pool in scans[Split.TRAIN].of_digit]
    test = scans[Split.TEST].of_digit
    assert not {scan.tobytes() for pool in train for scan in pool} & {scan.tobytes() for pool in test for scan in pool}
    digits = load_digits()
    for digit, pools in enumerate(zip(train, test, strict=True)):
        of_both = sorted(scan.tobytes() for pool in pools for scan in pool)
        assert of_both == sorted(scan.astype("f4").tobytes() for scan in digits.images[digits.target == digit] / 16)
    for pool, copied in zip(train, copies, strict=True):
        # A copy is not its scan, but nearer to it than to half of the scans of its digit: by chance for 1 in 2.
        apart = ((copied[:, None] - pool[None]) ** 2).sum(axis=(2, 3))
        assert (apart.diagonal() > 0).all()
        assert (apart.diagonal() < np.median(apart, axis=1)).mean() > 0.8


def test_a_strip_depends_on_nothing_but_split_seed_and_index(scans):
    train = scans[Split.TRAIN]
    forward = [draw_strip(train, seed=5, index=index) for index in range(8)]
    again = load_scans(Split.TRAIN)
    backward = [draw_strip(again, seed=5, index=index) for index in reversed(range(8))]
    assert all((a == b).all() for a, b in zip(forward, reversed(backward), strict=True))
    assert not (draw_strip(train, seed=6, index=0) == forward[0]).all()
    assert len({strip.tobytes() for strip in forward}) == 8


def test_lengths_are_equally_frequent():
    counts = np.bincount([len(str(draw_number(Split.TRAIN, seed=0, index=index))) for index in range(3000)])
    assert counts.sum() == counts[3:6].sum()
    assert (abs(counts[3:6] - 1000) < 100).all()


# --- the model


def texts(numbers):
    return (
        torch.tensor([inputs_of(number) for number in numbers]),
        torch.tensor([targets_of(number) for number in numbers]),
    )


def cut(layout):
    """``Et|tL`` as the names of each stage's layers."""
    decoder = itertools.count()
    return [
        [{"E": "embedding_0", "L": "loss_0"}.get(layer) or f"decoder_{next(decoder)}" for layer in stage]
        for stage in layout.split("|")
    ]


def run(stages, image_tokens, text, targets):
    """Forward and backward through stages, tensors detached in between as a pipeline does."""
    received, sent = [image_tokens.detach().requires_grad_()], []
    for stage in stages:
        sent.append(stage(received[-1], text))
        received.append(sent[-1].detach().requires_grad_())
    F.cross_entropy(received[-1].transpose(1, 2), targets, ignore_index=PAD).backward()
    gradient = received[-1].grad
    for x, y in zip(reversed(received[:-1]), reversed(sent), strict=True):
        if y is not x:  # an empty stage hands the gradient on as it is
            y.backward(gradient)
            gradient = x.grad
    gradients = {name: value.grad for stage in stages for name, value in stage.named_parameters()}
    return sent[-1], gradient, gradients


@pytest.mark.parametrize("layout", ["Ett|ttL", "E|t|t|t|t|L", "E||tttt|L", "Ettt|tL|"])
def test_a_cut_model_equals_the_whole_one_bit_for_bit(layout):
    torch.manual_seed(0)
    text, targets = texts([407, 1013, 73_462, 250])
    image_tokens = torch.randn(4, IMAGE_TOKENS, SMALL.hidden)
    stages = [LanguageStage(names, SMALL, seed=1) for names in cut(layout)]
    whole = LanguageStage(list(itertools.chain.from_iterable(cut(layout))), SMALL, seed=1)
    parts = {name: value for stage in stages for name, value in stage.state_dict().items()}
    assert parts.keys() == whole.state_dict().keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.state_dict().items())

    logits, image_gradient, gradients = run(stages, image_tokens, text, targets)
    reference, reference_image_gradient, reference_gradients = run([whole], image_tokens, text, targets)
    assert torch.equal(logits, reference)
    assert torch.equal(image_gradient, reference_image_gradient)
    assert gradients.keys() == reference_gradients.keys()
    assert all(torch.equal(gradients[name], value) for name, value in reference_gradients.items())
    assert all(value.abs().sum() > 0 for value in reference_gradients.values())


def test_layers_start_apart_and_seeds_start_apart():
    stage = LanguageStage(["decoder_0", "decoder_1"], SMALL, seed=1)
    other = LanguageStage(["decoder_0"], SMALL, seed=2)
    weight = "block.attention.output.weight"
    first, second = (stage.layers[name].get_parameter(weight) for name in ("decoder_0", "decoder_1"))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.layers["decoder_0"].get_parameter(weight))


def test_an_unknown_layer_is_refused_by_name():
    with pytest.raises(ValueError, match="'mtp_0' is of no kind that this model has: embedding, decoder, loss"):
        LanguageStage(["decoder_0", "mtp_0"], SMALL, seed=0)


def test_the_stage_that_embeds_needs_text():
    with pytest.raises(ValueError, match="'embedding_0' joins text to the encoders' tokens; pass token ids as text"):
        LanguageStage(["embedding_0"], SMALL, seed=0)(torch.zeros(1, IMAGE_TOKENS, SMALL.hidden))


def test_heads_must_divide_hidden():
    with pytest.raises(ValueError, match="hidden=64 does not divide among heads=5"):
        Sizes(hidden=64, heads=5)


def test_two_image_lanes_see_what_one_sees(scans):
    strips = torch.stack(
        [torch.from_numpy(draw_strip(scans[Split.TRAIN], seed=0, index=index)) for index in range(6)]
    ).double()
    encoder = ImageEncoder(SMALL, seed=0).double()
    whole = encoder(strips)
    assert whole.shape == (6, IMAGE_TOKENS, SMALL.hidden)
    torch.testing.assert_close(torch.cat((encoder(strips[:3]), encoder(strips[3:]))), whole, rtol=1e-12, atol=1e-12)


def test_a_cut_signal_encoder_equals_the_whole_one_bit_for_bit(scans):
    signals = torch.stack([torch.from_numpy(draw_signal(scans[Split.TRAIN], seed=0, index=i)) for i in range(3)])
    whole = SignalEncoder(NAMES, SMALL, seed=1)
    stages = [SignalEncoder([name], SMALL, seed=1) for name in NAMES]
    assert {name for stage in stages for name in stage.state_dict()} == set(whole.state_dict())
    tokens = whole(signals)
    assert tokens.shape == (3, SIGNAL_TOKENS, SMALL.hidden)
    passed = signals
    for stage in stages:
        passed = stage(passed)
        assert passed.is_contiguous()
    assert torch.equal(passed, tokens)


def test_text_sees_all_that_the_encoders_saw_and_the_encoders_do_not_see_text():
    torch.manual_seed(0)
    seen = IMAGE_TOKENS + SIGNAL_TOKENS
    model = LanguageStage(["embedding_0", "decoder_0", "decoder_1", "loss_0"], SMALL, seed=1, seen=seen)
    (text, targets), tokens = texts([407]), torch.randn(1, seen, SMALL.hidden, requires_grad=True)
    logits = model(tokens, text)
    assert logits.shape[:2] == targets.shape
    (gradient,) = torch.autograd.grad(logits[0, 0].sum(), tokens)
    assert (gradient.abs().sum(dim=2) > 0).all()
    stream = LanguageStage(["embedding_0", "decoder_0"], SMALL, seed=1, seen=seen)
    assert torch.equal(stream(tokens, text)[:, :seen], stream(tokens, texts([73_462])[0])[:, :seen])


def whole_model():
    return LanguageStage(["embedding_0", "decoder_0", "decoder_1", "loss_0"], SMALL, seed=1)


def test_text_to_come_changes_nothing_before_it():
    torch.manual_seed(0)
    model, (text, _) = whole_model(), texts([73_462])
    image_tokens = torch.randn(1, IMAGE_TOKENS, SMALL.hidden)
    changed = text.clone()
    changed[:, 5:] = 3
    before, after = model(image_tokens, text), model(image_tokens, changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


# --- decoding


def test_greedy_decoding_writes_what_one_pass_over_its_own_text_would_write():
    torch.manual_seed(0)
    model, image_tokens = whole_model(), torch.randn(5, IMAGE_TOKENS, SMALL.hidden)
    with torch.no_grad():
        written = greedy(lambda text: model(image_tokens, text), 5)
        own = torch.cat((torch.full((5, 1), BEGIN), written[:, :-1]), dim=1)
        assert torch.equal(model(image_tokens, own).argmax(dim=-1), written)
    assert len(set(map(tuple, written.tolist()))) > 1


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(ALL_NUMBERS), st.none() | st.integers(0, TEXT_LENGTH - 1)), min_size=1, max_size=8
    )
)
def test_one_pass_over_the_right_words_agrees_with_greedy_decoding_on_exact_match(strips):
    """A reader that errs on one position of some strips, and loses its way after any wrong word."""
    inputs, targets = texts([number for number, _ in strips])

    def logits_of(text):
        on_the_way = (text == inputs).cumprod(dim=1).bool()
        likeliest = torch.where(on_the_way, targets, (targets + 1) % vocabulary.SIZE)
        for row, (_, flaw) in enumerate(strips):
            if flaw is not None:
                likeliest[row, flaw] = (targets[row, flaw] + 2) % vocabulary.SIZE
        return F.one_hot(likeliest, vocabulary.SIZE)

    one_pass = exact(logits_of(inputs).argmax(dim=-1), targets)
    assert torch.equal(exact(greedy(logits_of, len(strips)), targets), one_pass)
    assert one_pass.tolist() == [flaw is None or flaw > len(spell(number)) for number, flaw in strips]


def test_the_model_learns(scans):
    """A few steps bring the loss under that of guessing each word by how often it occurs."""
    sizes = Sizes(hidden=32, heads=2, channels=4)
    encoder, model = ImageEncoder(sizes, seed=0), LanguageStage(["embedding_0", "decoder_0", "loss_0"], sizes, seed=0)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *model.parameters()], lr=3e-3)
    losses, words = [], []
    for step in range(60):
        indices = range(32 * step, 32 * (step + 1))
        strips = [torch.from_numpy(draw_strip(scans[Split.TRAIN], seed=0, index=index)) for index in indices]
        text, targets = texts([draw_number(Split.TRAIN, seed=0, index=index) for index in indices])
        logits = model(encoder(torch.stack(strips)), text)
        loss = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        words.append(targets[targets != PAD])
    frequency = torch.bincount(torch.cat(words)).double()
    frequency = frequency[frequency > 0] / frequency.sum()
    guessing = -(frequency * frequency.log()).sum().item()
    assert sum(losses[-5:]) / 5 < guessing
