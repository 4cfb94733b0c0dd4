"""Rotations: golden vector B.3, frequencies of deepseek4-model.md#rope, long contexts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds4py.models.deepseek4.rotary import Rotary, rotate_
from ds4py.models.deepseek4.shape import Shape
from ds4py.models.deepseek4.step import Rotaries, Step
from tests.unit.models.deepseek4.support import CPU, known_shape, normal, place

FLASH = known_shape(0)
PLAIN, EXTENDED = False, True

B3_FIRST_FOUR = {
    PLAIN: [-0.8390715, -0.5440211, -0.9376327, 0.3476276],
    EXTENDED: [-0.8390715, -0.5440211, -0.5591622, 0.8290583],
}
B3_PAIR_20 = {PLAIN: [-0.9997861, -0.020682616], EXTENDED: [0.9562252, 0.29263183]}
B3_COS = {
    PLAIN: [0.111435786, -0.675455451, 0.685314715, -0.97485584],
    EXTENDED: [0.111435786, 0.862347782, 0.871928036, 0.764344215],
}
B3_SIN = {
    PLAIN: [-0.993771613, 0.7374008, -0.728247, -0.22283635],
    EXTENDED: [-0.993771613, 0.506316423, 0.489634007, -0.644808412],
}


def rotary(*, extended: bool, engine_angles: bool, shape: Shape = FLASH) -> Rotary:
    base, yarn = (shape.compressed_rope_base, shape.yarn) if extended else (shape.rope_base, None)
    return Rotary(shape.n_rot, base, yarn, CPU, engine_angles=engine_angles)


def turns(position: int, **which: bool) -> torch.Tensor:
    """Return complex64 `[R / 2]`."""
    return rotary(**which).at(np.array([position]))[0, 0]


def exact_angles(position: int, *, extended: bool) -> np.ndarray:
    """The formula of docs/spec/deepseek4-model.md#rope pair by pair, in float64."""
    angles = []
    for i in range(32):
        base = 160000.0 if extended else 10000.0
        angle = position * base ** (-2 * i / 64)
        ramp = 1 - min(max((i - 15) / (25 - 15), 0), 1) if extended else 1.0
        angles.append(angle * (ramp + (1 - ramp) / 16))
    return np.array(angles)


@pytest.mark.parametrize("engine_angles", [False, True])
@pytest.mark.parametrize("extended", [PLAIN, EXTENDED])
def test_b3_and_point_7_adjacent_pairs_of_the_last_64_turn(extended, engine_angles):
    heads = torch.zeros(1, 1, 512)
    heads[..., :448] = 5.0
    heads[..., 448:452] = torch.tensor([1.0, 0, 0, 1])
    rotate_(heads, rotary(extended=extended, engine_angles=engine_angles).at(np.array([10])))
    assert (heads[..., :448] == 5).all()
    assert heads[0, 0, 448:452].tolist() == pytest.approx(B3_FIRST_FOUR[extended], abs=2e-6)
    assert not heads[0, 0, 452:].any()


@pytest.mark.parametrize("extended", [PLAIN, EXTENDED])
def test_b3_and_point_8_both_bases_at_1000(extended):
    turn = turns(1000, extended=extended, engine_angles=True)[20]
    assert [turn.real.item(), turn.imag.item()] == pytest.approx(B3_PAIR_20[extended], abs=2e-7)
    exact = turns(1000, extended=extended, engine_angles=False)[20]
    assert [exact.real.item(), exact.imag.item()] == pytest.approx(B3_PAIR_20[extended], abs=5e-5)


@pytest.mark.parametrize("extended", [PLAIN, EXTENDED])
def test_b3_the_recurrence_at_12345(extended):
    turn = turns(12345, extended=extended, engine_angles=True)[:4]
    assert turn.real.tolist() == pytest.approx(B3_COS[extended], abs=1e-7)
    assert turn.imag.tolist() == pytest.approx(B3_SIN[extended], abs=1e-7)
    exact = turns(12345, extended=extended, engine_angles=False)[:4]
    assert exact.real.tolist() == pytest.approx(B3_COS[extended], abs=2e-3)


