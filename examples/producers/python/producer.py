"""What an order service does with its events; ../README.md explains the commands."""

import json
import sys
import uuid
from contextlib import closing
from datetime import datetime
from decimal import Decimal

from order_events import ORDER_PLACED, Publisher, order_placed
from uuid6 import uuid7

# A header of each type that this client can send.
HEADERS = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "attempt": 1,
    "serial": 2**40,
    "replay": False,
    "price": Decimal("3.14"),
    "placed": datetime(2026, 11, 30, 9, 15, 27),
    "digest": b"\x00\xff",
    "shop": {"id": 7, "tags": ["a", None]},
}


def orders(count):
    """Writes the outbox rows of so many orders, one a line."""
    for n in range(1, count + 1):
        lines = [(uuid7(), Decimal("2.000")), (uuid7(), Decimal(n) / 8), (uuid7(), Decimal("1E+2"))]
        print(order_placed(uuid7(), uuid7(), lines))


def relay():
    """Publishes the rows, in their order."""
    with closing(Publisher()) as publisher:
        for row in sys.stdin:
            body = row.rstrip("\n")
            event = json.loads(body)
            publisher.publish(event["event_name"], event["event_id"], body, HEADERS)
            # Only now: update outbox set published_at = now() where event_id = …
            print(event["event_id"], flush=True)


def broken():
    """Publishes what the service must refuse, and prints each body with what the reason says."""

    def event():
        return json.loads(order_placed(uuid7(), uuid7(), [(uuid7(), Decimal("2.5"))]))

    number = event()
    number["payload"]["lines"][0]["quantity"] = Decimal("2.5")
    naive = event() | {"occurred_at": datetime.now().isoformat()}
    hexadecimal = event() | {"event_id": uuid.uuid4().hex}
    mistakes = [
        (json.dumps(number, default=float), "payload.lines[0].quantity", "floating point `2.5`"),
        (json.dumps(naive), "occurred_at", "RFC 3339 time with an offset"),
        (json.dumps(hexadecimal), "event_id", "36 characters"),
        (str(event()), "body", "key must be a string"),
    ]
    with closing(Publisher()) as publisher:
        for body, place, rule in mistakes:
            publisher.publish(ORDER_PLACED, str(uuid7()), body, HEADERS)
            print(json.dumps({"body": body, "place": place, "rule": rule}))


def read(queue):
    """Takes a message out of a queue, and prints it as this client sees it."""
    with closing(Publisher()) as publisher:
        _, properties, body = publisher.channel.basic_get(queue, auto_ack=True)
    seen = {name: value for name, value in vars(properties).items() if name != "headers"}
    print(json.dumps({"properties": seen, "headers": properties.headers, "body": body.decode()}, default=repr))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["orders", count]:
            orders(int(count))
        case ["relay"]:
            relay()
        case ["broken"]:
            broken()
        case ["read", queue]:
            read(queue)
        case _:
            sys.exit("usage: producer.py orders COUNT | relay | broken | read QUEUE")
