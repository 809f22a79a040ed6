"""torchrun's variables: a mistake is an error with the name, the value and the remedy."""

from __future__ import annotations

import socket

import pytest

from ladder.models.errors import UserError
from ladder.parallel import environment, launch
from tests.commands import Start

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", environment.RENDEZVOUS)
TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "x"}, ["RANK=x", "unset it"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1", "no whole number"]),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, ["RANK=9999", "no whole number"]),
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE=two"]),
        ({"LOCAL_RANK": "0.5"}, ["LOCAL_RANK=0.5"]),
        ({"WORLD_SIZE": "0"}, ["RANK=0 with WORLD_SIZE=0"]),
        ({"RANK": "1"}, ["RANK=1 without WORLD_SIZE"]),
        ({**TWO, "RANK": "5"}, ["RANK=5 with WORLD_SIZE=2", "below"]),
        ({**TWO, "RANK": "2"}, ["RANK=2 with WORLD_SIZE=2", "below"]),
        ({**TWO, "RANK": ""}, ["WORLD_SIZE=2 without RANK", "unset WORLD_SIZE"]),
        ({**TWO, "MASTER_ADDR": ""}, ["without MASTER_ADDR", "the machine of rank 0"]),
        ({**TWO, "MASTER_PORT": ""}, ["without MASTER_PORT", "a free port"]),
        ({**TWO, "MASTER_PORT": "x"}, ["MASTER_PORT=x"]),
        ({**TWO, "MASTER_PORT": "0"}, ["MASTER_PORT=0", "from 1 to 65535"]),
        ({**TWO, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "from 1 to 65535"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_waited_for(
    variables: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        launch.join("cpu")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "variables",
    [{}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "3"}],
)
def test_one_process_needs_no_meeting(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.join("cpu").type == "cpu"
    assert (launch.rank(), launch.world_size()) == (0, 1)


def test_a_port_in_use_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says so by a RuntimeError."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {**TWO, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_PORT={port} is in use") as error:
            launch.join("cpu")
    assert "\n" not in str(error.value)


def test_what_ranks_find_before_they_meet_is_said_once(start: Start) -> None:
    """As `--nproc 2 --device cuda` without a GPU is."""
    job = start(launch.run, launch.join, ("gpu",), 2)
    assert job.wait() == 2
    assert job.err == "error: --device=gpu must be auto, cpu or cuda\n"


def mistaken() -> int:
    launch.join("cpu")
    raise UserError("a mistake")


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_leave_once_they_have_met_add_nothing(start: Start, count: int) -> None:
    """Of eight that may leave while others still connect, gloo complains in two jobs of three."""
    jobs = [start(launch.run, mistaken, (), 8) for _ in range(count)]
    assert [job.wait() for job in jobs] == [2] * count
    assert [job.err for job in jobs] == ["error: a mistake\n"] * count


def test_ranks_that_share_a_mistake_add_nothing_under_torchrun(start: Start) -> None:
    """As from a script that sets torchrun's variables: rank 0 holds the store, by which the others
    learn that the mistake is told. torch prints pages where it is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {**TWO, "WORLD_SIZE": "4", "MASTER_PORT": str(port)}
    for _ in range(3):
        ranks = [start(launch._guarded, mistaken, (), environment={**world, "RANK": str(n)})
                 for n in range(4)]  # fmt: skip
        assert [rank.wait() for rank in ranks] == [2] * 4
        assert "".join(rank.err for rank in ranks) == "error: a mistake\n"