@pytest.mark.parametrize("engine_angles", [False, True])
def test_point_9_yarn_slows_pairs_15_to_25_down_and_keeps_lengths(engine_angles):
    turn = turns(1, extended=EXTENDED, engine_angles=engine_angles)
    assert turn.abs().tolist() == pytest.approx([1.0] * 32, abs=2e-7)
    frequencies = np.angle(turn.numpy().astype(np.complex128))
    assert frequencies[:4] == pytest.approx([1, 0.687656, 0.472871, 0.325172], rel=2e-6)
    expected = [5.28686e-3, 3.63554e-3, 2.265625e-3, 1.3968013e-3, 8.496897e-4, 5.0808196e-4]
    expected += [2.9697778e-4, 1.6817999e-4, 9.086784e-5, 4.5444232e-5, 1.953125e-5, 5.3723127e-6]
    assert frequencies[14:26] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("extended", [PLAIN, EXTENDED])
@given(position=st.integers(0, 1_000_000))
def test_point_37_the_default_angles_are_exact_to_float32(extended, position):
    turn = turns(position, extended=extended, engine_angles=False)
    angles = exact_angles(position, extended=extended)
    assert turn.real.numpy() == pytest.approx(np.cos(angles), abs=1e-7)
    assert turn.imag.numpy() == pytest.approx(np.sin(angles), abs=1e-7)


@pytest.mark.parametrize("extended", [PLAIN, EXTENDED])
@pytest.mark.parametrize("position", [777_777, 1, 65_536, 1_000_000])
def test_point_37_the_engines_angles_are_its_recurrence(extended, position):
    step = np.float32((160000.0 if extended else 10000.0) ** (-2 / 64))
    angle, expected = np.float32(position), []
    for i in range(32):
        ramp = np.float32(1 - min(max((i - 15) / 10, 0), 1) if extended else 1)
        slow = angle * np.float32(1 / 16)
        expected.append(slow * (np.float32(1) - ramp) + angle * ramp)
        angle = angle * step
    turn = turns(position, extended=extended, engine_angles=True)
    assert turn.real.numpy() == pytest.approx(np.cos(np.float64(expected)), abs=6e-8)
    assert turn.imag.numpy() == pytest.approx(np.sin(np.float64(expected)), abs=6e-8)
    exact = np.cos(exact_angles(position, extended=extended))
    assert turn.real.numpy() == pytest.approx(exact, abs=5e-2)


def test_the_conjugate_turns_back_and_every_token_has_its_own_angle():
    rotation = rotary(extended=EXTENDED, engine_angles=False).at(np.array([0, 7, 4000]))
    heads = normal(3, 2, 512)
    turned = heads.clone()
    rotate_(turned, rotation)
    assert torch.equal(turned[0], heads[0])
    assert not torch.allclose(turned[1:], heads[1:], atol=0.1)
    rotate_(turned, rotation.conj())
    assert torch.allclose(turned, heads, atol=1e-5)


def test_point_9_the_ramp_of_a_smaller_head_follows_from_its_own_width():
    shape = known_shape(2)
    at = rotary(extended=EXTENDED, engine_angles=False, shape=shape).at(np.array([1]))[0, 0]
    wave = [32 * math.log(65536 / (2 * math.pi * b)) / (2 * math.log(160000)) for b in (32, 1)]
    low, high = math.floor(wave[0]), math.ceil(wave[1])
    assert (low, high) == (7, 13)
    for i, turn in enumerate(at.tolist()):
        kept = 1 - min(max((i - low) / (high - low), 0), 1)
        angle = 160000 ** (-2 * i / 32) * (kept + (1 - kept) / 16)
        assert turn == pytest.approx(complex(math.cos(angle), math.sin(angle)), abs=1e-7)


def test_a_step_knows_positions_phases_and_window_starts_of_all_segments():
    rotaries = Rotaries(FLASH, place())
    step = Step(rotaries, [(6, 4), (0, 2), (127, 1)])
    positions = np.array([6, 7, 8, 9, 0, 1, 127])
    assert torch.equal(step.plain, rotaries.at(positions, compressed=False))
    assert torch.equal(step.extended, rotaries.at(positions, compressed=True))
    assert step.phases(4).tolist() == [2, 3, 0, 1, 0, 1, 3]
    assert step.phases(128).tolist() == [6, 7, 8, 9, 0, 1, 127]
    ends = {(4, 0): [4], (4, 1): [], (4, 2): [124], (128, 0): [], (128, 2): [0]}
    for (ratio, segment), starts in ends.items():
        expected = rotaries.at(np.array(starts, np.int64), compressed=True)
        assert torch.equal(step.window_starts(ratio, segment), expected)
