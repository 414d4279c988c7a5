"""The configuration file: what is taken, and how each fault is told."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

import polluxd
from polluxd.config.config_file import Config, load_config, parse_config
from polluxd.config.setting_info import infos
from polluxd.config.settings import SECTIONS, PolicySettings
from polluxd.config.settings_reference import example_file
from polluxd.errors import ConfigError
from polluxd.model import DaemonMode
from polluxd.slurm.topology import racks_of

LEAST = '[slurm]\ncluster = "c"\n[database]\nurl = "postgresql://pollux_daemon@localhost/pollux"\n'


def parsed(text):
    return parse_config(tomllib.loads(text), "polluxd.toml")


def fault(text):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    return str(caught.value)


def test_the_least_file_and_its_defaults():
    config = parsed(LEAST)
    assert config.mode is DaemonMode.OBSERVE
    assert (config.cycle.interval_s, config.moves.default_cost_s) == (60, 30)
    assert config.policy == PolicySettings()


def test_the_example_shows_every_key_with_its_default(tmp_path):
    example = tmp_path / "polluxd.toml"
    example.write_text(example_file())
    assert load_config(example).slurm.cluster == "mycluster"
    # In the example file a comment begins with "# ", a key that is commented out with "#" alone.
    document = tomllib.loads(re.sub(r"(?m)^#(?! )", "", example_file()))
    Config.model_validate(document)
    for section in SECTIONS:
        shown = document[section]
        assert set(shown) == {info.key for info in infos(section) if not info.run_time_only}, section
        for info in infos(section):
            if info.example is None and not info.run_time_only:
                assert shown[info.key] == (list(info.default) if info.key == "paths" else info.default)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "slurm: missing"),
        ('[slurm]\ncluster = "c"', "database: missing"),
        (LEAST + "[cycle]\nintervall_s = 5", "cycle.intervall_s: no such key; did you mean interval_s?"),
        ("mod = 1\n" + LEAST, "mod: no such key; did you mean mode?"),
        (LEAST + "[colour]\n", "colour: no such key; there are mode, slurm"),
        ('mode = "enforced"\n' + LEAST, 'mode: expected "observe", "advise" or "enforce"; got \'enforced\''),
        (
            LEAST + '[cycle]\ninterval_s = "60"',
            "cycle.interval_s: expected a number of seconds above 0; got '60'",
        ),
        (LEAST + "[cycle]\ninterval_s = nan", "cycle.interval_s"),
        (LEAST + "[cycle]\nfloor_s = 61.0", "floor_s (61) must not be above interval_s (60)"),
        (LEAST + "[cycle]\nbusy_poll_s = 9", "busy_poll_s (9) must not be above poll_s (5)"),
        (LEAST + "[cycle]\nleader_lease_s = 10", "slurm.timeout_s (10) must be below cycle.leader_lease_s"),
        (LEAST.replace('"c"', '"c"\nlease_s = 15'), "would start before polluxd renews"),
        (LEAST + "[policy]\npower = 1.5", "policy.power"),
        (LEAST + "[policy]\npower = nan", "policy.power"),
        (
            LEAST + "[policy.user_weights]\nbob = 0",
            "policy.user_weights.bob: expected a weight above 0, up to 1000; got 0",
        ),
        (LEAST + "[moves]\nmax_concurrent = 1.5", "moves.max_concurrent"),
        (LEAST + "[moves]\nmax_concurrent = -1", "moves.max_concurrent"),
        (
            LEAST + '[moves]\npaths = ["resize"]',
            'moves.paths: expected each of "resize", "requeue" at most once, and "requeue" among them',
        ),
        (LEAST + '[moves]\npaths = ["requeue", "requeue"]', "moves.paths: expected each of"),
        (LEAST + '[moves]\npaths = ["teleport", "requeue"]', "moves.paths"),
        (
            LEAST + '[moves]\npaths = ["teleport", "requeue"]',
            'moves.paths.0: expected each of "resize", "requeue" at most once',
        ),
        (LEAST.replace('"c"', '"a b"'), "slurm.cluster"),
        (
            LEAST + "[policy]\npaused = true",
            "policy.paused: this setting is not kept in the file; use `polluxctl pause`",
        ),
        (LEAST + "[policy.job_weights]\n7 = 2.0", "policy.job_weights: this setting is not kept in the file"),
        ("moves = 3\n" + LEAST, "moves: expected a table, [moves]; got 3"),
    ],
)
def test_each_fault_names_its_key(text, told):
    message = fault(text)
    assert message.startswith("polluxd.toml: ")
    assert told in message


def test_all_faults_are_told_at_once():
    message = fault('mode = "x"\n[slurm]\nclustr = "c"\n[database]\n')
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("url", ["mysql://u:hunter2@localhost/x", "hunter2", 5])
def test_a_faulty_url_is_told_without_its_password(url):
    message = fault(f'[slurm]\ncluster = "c"\n[database]\nurl = {url!r}\n')
    assert "database.url" in message
    assert "hunter2" not in message


def test_no_secret_in_the_printed_form():
    config = parsed(LEAST.replace("pollux_daemon@", "pollux_daemon:hunter2@"))
    assert "hunter2" not in repr(config)
    assert "hunter2" in config.database.url


def test_the_password_file_goes_into_the_url():
    config = parsed(LEAST.replace("[database]", '[database]\npassfile = "/etc/pollux/pg pass"'))
    assert (
        config.database.url
        == "postgresql://pollux_daemon@localhost/pollux?passfile=%2Fetc%2Fpollux%2Fpg+pass"
    )


def test_settings_of_the_policy_can_be_given_in_the_file():
    said = parsed(
        LEAST + '[policy]\naccount_ceilings = {a = 8}\nuser_guarantees = {u = 2}\ngpu_counts = "1,2,4"\n'
        "waiting_power = -0.5\nhysteresis = 0.1\n"
    )
    assert said.policy == PolicySettings(
        account_ceilings={"a": 8},
        user_guarantees={"u": 2},
        gpu_counts="1,2,4",
        waiting_power=-0.5,
        hysteresis=0.1,
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "account_ceilings = {a = -1}",
            "policy.account_ceilings.a: expected a whole number of GPUs from 0; got -1",
        ),
        ("user_ceilings = {a = 1.5}", "policy.user_ceilings.a: "),
        (
            'gpu_counts = "odd"',
            "policy.gpu_counts: expected any, powers-of-two, whole-nodes, multiples-of-8 (from 1 to 64), or a list",
        ),
        ("waiting_power = 5.0", "policy.waiting_power: expected a number from -4 to 4; got 5.0"),
        ("hysteresis = 2.0", "policy.hysteresis: expected a share from 0 to 1; got 2.0"),
        (
            "account_ceilings = {a = 4}\naccount_guarantees = {a = 8}",
            "policy.account_guarantees.a (8) must not be above account_ceilings.a (4)",
        ),
    ],
)
def test_an_unusable_setting_of_the_policy_is_refused(line, told):
    assert told in fault(LEAST + f"[policy]\n{line}\n")


def test_max_min_fairness_can_be_written():
    assert parsed(LEAST + "[policy]\npower = -inf").policy.power == -math.inf


def test_files_that_cannot_be_read(tmp_path):
    path = tmp_path / "polluxd.toml"
    with pytest.raises(ConfigError, match="no such file"):
        load_config(path)
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path)
    path.write_text("[slurm\n")
    with pytest.raises(ConfigError, match=r"not TOML.*line 1"):
        load_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


def test_a_password_in_a_file_open_to_others_is_refused(tmp_path):
    path = tmp_path / "polluxd.toml"
    path.write_text(LEAST.replace("pollux_daemon@", "pollux_daemon:hunter2@"))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        load_config(path)
    assert "hunter2" not in str(caught.value)
    path.chmod(0o600)
    load_config(path)


GATEWAY = LEAST + "\n[gateway]\n"


def test_the_gateway_needs_a_certificate_off_loopback():
    for listen in ("127.0.0.1:9851", "[::1]:9851", "localhost:1"):
        config = parsed(f'{GATEWAY}listen = "{listen}"\n')
        assert config.gateway.urls == (f"http://{listen}",)
    files = 'tls_certificate = "/c"\ntls_key = "/k"\n'
    for listen in ("0.0.0.0:9851", "[::]:9851", "head:9851", "10.0.0.1:9851"):
        assert "tls_certificate" in fault(f'{GATEWAY}listen = "{listen}"\n')
        assert parsed(f'{GATEWAY}listen = "{listen}"\n{files}').gateway.urls == (f"https://{listen}",)
    assert "given together" in fault(f'{GATEWAY}tls_key = "/k"\n')


def test_the_gateways_addresses():
    two = ["https://head1:9851", "https://head2.example.org"]
    assert parsed(f"{GATEWAY}addresses = {two}\n").gateway.urls == tuple(two)
    for wrong in ("head1:9851", "ftp://head1", "https://head1/path", "https://a,b", ""):
        assert "gateway.addresses: expected" in fault(f'{GATEWAY}addresses = ["{wrong}"]\n')


def test_the_gateway_logs_in_as_its_own_role():
    database = parsed(LEAST.replace("pollux_daemon@", "pollux_daemon:hunter2@")).database
    assert "hunter2" not in database.gateway_url(None)
    assert database.gateway_url(None).startswith("postgresql://pollux_gateway@")
    assert "passfile=%2Fetc%2Fg" in database.gateway_url(Path("/etc/g"))
    assert "pollux_daemon" not in database.gateway_url(Path("/etc/g"))


@pytest.mark.parametrize("section", ["slurm", "database", "cycle", "moves"])
def test_every_key_has_an_effect(section: str) -> None:
    package = Path(polluxd.__file__).parent
    read = "".join(p.read_text() for p in package.rglob("*.py") if "setting" not in p.name)
    # Read through properties of the section; the moves' state machine is handed the whole section as `limits`.
    behind = {"passfile": "url", "connect_timeout_s": "waits", "statement_timeout_s": "waits"}
    keys = [behind.get(info.key, info.key) for info in infos(section)]
    assert [k for k in keys if re.search(rf"\b(?:{section}|_?limits)\.{k}\b", read) is None] == []


def test_racks_by_node_list():
    racks = '[slurm]\ncluster = "c"\nracks = { r1 = "n[1-2]", r2 = "n3" }\n[database]\nurl = "postgresql://localhost/p"\n'
    assert racks_of(parsed(racks).slurm.racks) == {"n1": "r1", "n2": "r1", "n3": "r2"}
    assert "slurm.racks: node n2 is in two racks" in fault(racks.replace('"n3"', '"n[2-3]"'))
    assert "slurm.racks: rack r2: expected a node list" in fault(racks.replace('"n3"', '"n[3"'))
