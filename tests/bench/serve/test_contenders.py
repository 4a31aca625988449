"""Contenders are data: known ones, and those that a file describes."""

import json
from pathlib import Path

import pytest

from kvferry.bench.serve.contenders import KNOWN, USUAL, Front, chosen, filled, port_names
from kvferry.errors import SpecError


def test_they_come_in_the_order_in_which_they_were_asked_for() -> None:
    assert list(chosen(["plain", "nixl", "kvferry"], [])) == ["plain", "nixl", "kvferry"]
    assert set(USUAL) <= set(KNOWN)


@pytest.mark.parametrize("name", [name for name in KNOWN if "patched" in name or name == "mooncake"])
def test_what_is_patched_says_so(name: str) -> None:
    contender = KNOWN[name]
    assert contender.note.startswith("patched")
    for side in (contender.prefill, contender.decode):
        assert side.kv_transfer_config["kv_connector_module_path"].startswith("kvferry.vllm.peers.")


def test_what_is_not_patched_is_upstreams() -> None:
    for name, contender in KNOWN.items():
        for side in (contender.prefill, contender.decode):
            patched = "kv_connector_module_path" in side.kv_transfer_config
            assert patched == contender.note.startswith("patched"), name


def test_the_patched_twin_differs_in_the_patch_only() -> None:
    for name in ("nixl", "nixl-push"):
        plain, patched = KNOWN[name], KNOWN[f"{name}-patched"]
        for one, other in ((plain.prefill, patched.prefill), (plain.decode, patched.decode)):
            without = {**other.kv_transfer_config}
            del without["kv_connector_module_path"]
            assert without == one.kv_transfer_config
            assert one.environment == other.environment


def test_plain_engines_have_no_connector_and_all_others_have_one() -> None:
    for contender in KNOWN.values():
        for side in (contender.prefill, contender.decode):
            assert bool(side.kv_transfer_config) != contender.front.plain


def test_names_are_replaced_and_ports_are_numbers_where_they_have_to_be() -> None:
    contender = KNOWN["lmcache-mp"]
    assert port_names(contender) == ["lmcache", "lmcache-http"]
    done = filled(contender, {"port:lmcache": 7, "port:lmcache-http": 8, "directory": "/d", "bin": "/b"})
    assert done.decode.kv_transfer_config["kv_connector_extra_config"]["lmcache.mp.port"] == 7
    assert done.servers[0][:2] == ("/b/lmcache", "server")
    assert "7" in done.servers[0]
    assert "{" not in str(done.servers)
    nixl = filled(KNOWN["nixl"], {"port:prefill": 5, "port:decode": 6})
    assert nixl.prefill.environment == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5"}


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_file_describes_another_one(tmp_path: Path, ending: str) -> None:
    config = {"kv_connector": "Mine", "kv_role": "kv_both"}
    file = tmp_path / f"mine.{ending}"
    file.write_text(
        json.dumps(
            {
                "front": "client",
                "prefill": {"kv_transfer_config": config},
                "decode": {"kv_transfer_config": config, "environment": {"A": "b"}, "arguments": ["--flag"]},
            }
        )
    )
    [(name, contender)] = chosen([f"mine={file}"], []).items()
    assert name == "mine"
    assert contender.front is Front.CLIENT
    assert contender.decode.kv_transfer_config == config
    assert contender.decode.arguments == ("--flag",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "does not describe a contender"),
        ("{", "does not describe a contender"),
        ("{front: fast}", "fast"),
        ("{decode: {kv_config: {}}}", "kv_config"),
        ("{front: router}", "each engine has a kv_transfer_config"),
        ("{front: direct, decode: {kv_transfer_config: {kv_connector: X}}}", "each engine has no kv_transfer_config"),
    ],
)
def test_a_file_that_describes_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "contender.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        chosen([f"mine={file}"], [])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "pythons", "said"),
    [
        (["nixle"], [], "did you mean nixl?"),
        (["zzz"], [], "name=FILE"),
        (["plain", "plain"], [], "given twice"),
        (["../up=x"], [], "a name has"),
        (["mine=/nonexistent"], [], "No such file"),
        (["plain"], ["nixl=/bin/sh"], "there is no contender 'nixl'"),
        (["plain"], ["plain=/nonexistent"], "there is no file"),
    ],
)
def test_what_cannot_be_is_one_line(texts: list[str], pythons: list[str], said: str) -> None:
    with pytest.raises(SpecError) as caught:
        chosen(texts, pythons)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_environment_of_its_own_is_named(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch()
    assert chosen(["plain"], [f"plain={interpreter}"])["plain"].python == str(interpreter)
