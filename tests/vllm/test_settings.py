"""``kv_connector_extra_config``: defaults, bounds, and errors that say what to do."""

import pytest

from kvferry.errors import SettingsError
from kvferry.vllm.settings import Settings, parse_settings


def test_nothing_has_to_be_set():
    assert parse_settings({}) == Settings()


def test_every_key_can_be_set():
    settings = parse_settings({"side_channel_host": "::1", "side_channel_port": 5600, "kv_lease_duration": 60})
    assert (settings.side_channel_host, settings.side_channel_port, settings.kv_lease_duration) == ("::1", 5600, 60.0)


def test_a_misspelt_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(SettingsError, match="'side_chanel_port': did you mean 'side_channel_port'"):
        parse_settings({"side_chanel_port": 1})


def test_an_unknown_key_is_refused_with_all_known_ones():
    with pytest.raises(SettingsError, match="known keys are side_channel_host, side_channel_port"):
        parse_settings({"zzz": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("side_channel_port", -1),
        ("side_channel_port", 65536),
        ("side_channel_port", "5600"),
        ("kv_lease_duration", 0),
        ("claim_timeout", -1),
        ("backends", []),
        ("backends", ["UCX", "GDS"]),
        ("nixl_progress_delay_us", -1),
        ("side_channel_host", 3),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(key, value):
    with pytest.raises(SettingsError, match=key):
        parse_settings({key: value})
