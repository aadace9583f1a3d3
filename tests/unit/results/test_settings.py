"""Which settings of two sides differ, and in which words."""

import pytest

from harness.results.settings import ModelSettings, SettingsResult, distinct, setting_pairs, shown_values


def differing(engine, hf):
    pairs = setting_pairs(ModelSettings(**engine), ModelSettings(**hf))
    return [str(pair) for pair in SettingsResult(engine="mine", model="tiny", pairs=pairs).differing]


@pytest.mark.parametrize(
    ("engine", "hf", "message"),
    [
        ({"rope_theta": (10000.0,)}, {"rope_theta": (500000.0,)}, "the engine has rope theta 10000, HF has 500000"),
        ({"norm_eps": (1e-5,)}, {"norm_eps": (1e-6,)}, "the engine has norm eps 1e-05, HF has 1e-06"),
        ({"sliding_window": (64,)}, {"sliding_window": (32,)}, "the engine has sliding window 64, HF has 32"),
        ({"sliding_layers": ((),)}, {"sliding_layers": ((0, 2),)}, "the engine has sliding layers none, HF has 0, 2"),
        ({"attention_cap": (None,)}, {"attention_cap": (50.0,)}, "the engine has attention cap none, HF has 50"),
        ({"tied_head": (False,)}, {"tied_head": (True,)}, "the engine has tied head False, HF has True"),
        (
            {"rope_frequencies": ((1.0, 0.1, 0.01),)},
            {"rope_frequencies": ((1.0, 0.1, 0.005),)},
            "the engine's rotary frequencies are not HF's: pair 2 of 3 turns by 0.01 radians a position, HF's by 0.005",
        ),
    ],
)
def test_a_setting_that_differs_is_shown_with_both_values(engine, hf, message):
    assert differing(engine, hf) == [message]


@pytest.mark.parametrize(
    ("engine", "hf"),
    [
        ({}, {"norm_eps": (1e-6,)}),
        ({"norm_eps": (1e-6,)}, {}),
        ({"norm_eps": (1e-5, 1e-6)}, {"norm_eps": (1e-6,)}),  # a module that is not used
        ({"norm_eps": (1e-6,)}, {"norm_eps": (1e-5, 1e-6)}),  # a norm that is not shown
        ({"rope_theta": (500000.02,)}, {"rope_theta": (500000.0,)}),
        ({"rope_frequencies": ((1.0, 0.1),)}, {"rope_frequencies": ((1.0, 0.1, 0.01),)}),  # kept in another form
        ({"sliding_window": (511,)}, {"sliding_window": (512,)}),  # without the token itself
    ],
)
def test_what_only_one_side_shows_is_no_difference(engine, hf):
    assert differing(engine, hf) == []


def test_a_value_that_each_side_has_alone_differs_beside_a_common_one():
    assert differing({"norm_eps": (1e-5, 1e-6)}, {"norm_eps": (1e-6, 1e-8)}) == [
        "the engine has norm eps 1e-05, HF has 1e-08"
    ]


def test_another_theta_is_not_told_again_as_frequencies():
    engine = {"rope_theta": (1e4,), "rope_frequencies": ((1.0, 0.01),)}
    hf = {"rope_theta": (1e6,), "rope_frequencies": ((1.0, 0.001),)}
    assert differing(engine, hf) == ["the engine has rope theta 10000, HF has 1000000"]


def test_tables_of_frequencies_are_compared_with_those_of_their_length():
    engine = {"rope_frequencies": ((1.0, 0.2, 0.04), (1.0, 0.5))}
    hf = {"rope_frequencies": ((1.0, 0.1), (1.0, 0.2, 0.04))}
    (message,) = differing(engine, hf)
    assert "pair 1 of 2 turns by 0.5 radians a position, HF's by 0.1" in message


def test_numbers_that_differ_by_a_rounding_are_one():
    assert distinct([1e-6, 1.00000001e-6, 1e-5, 1e-6]) == (1e-6, 1e-5)


def test_a_setting_is_a_tuple_of_values():
    with pytest.raises(TypeError, match="the setting norm_eps is no tuple of values: 1e-06"):
        ModelSettings(norm_eps=1e-6)


def test_a_table_of_frequencies_is_shown_by_its_ends():
    assert shown_values(((1.0, 0.1, 0.01),)) == "3 from 1 to 0.01"
    assert shown_values(()) == "-"
