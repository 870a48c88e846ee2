"""The key file: plain lines, and the table."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from router.access.key_file import UNNAMED, read_keys


def test_plain_lines_are_keys_without_limits() -> None:
    clients = read_keys("# ours\nsecond\n\n  third \nключ\n")
    assert list(clients) == ["second", "third", "ключ"]
    assert len({client.tenant for client in clients.values()}) == 3
    for key, client in clients.items():
        assert client.name == UNNAMED and key not in repr(client)
        assert client.requests_per_minute is None and client.max_priority is None and client.expires is None


TABLE = """
# who may do what
keys:
  - key: sk-one
    name: batch
    requests_per_minute: 600
    tokens_per_minute: 100000
    concurrent_requests: 16
    max_priority: -1
    weight: 2.5
    by_user: true
    expires: 2027-01-31
  - {key: [sk-two, sk-new], name: chat, expires: 2027-01-31T12:00:00+01:00}
"""


def test_a_table_names_clients_and_limits_them() -> None:
    clients = read_keys(TABLE)
    assert list(clients) == ["sk-one", "sk-two", "sk-new"]
    batch, chat = clients["sk-one"], clients["sk-two"]
    assert batch.name == "batch" and batch.requests_per_minute == 600 and batch.tokens_per_minute == 100_000
    assert batch.concurrent_requests == 16 and batch.max_priority == -1 and batch.weight == 2.5
    assert batch.user("ann") != batch.user("bob") and "ann" not in batch.user("ann") and batch.user(None) == ""
    assert chat.weight == 1 and chat.user("ann") == ""
    assert batch.expires == datetime(2027, 1, 31, tzinfo=UTC)
    assert chat.expires == datetime(2027, 1, 31, 12, tzinfo=timezone(timedelta(hours=1)))
    assert clients["sk-new"] == chat and chat.tenant != batch.tenant


def test_a_client_stays_the_same_when_its_key_changes() -> None:
    before, after = (read_keys(f"keys: [{{name: a, key: {key}}}]") for key in ("sk-old", "sk-new"))
    assert before["sk-old"].tenant == after["sk-new"].tenant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no key"),
        ("\n  \n# sk-one\n", "no key"),
        ("- key: sk-one\n  name: a", "'keys:'"),  # else "name: a" were a key that anybody can guess
        ("sk-one two", "space"),
        ("keys:", "`keys`"),
        ("keys: []", "`keys`"),
        ("keys: sk-one", "`keys`"),
        ("keys: [{name: a, key: sk-one}]\nweights: 1", "`keys`"),
        ("keys: [", r"YAML .* 1$"),
        ("keys: [sk-one]", "entry 1 .*table"),
        ("keys: [{name: a}]", r"entry 1 \(a\): key: "),
        ("keys: [{key: sk-one}]", "entry 1: name: "),
        ("keys: [{name: a b, key: sk-one}]", "entry 1: name: "),
        ("keys: [{name: a, key: ''}]", r"entry 1 \(a\): .*empty"),
        ("keys: [{name: a, key: [sk-one, ' x']}]", r"entry 1 \(a\): .*space"),
        ("keys: [{name: a, key: []}]", "entry 1"),
        ("keys: [{name: a, key: 12}]", "key: "),
        ("keys: [{name: a, key: sk-one, requests_per_minute: 0}]", "requests_per_minute: "),
        ("keys: [{name: a, key: sk-one, requests_per_minute: '9'}]", "requests_per_minute: "),
        ("keys: [{name: a, key: sk-one, concurrent_requests: true}]", "concurrent_requests: "),
        ("keys: [{name: a, key: sk-one, expires: soon}]", "expires: "),
        ("keys: [{name: a, key: sk-one, weight: 0}]", "weight: "),
        ("keys: [{name: a, key: sk-one, by_user: 1}]", "by_user: "),
        ("keys: [{name: a, key: sk-one, sk-two: 1}]", r"entry 1 \(a\): .*key, name,"),
        ("keys: [{name: a, key: sk-one, 1: 1}]", r"entry 1 \(a\): .*key, name,"),
        ("keys: [{name: a, key: sk-one}, {name: a, key: sk-two}]", r"entry 2: .*named a\b"),
        ("keys: [{name: a, key: sk-one}, {name: b, key: sk-one}]", r"entry 2 \(b\): its key"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_its_keys(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        read_keys(text)
    assert "sk-" not in str(error.value)
