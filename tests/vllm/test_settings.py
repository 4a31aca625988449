"""``kv_connector_extra_config``: defaults, bounds, and errors that say what to do."""

import pytest

from kvferry.errors import SettingsError
from kvferry.protocol.authentication import SECRET_VARIABLE, Purpose, Seal
from kvferry.vllm.settings import Settings, parse_settings, read_seal


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


LONG_ENOUGH = "0123456789abcdef"


def _same(seal, secret):
    return Seal(secret.encode()).accepts(seal.sign(Purpose.REQUEST, b"x"), Purpose.REQUEST, b"x")


def test_without_a_secret_the_seal_has_none(monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert not read_seal(Settings()).has_secret
    assert not read_seal(Settings()).admits("8.8.8.8")
    assert read_seal(Settings(allow_public_peers=True)).admits("8.8.8.8")


def test_the_file_wins_over_the_variable_and_white_space_at_its_end_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET_VARIABLE, LONG_ENOUGH)
    assert _same(read_seal(Settings()), LONG_ENOUGH)
    file = tmp_path / "secret"
    file.write_text("another" + LONG_ENOUGH + " \r\n")
    assert _same(read_seal(Settings(secret_file=str(file))), "another" + LONG_ENOUGH)


@pytest.mark.parametrize("secret", ["", "\n", "abc123", LONG_ENOUGH[:-1] + " "])
def test_an_empty_or_short_secret_is_refused_wherever_it_comes_from_and_not_shown(monkeypatch, tmp_path, secret):
    file = tmp_path / "secret"
    file.write_text(secret)
    with pytest.raises(SettingsError, match=r"secret_file .*at least 16 are needed") as refused:
        read_seal(Settings(secret_file=str(file)))
    assert len(secret.strip()) == 0 or secret.strip() not in str(refused.value)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(SettingsError, match="KVFERRY_SECRET holds a secret of"):
        read_seal(Settings())


@pytest.mark.parametrize("path", ["/nowhere/secret", "/", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused_by_name(path):
    with pytest.raises(SettingsError, match=r"secret_file .*cannot be read"):
        read_seal(Settings(secret_file=path))


def test_a_secret_in_the_configuration_itself_is_refused_and_not_shown():
    with pytest.raises(SettingsError, match="unknown key 'secret': did you mean 'secret_file'") as refused:
        parse_settings({"secret": LONG_ENOUGH})
    assert LONG_ENOUGH not in str(refused.value)
