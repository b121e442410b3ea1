"""Which host this is: told apart from its twins, the same after a reboot, and not given away."""

import multiprocessing

import pytest

from tasks.probe import host_id, probe_local

MACHINE = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def host(tmp_path):
    """A host of files: its machine id, network cards as Linux shows them, and where a random id is kept."""
    (tmp_path / "machine-id").write_text(f"{MACHINE}\n", encoding="ascii")
    add_card(tmp_path, "eth0", "02:00:00:00:00:01")
    return tmp_path


def add_card(host, name, address, *, kind="0", bus="pci0000:00"):
    """One network card."""
    card, device = host / "net" / name, host / "devices" / bus / name
    card.mkdir(parents=True)
    device.mkdir(parents=True)
    (card / "device").symlink_to(device)
    (card / "address").write_text(f"{address}\n", encoding="ascii")
    (card / "addr_assign_type").write_text(f"{kind}\n", encoding="ascii")


def identity(host):
    """The host's id."""
    return host_id(host / "machine-id", host / "net", host / "edgeloop" / "host_id")


def test_a_host_is_itself_and_gives_nothing_away(host):
    """Asked twice it says the same; neither the machine's id nor a card's address is in it."""
    first = identity(host)
    assert first == identity(host)
    assert len(first) == 16
    assert first not in MACHINE
    assert not (host / "edgeloop").exists()


def test_twins_are_told_apart(host):
    """Another machine id, or a cloned disk image in a machine with another card."""
    first = identity(host)
    (host / "net" / "eth0" / "address").write_text("02:00:00:00:00:02\n", encoding="ascii")
    clone = identity(host)
    (host / "machine-id").write_text("f" * 32, encoding="ascii")
    assert len({first, clone, identity(host)}) == 3


def test_what_comes_and_goes_is_no_part_of_it(host):
    """A random address as containers and Wi-Fi have, a card on USB, and a bridge without a device."""
    first = identity(host)
    add_card(host, "wlan0", "02:00:00:00:00:03", kind="1")
    add_card(host, "dock0", "02:00:00:00:00:04", bus="usb1")
    (host / "net" / "docker0").mkdir()
    assert identity(host) == first


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_without_a_machine_id_a_random_one_is_kept(host, content):
    """As in containers, where the file is missing or empty: the clone of the repository is the host."""
    (host / "machine-id").unlink()
    if content is not None:
        (host / "machine-id").write_text(content, encoding="ascii")
    first = identity(host)
    assert first == identity(host)
    kept = host / "edgeloop" / "host_id"
    assert first not in kept.read_text(encoding="ascii")
    kept.unlink()
    assert identity(host) != first


def test_two_that_make_the_random_id_at_once_agree(host):
    """Two stages of two builds begin together in a fresh container."""
    (host / "machine-id").unlink()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(identity, [host] * 16))) == 1


def test_where_nothing_can_be_kept_the_host_is_unknown(host):
    """A file where the folder should be."""
    (host / "machine-id").unlink()
    (host / "edgeloop").write_text("", encoding="ascii")
    assert identity(host) == "unknown"


def test_the_probe_says_which_host_it_is():
    """The same in each call, or every build would measure again."""
    assert probe_local()["host"] == host_id()
    assert probe_local() == probe_local()
